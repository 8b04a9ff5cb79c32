"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fusewright import mixture_head
from fusewright.mixture_head.common.scale import checked_scale
from fusewright.mixture_head.heads import reference as heads_reference
from fusewright.mixture_head.mixture import reference as mixture_reference
from fusewright_testkit.conformance import Operation, Package

Tensors = list[torch.Tensor]
SCALE = dict(scale="log_sigma", log_sigma_range=(-7.0, 5.0), eps=1e-3)

PACKAGE = Package(
    "fusewright.mixture_head",
    names=(
        "GaussianMixtureHead Scale grouped_heads mixture_cdf mixture_log_likelihood mixture_mean "
        "mixture_nll mixture_quantiles mixture_sample mixture_variance"
    ),
    registered=(
        "grouped_heads grouped_heads_backward mixture_backward mixture_log_likelihood mixture_nll "
        "recomputed_heads recomputed_heads_backward"
    ),
    without_triton=(
        "head = GaussianMixtureHead(4, 6, 3)\n"
        "head.loss(head(torch.randn(5, 4)), torch.randn(5, 1)).backward()\n"
        "assert all(p.grad.isfinite().all() for p in head.parameters())\n"
    ),
)


@dataclass(frozen=True)
class HeadOp(Operation):
    """One public function of differentiable tensors."""

    function: str
    operands: Callable[..., Tensors]
    options: Mapping[str, Any] = field(default_factory=dict)
    # Whether the first two rows are masked.
    masked: bool = False

    small = (4, 5)
    tiny = (3, 2)
    several = (70, 11)
    # No other axis has one of these lengths: dynamo would take it for the same.
    growing = ((7, 5), (9, 5), (13, 5))
    gpu = ((20000, 10), (300, 10), (1, 10))

    @property
    def empty(self) -> tuple[tuple[int, ...], ...]:
        # A mixture has at least one component, heads may be of rows without columns.
        return ((0, 4), (2, 0, 4), *[(3, 0)] * (self.function == "grouped_heads"))

    @property
    def name(self) -> str:
        options = ("recompute" if value is True else value for value in self.options.values())
        return "-".join((self.function, *options, *["masked"] * self.masked))

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return getattr(mixture_head, self.function)(*tensors, **self.given(tensors) | options)

    def reference(
        self, *tensors: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        if self.function == "grouped_heads":
            return heads_reference.grouped_heads(*tensors)
        given = self.given(tensors) | options
        mask = given.pop("mask", mask)
        form = checked_scale(**SCALE | given)
        return getattr(mixture_reference, self.function)(*tensors, mask, **form._asdict())

    def given(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        if not self.masked:
            return dict(self.options)
        y = tensors[1]
        return dict(self.options) | dict(mask=torch.arange(len(y), device=y.device) > 1)

    def kept(self, tensors: Sequence[torch.Tensor]) -> int | None:
        return 0 if "recompute" in self.options else None

    def draw(self, *shape_dtype_device: Any, **options: Any) -> Tensors:
        return self.operands(*shape_dtype_device, **options)

    def autocast(self, tensors: Tensors) -> Tensors:
        """The dense product of heads alone is cast."""
        if self.function != "grouped_heads":
            return tensors
        return [*(x.bfloat16() for x in tensors[:2]), tensors[2]]


def mixtures(
    shape: tuple[int, ...] = (6, 5),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    y_dtype: torch.dtype | None = None,
) -> Tensors:
    """params ``[*shape, 3]`` and y, in fp32 beside short ones, all from normal distributions."""
    params = torch.randn(*shape, 3, device=device).to(dtype)
    y_dtype = y_dtype or torch.promote_types(dtype, torch.float32)
    return [params, (1.5 * torch.randn(shape[:-1], device=device)).to(y_dtype)]


def head_weights(
    shape: tuple[int, ...] = (6, 5),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stored: int = 12,
    heads: int = 2,
) -> Tensors:
    """x ``shape``, and the weights of heads over it."""
    width = shape[-1]
    x = torch.randn(shape, device=device).to(dtype)
    hidden = torch.randn(heads * stored, width, device=device).to(dtype)
    output = torch.randn(heads, stored, 3, device=device)
    return [x, hidden / max(width, 1) ** 0.5, output.to(torch.promote_types(dtype, output.dtype))]


MIXTURES = {name: HeadOp(name, mixtures) for name in ("mixture_nll", "mixture_log_likelihood")}
HEADS = {
    op.name: op
    for op in (
        HeadOp("grouped_heads", head_weights),
        HeadOp("grouped_heads", head_weights, {"recompute": True}),
    )
}
OPERATIONS = MIXTURES | HEADS
SOFTPLUS = [replace(op, options={"scale": "softplus"}) for op in MIXTURES.values()]
FORMS = {op.name: op for op in (*SOFTPLUS, *(replace(op, masked=True) for op in SOFTPLUS))}
