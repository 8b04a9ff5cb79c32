"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from fusewright import norm
from fusewright.norm.norm_linear import reference as linear_reference
from fusewright.norm.row_norm import reference
from fusewright.norm.sinkhorn import reference as sinkhorn_reference
from fusewright_testkit.conformance import Operation, Package

EPS = 1e-6
Tensors = list[torch.Tensor | None]

PACKAGE = Package(
    "fusewright.norm",
    names=(
        "LayerNorm LayerNormLinear RMSNorm RMSNormGated RMSNormLinear add_layer_norm add_rms_norm "
        "layer_norm layer_norm_linear rms_norm rms_norm_gated rms_norm_linear sinkhorn_knopp"
    ),
    registered=(
        "add_layer_norm add_rms_norm layer_norm layer_norm_backward norm_linear "
        "norm_linear_backward rms_norm rms_norm_backward rms_norm_gated rms_norm_gated_backward "
        "sinkhorn_knopp sinkhorn_knopp_backward"
    ),
    without_triton=(
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "layer_norm(RMSNorm(8)(x)).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    ),
)


@dataclass(frozen=True)
class NormOp(Operation):
    """One public function: ``rows`` operands [..., N], then ``vectors`` operands [N]."""

    function: str
    rows: int
    vectors: int
    twin: Callable
    outputs: int = 1
    # Numbers of a row that the derivative keeps.
    statistics: int = 1
    form: str = ""

    small = (3, 20)
    tiny = (2, 5)
    several = (70, 33)
    growing = ((3, 20), (5, 20), (8, 20))
    empty = ((0, 5), (3, 0), (0, 0), (2, 0, 4), (0,))
    strided = (2, 3, 2, 24)
    gpu = ((3000, 1024), (64, 256), (7, 20000))

    @property
    def name(self) -> str:
        return self.function + self.form

    def public(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return getattr(norm, self.function)(*tensors, **{"eps": EPS} | options)

    def reference(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return getattr(reference, self.function)(*tensors, **{"eps": EPS} | options)

    def draw(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        vector_dtype: torch.dtype | None = None,
    ) -> Tensors:
        """Operands from normal distributions, the rows' with a mean of 1/2."""
        rows = [torch.randn(shape, device=device).add(0.5).to(dtype) for _ in range(self.rows)]
        vector_dtype = vector_dtype or dtype
        vectors = torch.randn(self.vectors, shape[-1], device=device).to(vector_dtype)
        return [*rows, *vectors]

    def kept(self, tensors: Tensors) -> int:
        rows, cols = tensors[0].shape
        # Of two outputs the second, which is normalised, is kept.
        return rows * (self.statistics + (cols if self.outputs == 2 else 0))


@dataclass(frozen=True)
class SinkhornOp(Operation):
    """sinkhorn_knopp in one domain: to what is registered a domain is a word."""

    name: str
    domain: str

    small = (3, 4, 4)
    tiny = (1, 3, 3)
    several = (37, 4, 4)
    growing = ((3, 4, 4), (5, 4, 4), (8, 4, 4))
    empty = ((0, 4, 4), (3, 0, 0), (0, 0), (2, 0, 3, 3))
    gpu = ((16384, 4, 4), (1024, 64, 64), (5000, 7, 7))
    gpu_dtypes = (torch.float32,)

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        options = dict(iterations=3, eps=EPS, domain=self.domain) | options
        return norm.sinkhorn_knopp(*tensors, **options)

    def reference(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        options = dict(iterations=3, eps=EPS, domain=self.domain) | options
        return sinkhorn_reference.sinkhorn_knopp(x, **options)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        return [torch.randn(shape, device=device).to(dtype)]

    def kept(self, tensors: Tensors) -> int:
        return 0


@dataclass(frozen=True)
class NormLinearOp(Operation):
    """layer_norm_linear or rms_norm_linear: x [..., N], the norm's vectors [N], the linear layer's
    weight [M, N] and its bias; without the vectors and the bias, x and weight.
    """

    function: str
    vectors: int
    twin: Callable
    affine: bool = True

    small = (3, 20, 6)
    tiny = (2, 5, 3)
    several = (70, 33, 40)
    growing = ((3, 20, 6), (5, 20, 6), (8, 20, 6))
    empty = ((0, 5, 3), (3, 5, 0), (0, 0, 0), (2, 0, 4, 3))
    strided = (2, 3, 2, 24, 16)
    gpu = ((3000, 512, 1536), (64, 256, 520), (2000, 1024, 512))

    @property
    def name(self) -> str:
        return self.function + ("" if self.affine else "-alone")

    def arguments(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The operands as the functions take them."""
        if self.affine:
            return [*tensors]
        x, weight = tensors
        return [x, *[None] * self.vectors, weight]

    def public(self, *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
        function = getattr(norm, self.function)
        return function(*self.arguments(tensors), **{"eps": EPS} | options)

    def reference(self, *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
        function = getattr(linear_reference, self.function)
        return function(*self.arguments(tensors), **{"eps": EPS} | options)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        """x with a mean of 1/2, and weights that keep its size."""
        *leading, cols, outputs = shape
        x = torch.randn(*leading, cols, device=device).add(0.5).to(dtype)
        weight = torch.randn(outputs, cols, device=device).div(max(cols, 1) ** 0.5).to(dtype)
        if not self.affine:
            return [x, weight]
        vectors = torch.randn(self.vectors, cols, device=device).to(dtype)
        return [x, *vectors, weight, torch.randn(outputs, device=device).to(dtype)]

    def autocast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The linear layer's weight and bias are cast."""
        of_linear = 1 + (self.vectors if self.affine else 0)
        return [*tensors[:of_linear], *(x.bfloat16() for x in tensors[of_linear:])]

    def kept(self, tensors: Tensors) -> int:
        return tensors[0].shape[0] * self.vectors


def torch_rms_norm(x, weight=None, eps=EPS):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def torch_add_rms_norm(x, residual, weight=None, eps=EPS):
    return torch_rms_norm(x + residual, weight, eps), x + residual


def torch_rms_norm_gated(x, gate, weight=None, eps=EPS):
    return torch_rms_norm(x, weight, eps) * F.silu(gate)


def torch_layer_norm(x, weight=None, bias=None, eps=EPS):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def torch_add_layer_norm(x, residual, weight=None, bias=None, eps=EPS):
    return torch_layer_norm(x + residual, weight, bias, eps), x + residual


def torch_layer_norm_linear(x, norm_weight, norm_bias, weight, bias, eps=EPS):
    return F.linear(torch_layer_norm(x, norm_weight, norm_bias, eps), weight, bias)


def torch_rms_norm_linear(x, norm_weight, weight, bias, eps=EPS):
    return F.linear(torch_rms_norm(x, norm_weight, eps), weight, bias)


ROW_NORMS = {
    op.name: op
    for op in (
        NormOp("rms_norm", rows=1, vectors=1, twin=torch_rms_norm),
        NormOp("add_rms_norm", rows=2, vectors=1, twin=torch_add_rms_norm, outputs=2),
        NormOp("rms_norm_gated", rows=2, vectors=1, twin=torch_rms_norm_gated),
        NormOp("layer_norm", rows=1, vectors=2, twin=torch_layer_norm, statistics=2),
        NormOp(
            "add_layer_norm",
            rows=2,
            vectors=2,
            twin=torch_add_layer_norm,
            outputs=2,
            statistics=2,
        ),
    )
}
SINKHORN = [SinkhornOp("sinkhorn_knopp", "linear"), SinkhornOp("sinkhorn_knopp-log", "log")]
NORM_LINEAR = {
    op.name: op
    for op in (
        NormLinearOp("layer_norm_linear", vectors=2, twin=torch_layer_norm_linear),
        NormLinearOp("rms_norm_linear", vectors=1, twin=torch_rms_norm_linear),
    )
}
OPERATIONS = ROW_NORMS | NORM_LINEAR | {"sinkhorn_knopp": SINKHORN[0]}
WITHOUT = [
    *(replace(op, vectors=0, form="-no-vectors") for op in ROW_NORMS.values()),
    *(replace(op, affine=False) for op in NORM_LINEAR.values()),
]
FORMS = {op.name: op for op in (*WITHOUT, SINKHORN[1])}
