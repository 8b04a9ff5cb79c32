"""The yardstick: a kernel may err, against fp64, at most about twice as much as eager torch does.

The truth is the op's reference on fp64 inputs. The allowance is the same reference on the inputs as
they are, with every operand of a matrix product rounded to the working dtype and fp32 accumulation.
Root-mean-square and largest error of the kernel may reach twice the allowance's, plus two units in
the last place of the row's maximum.

Where a result is few numbers, or cancels to nearly nothing, eager torch's error is one draw and may
be zero by luck. So the allowance is also that of fp32 itself: how far the truth moves when each
input and each result on the way moves, up or down at random, by half a unit in the last place of
fp32. Where a test asks for it, and operands of products are rounded to a narrow dtype, it is that
of as many other roundings: each operand moves evenly within half a unit in its last place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ULPS = 2
FACTOR = 2
MOVES = 8

Tensors = Sequence[torch.Tensor | None]
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


class RoundedProducts(TorchDispatchMode):
    """Round the operands of every matrix product, gradients' products included, to ``dtype`` or,
    for fp32, to TF32.

    Args:
        dtype: of 16 bits, or fp32.
        draws: what moves operands at random by as much as rounding to 16 bits would, in its place.

    Attributes:
        any: whether an operand was rounded to 16 bits.
    """

    def __init__(self, dtype: torch.dtype, draws: torch.Generator | None = None):
        super().__init__()
        self.dtype, self.draws = dtype, draws
        self.any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            args = (*args[:-2], *(self.rounded(operand) for operand in args[-2:]))
        return func(*args, **(kwargs or {}))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return x
        if self.dtype != torch.float32:
            self.any = True
            rounded = x.to(self.dtype).float()
            # What the dtype has is not rounded.
            return rounded if self.draws is None else x.where(x == rounded, self.scattered(x))
        if torch.backends.cuda.matmul.fp32_precision != "tf32":
            return x
        # TF32 keeps 10 of 23 mantissa bits, rounded to nearest with ties away from zero.
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        unit = torch.finfo(self.dtype).eps * torch.exp2(torch.frexp(x).exponent - 1.0)
        drawn = torch.rand(x.shape, generator=self.draws, dtype=x.dtype, device=self.draws.device)
        return x + unit * (drawn.to(x.device) - 0.5)


class MovedResults(TorchDispatchMode):
    """Move each fp64 number that an operation computes, a copied input's too, up or down by half a
    unit in the last place of fp32, and the operands and results of matrix products by half a unit
    of ``dtype``, to which autocast rounds those.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtype = torch.float32
        if func in PRODUCTS and self.dtype != torch.float32:
            dtype = self.dtype
            args = (*args[:-2], *(moved(operand, dtype) for operand in args[-2:]))
        results = func(*args, **(kwargs or {}))
        # Views and in-place operations return memory that others see.
        if any(returned.alias_info for returned in func._schema.returns):
            return results
        if isinstance(results, torch.Tensor):
            return moved(results, dtype)
        return tree_map_only(torch.Tensor, lambda x: moved(x, dtype), results)


class Yardstick:
    """Truth and allowance of one op on one set of inputs, forward and backward.

    Args:
        reference: the op in plain torch; takes the inputs, returns a tensor or a tuple of them.
        inputs: tensors (or None) as the kernel gets them; those of floating dtype get gradients.
        grads: gradients of the outputs, None for an output that is not used; drawn from a normal
            distribution where left out. Without any, only the outputs are held to the yardstick.
        dtype: the working dtype; that of the first input where left out.
        few: whether results are so few numbers, in 16 bits, that other roundings of the operands of
            products are drawn.
    """

    def __init__(
        self,
        reference: Callable,
        inputs: Tensors,
        grads: Tensors | None = None,
        dtype: torch.dtype | None = None,
        *,
        few: bool = False,
    ):
        self.inputs = inputs
        dtype = dtype or next(x.dtype for x in inputs if x is not None)
        if grads is None:
            with torch.no_grad():
                outputs = as_tuple(reference(*inputs))
            grads = [torch.randn_like(y) for y in outputs]
        self.grads = grads
        self.truth = self.run(reference, torch.float64)
        with RoundedProducts(dtype) as rounded:
            eager = self.run(reference)
        narrow = []
        if few and rounded.any:
            # Of its own: what a test draws next stays as it was.
            with RoundedProducts(dtype, torch.Generator().manual_seed(0)):
                narrow = [self.run(reference) for _ in range(MOVES)]
        with MovedResults():
            draws = [self.run(reference, torch.float64) for _ in range(MOVES)]
        self.allowed = [
            None if truth is None else Allowance.of(truth, eager, *others)
            for truth, eager, *others in zip(self.truth, eager, *draws, *narrow, strict=True)
        ]

    def run(self, op: Callable, dtype: torch.dtype | None = None) -> list[torch.Tensor | None]:
        """Outputs of ``op``, then the gradients of its inputs; all given tensors in ``dtype``."""
        leaves = [as_leaf(x, dtype) for x in self.inputs]
        grads = [g if dtype is None or g is None else g.to(dtype, copy=True) for g in self.grads]
        outputs = as_tuple(op(*leaves))
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
        asked = [x is not None and x.requires_grad and bool(pairs) for x in leaves]
        # What the used outputs do not depend on has a gradient of zeros.
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                [x for x, wanted in zip(leaves, asked, strict=True) if wanted],
                [g for _, g in pairs],
                materialize_grads=True,
            )
            if any(asked)
            else ()
        )
        gradients = [next(found) if wanted else None for wanted in asked]
        return [*(y.detach() for y in outputs), *gradients]

    def check(self, op: Callable) -> None:
        """Run ``op`` and hold each output and gradient against the yardstick."""
        outputs = len(self.grads)
        found = self.run(op)
        for index, (value, truth, allowed) in enumerate(
            zip(found, self.truth, self.allowed, strict=True)
        ):
            if truth is not None:
                inside = index < outputs
                name = f"output {index}" if inside else f"gradient of input {index - outputs}"
                assert_within(value, truth, allowed, name)


