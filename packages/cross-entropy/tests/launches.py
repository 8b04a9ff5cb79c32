"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import torch
from fusewright.cross_entropy.linear.launch import scaled, softmax_gradient_


def every_form() -> None:
    """With and without the gradient, of a large and a small vocabulary; gradients in fp32 and bf16
    times a number.
    """
    for vocabulary in (32000, 256):
        for with_gradient in (True, False):
            logits = torch.empty(4, vocabulary, dtype=torch.bfloat16)
            targets = torch.zeros(4, dtype=torch.int64)
            softmax_gradient_(logits, targets, with_gradient=with_gradient)
    for dtype in (torch.float32, torch.bfloat16):
        scaled(torch.empty(9, 32, dtype=dtype), torch.empty(()), torch.bfloat16)
