"""Reading the memory without writing it: a two-layer perceptron for every row and head."""

from __future__ import annotations

import torch

from ._checks import autocast
from ._module_checks import check_read
from .packing import cast
from .scan_reference import ACTIVATIONS
from .weights import MemoryWeights

Tensor = torch.Tensor


def memory_read(q: Tensor, weights: MemoryWeights, *, activation: str = "silu") -> Tensor:
    """M(q) = w2 act(w1 q + b1) + b2, in matrix products of torch.

    Args:
        q: ``[B, T, heads, D]``, fp32, bf16, fp16 or fp64.
        weights: ``[B, heads, ...]`` of any floating dtype; may be expanded.
        activation: "silu", "relu" or "gelu" (the exact one).

    Returns:
        ``[B, T, heads, D]`` in q's dtype, or in autocast's under autocast. Weights and each layer's
        result are rounded to that dtype, as in torch's own linear layers; products are summed in
        fp32.

    Differentiable in q and weights, any number of times.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: the shapes do not fit together, the devices differ, or the activation is
            unknown.
    """
    check_read(q, weights, activation)
    (q,) = autocast(q)
    w1, b1, w2, b2 = cast(weights, q.dtype)
    # Columns, then rows: the gradients of w1 and of w2's transpose come as they are packed.
    h = ACTIVATIONS[activation](w1 @ q.permute(0, 2, 3, 1) + b1.unsqueeze(-1))
    return (h.mT @ w2.mT + b2.unsqueeze(-2)).transpose(1, 2)
