"""Cross entropy over a large vocabulary, of which the logits are never all in memory.

    loss = mean over rows r with a target of  log sum_v exp(x_r . w_v) - x_r . w_target(r)

Rows are taken in chunks. The forward pass of a chunk makes its logits and, where a gradient will be
asked for, turns them into their own gradient g = softmax(logits) - one_hot(target) on the spot and
that into dx = g w and dw += g^T x: three large products for a chunk, and none computed twice. The
backward pass multiplies both by a number.

Logits are in the operands' dtype, as torch's product makes them; log-sum-exp, loss and the sum of
dw over chunks are fp32 (fp64 for fp64 operands). On a card g takes the logits' place in one launch,
where torch's operations read and write them six times (docs/decisions/0007).

torch 2.13 has ``torch.nn.functional.linear_cross_entropy``, which takes chunks too. It computes the
loss where the operands are fp32 or fp64. Of bf16 operands it returns a loss in bf16 and adds dw in
bf16, so there our chunks do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .devices import takes_launches
from .transformer_np_layers import without_autocast

IGNORED = -100
# Of a chunk's logits: an eighth of a GiB in bf16.
CHUNK_ELEMENTS = 2**26
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What products are computed in there; None where nothing says but their operands."""
    # Autocast knows no meta tensors.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


class _VocabularyLoss(torch.autograd.Function):
    """The sum over rows; gradients to x ``[N, d]`` and weight ``[V, d]``."""

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, dtype, chunks, with_gradient):
        matrix, wide = weight.to(dtype), torch.promote_types(dtype, torch.float32)
        counted = (targets != ignore_index).unsqueeze(-1)
        # Rows that count for nothing may hold anything.
        rows = torch.where(counted, x.to(dtype), 0.0).chunk(chunks)
        indices = torch.where(counted, targets.unsqueeze(-1), 0).chunk(chunks)
        dw = torch.zeros_like(weight, dtype=wide) if with_gradient else None
        log_p, dx = [], []
        for row, index in zip(rows, indices, strict=True):
            found, g = _log_p_and_gradient(row @ matrix.mT, index, wide, with_gradient)
            log_p.append(found)
            if dw is None:
                continue
            dx.append(g @ matrix)
            dw += _wide_product(g.mT, row, wide)
        if dw is not None:
            ctx.save_for_backward(torch.where(counted, torch.cat(dx), 0.0), dw)
            ctx.dtypes = x.dtype, weight.dtype
        return -torch.where(counted, torch.cat(log_p), 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dx, dw = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        scaled = ((dtotal * dx).to(x_dtype), (dtotal * dw).to(weight_dtype))
        return *scaled, None, None, None, None, None


def _log_p_and_gradient(
    logits: Tensor, index: Tensor, wide: torch.dtype, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """log p of each row's target, ``[N, 1]``, and p - one_hot(target), which may be the logits."""
    if _kernel_serves(logits):
        from ._vocabulary_kernels import softmax_gradient_

        with torch.cuda.device_of(logits):
            log_p = softmax_gradient_(logits, index.squeeze(-1), with_gradient=with_gradient)
        return log_p.unsqueeze(-1), logits
    log_p = torch.log_softmax(logits, -1, dtype=wide).gather(-1, index)
    if not with_gradient:
        return log_p, logits
    # p - 1 of the target from its logarithm: their difference in bf16 would be wrong.
    return log_p, torch.softmax(logits, -1).scatter_(-1, index, log_p.expm1().to(logits.dtype))


def _kernel_serves(logits: Tensor) -> bool:
    """Whether a launch of ours may take the logits."""
    return logits.is_cuda and logits.dtype in KERNEL_DTYPES and takes_launches(logits)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in a dtype at least as wide, where the device can without rounding in between."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def vocabulary_loss(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORED
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight), targets)`` without its logits.

    Args:
        x: ``[.., d]``, one row for each target.
        weight: ``[V, d]``, in x's dtype; under autocast both are taken in its dtype.
        targets: ``[..]``, int64, each below V or ``ignore_index``. They are not read for a check:
            others make the loss NaN, or fail as in torch.
        ignore_index: rows with this target count for nothing and get gradients of zero.

    Returns:
        The mean over rows that count: a scalar in fp32 (fp64 for fp64 operands), NaN where none
        does. Differentiable once in x and weight; nothing waits for the device.

    Raises:
        TypeError: x or weight is not floating point, or targets not int64.
        ValueError: shapes, dtypes or devices do not go together.
    """
    _check(x, weight, targets)
    dtype = autocast_dtype(x.device) or weight.dtype
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    chunks = max(1, -(-len(x) * len(weight) // CHUNK_ELEMENTS))
    with without_autocast(x.device):
        if _torchs_is_exact(dtype):
            return _torchs(x.to(dtype), weight.to(dtype), targets, ignore_index, chunks)
        with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        total = _VocabularyLoss.apply(
            x, weight, targets, ignore_index, dtype, chunks, with_gradient
        )
        return _mean(total, targets, ignore_index)


def _torchs_is_exact(dtype: torch.dtype) -> bool:
    """Whether torch has a function of its own, and it loses nothing in this dtype."""
    return hasattr(F, "linear_cross_entropy") and dtype in (torch.float32, torch.float64)


def _mean(total: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Over the rows that count: NaN where none does, through which gradients of zero still pass."""
    count = (targets != ignore_index).sum()
    nothing = torch.zeros_like(total).masked_fill(count == 0, torch.nan)
    return total / count.clamp(min=1) + nothing


def _torchs(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunks: int) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=max(1, -(-len(x) // chunks)), allow_retain_graph=True
    )
    total = F.linear_cross_entropy(
        x, weight, targets, ignore_index=ignore_index, reduction="sum", options=options
    )
    return _mean(total, targets, ignore_index)


def _check(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"wanted x and weight in floating point; got {x.dtype} and {weight.dtype}")
    if targets.dtype != torch.int64:
        raise TypeError(f"wanted targets in int64; got {targets.dtype}")
    if weight.ndim != 2 or x.shape != (*targets.shape, weight.shape[1]):
        raise ValueError(
            f"wanted x [.., d], weight [V, d], targets [..]; got {list(x.shape)}, "
            f"{list(weight.shape)}, {list(targets.shape)}"
        )
    if not x.device == weight.device == targets.device:
        raise ValueError(
            "wanted x, weight and targets on one device; got them on "
            f"{x.device}, {weight.device} and {targets.device}"
        )
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ValueError(f"wanted x and weight in one dtype; got {x.dtype} and {weight.dtype}")
