r"""Cross entropy over a large vocabulary, of which the logits are never all in memory.

    loss = mean over rows r with a target of  log sum_v exp(x_r . w_v) - x_r . w_target(r)

or the sum over these rows.

x is [.., d], one row for each target; weight is [V, d]. Rows are taken in chunks. The forward pass
of a chunk makes its logits and, where a gradient is needed, overwrites them by their own
gradient g = softmax(logits) - one_hot(target), and computes dx = g w and dw += g^T x:
three large products for a chunk, and none computed twice. Saved for the backward pass: dx and dw,
which it multiplies by a number.

Logits are in the operands' dtype, as torch's product makes them; log-sum-exp, loss and the sum of
dw over chunks are fp32 (fp64 for fp64 operands). A dw in fp32 may take more memory than all logits
in bf16: then there is one chunk, and its dw is in the weight's dtype. On a GPU g takes the logits'
place in one launch, where torch's operations read and write them six times (docs/decisions/0007).

That launch is a function inside the derivative and no registered op: it overwrites its argument,
and an op that returned g beside the logits would hold two chunks. torch.compile traces the chunk in
torch's operations instead, which it fuses.

torch 2.13 has ``torch.nn.functional.linear_cross_entropy``, which takes chunks too. It computes the
loss where the operands are fp32 or fp64. Of bf16 operands it returns a loss in bf16 and adds dw in
bf16, so there our chunks do.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .._core.backends import Backend, check_backend, uses_triton
from .._core.checks import (
    check_device,
    check_dtype,
    check_floating,
    check_strided,
    checked_count,
)
from .._core.launches import cdiv
from .._core.precision import autocasts, without_autocast
from . import launch, reference

Tensor = torch.Tensor
Reduction = Literal["mean", "sum"]

# Of a chunk's logits: a quarter of a GiB in bf16. Source: docs/decisions/0007-chunks-h200.csv.
CHUNK_ELEMENTS = 2**27
# A chunk reads and writes dw, 8 V d bytes beside 6 rows V d operations: with fewer rows than these
# memory would bind, so a large vocabulary has larger chunks.
CHUNK_ROWS = 4096


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over rows; gradients to x ``[N, d]`` and weight ``[V, d]``."""

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, dtype, chunks, with_gradient, launches):
        matrix, wide = weight.to(dtype), torch.promote_types(dtype, torch.float32)
        counted = targets != ignore_index
        # Rows that count for nothing may hold anything.
        rows = torch.where(counted.unsqueeze(-1), x.to(dtype), 0.0).chunk(chunks)
        indices = torch.where(counted, targets, 0).chunk(chunks)
        # One chunk's product is dw. In fp16 a sum over rows, not yet a mean, may overflow.
        if chunks == 1 and weight.dtype == dtype == torch.bfloat16:
            wide = dtype
        dw = None
        log_p, dx = [], []
        for row, index in zip(rows, indices, strict=True):
            found, g = _log_p_and_gradient(row @ matrix.mT, index, with_gradient, launches)
            log_p.append(found)
            if with_gradient:
                dx.append(g @ matrix)
                dw = _product(g.mT, row, wide) if dw is None else _add_product_(dw, g.mT, row)
        if with_gradient:
            ctx.save_for_backward(torch.where(counted.unsqueeze(-1), torch.cat(dx), 0.0), dw)
            ctx.dtypes, ctx.launches = (x.dtype, weight.dtype), launches
        return -torch.where(counted, torch.cat(log_p), 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dx, dw = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        if ctx.launches and type(dx) is Tensor and not torch.compiler.is_compiling():
            scaled = launch.scaled
        else:
            scaled = reference.scaled
        return (
            scaled(dx, dtotal, x_dtype),
            scaled(dw, dtotal, weight_dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _log_p_and_gradient(
    logits: Tensor, index: Tensor, with_gradient: bool, launches: bool
) -> tuple[Tensor, Tensor]:
    """log p of each row's target, ``[N]``, and p - one_hot(target), which may be the logits."""
    if _takes(logits, launches):
        return launch.softmax_gradient_(logits, index, with_gradient=with_gradient), logits
    return reference.softmax_gradient(logits, index, with_gradient=with_gradient)


def _takes(x: Tensor, launches: bool) -> bool:
    """Whether x goes to the launches: not a tensor that only stands for another."""
    return launches and type(x) is Tensor and not torch.compiler.is_compiling()


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in a dtype at least as wide: not rounded to theirs where the device can."""
    if a.is_cuda and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total += a @ b``, added before anything is rounded where the device can, and without
    another tensor of total's size.
    """
    # torch.compile does not know addmm with another dtype.
    if not total.is_cuda or total.dtype == a.dtype or torch.compiler.is_compiling():
        return total.add_(_product(a, b, total.dtype))
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight), targets)`` without its logits.

    Args:
        x: ``[.., d]``, one row for each target, in fp32, bf16, fp16 or fp64.
        weight: ``[V, d]``, in x's dtype; under autocast both are taken in its dtype, but for fp64.
        targets: ``[..]``, int64, each below V or ``ignore_index``. They are not read for a check:
            others make the loss NaN, or fail as in torch.
        ignore_index: rows with this target count for nothing and get gradients of zero.
        reduction: "mean" over the rows that count, or their "sum": where a batch comes in parts, of
            which one may have other counts than the next.
        backend: "auto" takes the kernel for CUDA tensors and plain torch for CPU tensors, and on
            either torch's own function for fp32 and fp64 where torch has one; "reference" takes
            plain torch; "triton" takes the kernel, and raises where it cannot serve. While
            torch.compile traces, each takes torch's operations.

    Returns:
        A scalar in fp32 (fp64 for fp64 operands); where no row counts the mean is NaN, the sum 0.
        Differentiable once in x and weight; nothing waits for the device.

    Raises:
        TypeError: x or weight is not a floating tensor, targets not int64, or ignore_index no whole
            number.
        ValueError: shapes, dtypes or devices do not agree, or reduction is another word.
        RuntimeError: backend is "triton" and the kernel cannot serve this call.
    """
    check_backend(backend)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be one of {get_args(Reduction)}, got {reduction!r}")
    casts = _checked(x, weight, targets)
    ignore_index = checked_count("ignore_index", ignore_index, lowest=torch.iinfo(torch.int64).min)
    dtype = torch.get_autocast_dtype(x.device.type) if casts else weight.dtype
    torchs = backend != "triton" and _torchs_is_exact(dtype)
    launches = not torchs and uses_triton(x, backend)
    x, targets = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)
    chunks = _chunks(len(x), *weight.shape, whole=launches and dtype == torch.bfloat16)
    with without_autocast(x.device):
        if torchs:
            total = _torchs(x.to(dtype), weight.to(dtype), targets, ignore_index, chunks)
        else:
            with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            total = _LinearCrossEntropy.apply(
                x, weight, targets, ignore_index, dtype, chunks, with_gradient, launches
            )
        return total if reduction == "sum" else _mean(total, targets, ignore_index)


def _chunks(rows: int, vocabulary: int, width: int, *, whole: bool) -> int:
    """Into how many the rows are cut; ``whole``: not at all where that takes no more memory."""
    # All logits in bf16 against dw in fp32, which a sum over chunks needs.
    if whole and 2 * rows * vocabulary <= 4 * width * vocabulary:
        return 1
    return max(1, min(cdiv(rows * vocabulary, CHUNK_ELEMENTS), cdiv(rows, CHUNK_ROWS)))


def _torchs_is_exact(dtype: torch.dtype) -> bool:
    """Whether torch has a function of its own, and it loses nothing in this dtype."""
    return hasattr(F, "linear_cross_entropy") and dtype in (torch.float32, torch.float64)


def _mean(total: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Over the rows that count: NaN where none does, through which gradients of zero still pass."""
    count = (targets != ignore_index).sum()
    nothing = torch.zeros_like(total).masked_fill(count == 0, torch.nan)
    return total / count.clamp(min=1) + nothing


def _torchs(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunks: int) -> Tensor:
    # It multiplies a row that counts for nothing with zero, which NaN outlasts.
    x = torch.where((targets != ignore_index).unsqueeze(-1), x, 0.0)
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=max(1, cdiv(len(x), chunks)), allow_retain_graph=True
    )
    return F.linear_cross_entropy(
        x, weight, targets, ignore_index=ignore_index, reduction="sum", options=options
    )


def _checked(x: Tensor, weight: Tensor, targets: Tensor) -> bool:
    """Whether autocast takes x and weight in its dtype: as in torch, not fp64."""
    check_floating("x", x)
    check_floating("weight", weight)
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    check_strided("targets", targets)
    if weight.ndim != 2 or x.shape != (*targets.shape, weight.shape[1]):
        raise ValueError(
            f"x, weight and targets must be [.., d], [V, d] and [..], got {list(x.shape)}, "
            f"{list(weight.shape)} and {list(targets.shape)}"
        )
    check_device("weight", weight, "x", x)
    check_device("targets", targets, "x", x)
    casts = autocasts(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    if not casts:
        check_dtype("weight", weight, "x", x)
    return casts
