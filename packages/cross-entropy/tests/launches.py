"""Calls that launch the kernel, for the compile tests: tensors are never read."""

from __future__ import annotations

import torch
from fusewright.cross_entropy.linear.launch import softmax_gradient_


def softmax_gradients() -> None:
    """With and without the gradient, of a large and a small vocabulary."""
    for vocabulary in (32000, 256):
        for with_gradient in (True, False):
            logits = torch.empty(4, vocabulary, dtype=torch.bfloat16)
            targets = torch.zeros(4, dtype=torch.int64)
            softmax_gradient_(logits, targets, with_gradient=with_gradient)
