"""Reading a memory of two layers in plain torch: the specification, the oracle, and the CPU
implementation. Weights and each layer's result are in q's dtype, as in torch's own linear layers.
"""

from __future__ import annotations

from torch import Tensor

from ..common.reference import ACTIVATIONS
from ..common.weights import MemoryWeights


def memory_read(q: Tensor, weights: MemoryWeights, activation: str) -> Tensor:
    """M(q) for q [B, T, heads, D] and weights in its dtype."""
    w1, b1, w2, b2 = weights
    # Columns, then rows: the gradients of w1 and of w2's transpose come as they are packed.
    h = ACTIVATIONS[activation](w1 @ q.permute(0, 2, 3, 1) + b1.unsqueeze(-1))
    return (h.mT @ w2.mT + b2.unsqueeze(-2)).transpose(1, 2)
