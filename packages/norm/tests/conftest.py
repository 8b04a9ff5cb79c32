"""The ops of the package as data, so that a property of all of them is tested on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusewright import norm
from fusewright.norm.row_norm import reference
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

EPS = 1e-6
Tensors = list[torch.Tensor | None]


@dataclass(frozen=True)
class NormOp:
    """One public function: ``rows`` operands [..., N], then ``vectors`` operands [N]."""

    name: str
    rows: int
    vectors: int
    twin: Callable
    outputs: int = 1
    # Tensors of x's size that the derivative keeps.
    saved: int = 1

    def kernels(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def public(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return getattr(norm, self.name)(*tensors, **{"eps": EPS} | options)

    def reference(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return getattr(reference, self.name)(*tensors, **{"eps": EPS} | options)

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

    def check(self, tensors: Tensors, grads: Tensors | None = None, **options: Any) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        yardstick = Yardstick(partial(self.reference, **options), tensors, grads)
        yardstick.check(partial(self.kernels, **options))

    def first(self, outputs: Any) -> torch.Tensor:
        """The normalised rows among what the op returns."""
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def torch_rms_norm(x, weight=None, eps=EPS):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def torch_add_rms_norm(x, residual, weight=None, eps=EPS):
    return torch_rms_norm(x + residual, weight, eps), x + residual


def torch_rms_norm_gated(x, gate, weight=None, eps=EPS):
    return torch_rms_norm(x, weight, eps) * F.silu(gate)


def torch_layer_norm(x, weight=None, bias=None, eps=EPS):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


OPS = {
    op.name: op
    for op in (
        NormOp("rms_norm", rows=1, vectors=1, twin=torch_rms_norm),
        NormOp("add_rms_norm", rows=2, vectors=1, twin=torch_add_rms_norm, outputs=2),
        NormOp("rms_norm_gated", rows=2, vectors=1, twin=torch_rms_norm_gated, saved=2),
        NormOp("layer_norm", rows=1, vectors=2, twin=torch_layer_norm),
    )
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> NormOp:
    """Each op of the package; a module that is about one says so by its parametrization."""
    return OPS[request.param]


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No launch planned before the test, and none of its own kept: for tests that change tables."""
    if "triton" not in norm.available_backends():
        yield
        return
    from fusewright.norm.row_norm import launch as forward
    from fusewright.norm.row_norm import launch_backward as backward
    from fusewright.norm.sinkhorn import launch as sinkhorn

    plans = (
        forward.forward_plan,
        backward.backward_plan,
        sinkhorn.forward_plan,
        sinkhorn.backward_plan,
    )
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture
def few_programs(device: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, let one program add up many columns: it takes milliseconds a program,
    however little that does.
    """
    if device == "cpu":
        from fusewright.norm.row_norm import launch_backward

        add_parts = launch_backward.ADD_PARTS._replace(block_parts=4, block_cols=4096)
        small = launch_backward.BACKWARD_SMALL._replace(part_cols=512)
        monkeypatch.setattr(launch_backward, "ADD_PARTS", add_parts)
        monkeypatch.setattr(launch_backward, "BACKWARD_SMALL", small)


@pytest.fixture(params=["small", "rows", "wide"])
def scheme(
    request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Send tensors of every size to the kernels of one scheme: those of small tensors, of rows that
    fit in registers, and of wide rows with several blocks and shares.
    """
    from fusewright.norm.row_norm import launch, launch_backward

    if request.param != "small":
        monkeypatch.setattr(launch_backward, "fits_small", lambda rows, cols: False)
    if request.param == "wide":
        for table in ("FORWARD", "FORWARD_ADD", "FORWARD_LAYER"):
            monkeypatch.setattr(launch, table, ())
        monkeypatch.setattr(launch_backward, "BACKWARD", ())
        forward = launch.FORWARD_WIDE._replace(block_cols=64, num_warps=2)
        backward = launch_backward.BACKWARD_WIDE._replace(
            block_cols=64, num_warps=2, parts=3, block_rows=4, part_cols=32
        )
        monkeypatch.setattr(launch, "FORWARD_WIDE", forward)
        monkeypatch.setattr(launch_backward, "BACKWARD_WIDE", backward)
    return request.param