class Allowance(NamedTuple):
    """What a value may look like beside the truth: dtype, where it is finite, and its largest and
    typical error.
    """

    dtype: torch.dtype
    strange: torch.Tensor
    values: torch.Tensor
    largest: float
    typical: float

    @classmethod
    def of(cls, truth: torch.Tensor, eager: torch.Tensor, *draws: torch.Tensor) -> Allowance:
        strange = ~(truth.isfinite() & eager.isfinite())
        errors = [
            torch.where(strange, 0.0, (other.double() - truth).abs()) for other in (eager, *draws)
        ]
        errors = [error for error in errors if error.numel() and bool(error.isfinite().all())]
        return cls(
            eager.dtype,
            strange,
            eager.double(),
            max((error.max().item() for error in errors), default=0.0),
            max((root_mean_square(error) for error in errors), default=0.0),
        )


def assert_within(
    value: torch.Tensor, truth: torch.Tensor, allowed: Allowance, name: str = "value"
) -> None:
    """Fail unless ``value`` is about as near to the fp64 ``truth`` as eager torch is allowed to
    be.
    """
    assert value.shape == truth.shape, f"{name}: shape {value.shape}, expected {truth.shape}"
    assert value.dtype == allowed.dtype, f"{name}: dtype {value.dtype}, expected {allowed.dtype}"
    found, strange = value.double(), allowed.strange
    both_nan = found.isnan() & (allowed.values.isnan() | truth.isnan())
    same = both_nan | (found == allowed.values)
    assert bool(same[strange].all()), f"{name}: NaN or infinity elsewhere than in eager torch"
    assert bool(found[~strange].isfinite().all()), f"{name}: not finite where eager torch is"
    if bool(strange.all()):
        return

    truth = torch.where(strange, 0.0, truth)
    row_maximum = truth.abs().amax(-1, keepdim=True).expand_as(truth) if truth.ndim else truth.abs()
    info = torch.finfo(value.dtype)
    slack = ULPS * info.eps * torch.exp2(row_maximum.log2().floor()) + info.tiny
    error = torch.where(strange, 0.0, (found - truth).abs())
    excess = (error - slack).max().item() - FACTOR * allowed.largest
    assert excess <= 0, (
        f"{name}: largest error {error.max():.3e}, {excess:.3e} over the allowance "
        f"(eager torch's largest error is {allowed.largest:.3e})"
    )
    typical = root_mean_square(error)
    bound = FACTOR * allowed.typical + root_mean_square(slack)
    assert typical <= bound, (
        f"{name}: root-mean-square error {typical:.3e} over {bound:.3e} "
        f"(eager torch's is {allowed.typical:.3e})"
    )


def moved(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each number of an fp64 tensor moved up or down by half a unit in the last place of
    ``dtype``.
    """
    if x.dtype != torch.float64:
        return x
    down, up = factors(dtype)
    factor = torch.randint(0, 2, x.shape, device=x.device, dtype=x.dtype)
    return factor.mul_(up - down).add_(down).mul_(x)


@functools.cache
def factors(dtype: torch.dtype) -> tuple[float, float]:
    """One less and one more half a unit in the last place, in fp32, which rounds what is finer."""
    unit = torch.tensor(torch.finfo(dtype).eps, dtype=torch.float32)
    return (1 - unit / 2).item(), (1 + unit / 2).item()


def root_mean_square(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def as_leaf(x: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """A detached copy of x, in ``dtype`` if it is floating, that requires a gradient if it can.
    Strides stay.
    """
    if x is None or not x.is_floating_point():
        return x
    leaf = x.detach() if dtype is None else x.detach().to(dtype, copy=True)
    return leaf.requires_grad_()


def as_tuple(outputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
