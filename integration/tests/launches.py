"""What the tests of kernels compile for cards that are not there."""

from __future__ import annotations

import torch
from fusewright_models._fixed_point_kernels import advance, undo
from fusewright_models._vocabulary_kernels import softmax_gradient_


def softmax_gradients() -> None:
    """With and without the gradient, of a large and a small vocabulary."""
    for vocabulary in (32000, 256):
        for with_gradient in (True, False):
            logits = torch.empty(4, vocabulary, dtype=torch.bfloat16)
            targets = torch.zeros(4, dtype=torch.int64)
            softmax_gradient_(logits, targets, with_gradient=with_gradient)


def steps_of_states() -> None:
    """One on and one back, with and without halving."""
    delta = torch.empty(4096)
    state = torch.zeros(4096, dtype=torch.int32)
    saturated = torch.zeros((), dtype=torch.bool)
    for earlier in (None, state):
        _, _, dropped = advance(state, earlier, delta, 0.5, 2.0**20, saturated)
        undo(state, earlier, delta, 0.5, 2.0**20, dropped)
