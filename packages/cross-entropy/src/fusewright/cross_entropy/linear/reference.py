"""linear_cross_entropy in plain torch: the specification, the yardstick of the tests, and what a
chunk of rows goes through on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide, wide_dtype

Tensor = torch.Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The mean or the sum over rows that count, of all logits at once: in the operands' dtype, what
    follows in fp32 (in fp64 for fp64 operands).
    """
    logits = wide(F.linear(x, weight)).flatten(0, -2)
    return F.cross_entropy(
        logits, targets.flatten(), ignore_index=ignore_index, reduction=reduction
    )


def softmax_gradient(
    logits: Tensor, targets: Tensor, *, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """log p of each row's target, ``[N]``, in fp32 (in fp64 for fp64 logits), and p -
    one_hot(target), ``[N, V]``, in the logits' dtype, which are the logits where no gradient is
    wanted.
    """
    index = targets.unsqueeze(-1)
    log_p = torch.log_softmax(logits, -1, dtype=wide_dtype(logits)).gather(-1, index)
    if with_gradient:
        # p - 1 of the target from its logarithm: their difference in bf16 would be wrong.
        below = log_p.expm1().to(logits.dtype)
        logits = torch.softmax(logits, -1).scatter_(-1, index, below)
    return log_p.squeeze(-1), logits


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x, a matrix, times a number, computed in the wider dtype of both and rounded once."""
    # As a matrix, too: torch would round a number without axes to x's dtype.
    return (x * factor.reshape(1, 1)).to(dtype)
