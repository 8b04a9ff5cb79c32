"""The ops of the package as data, so that a property of all of them is tested on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusewright import feed_forward
from fusewright.feed_forward.gating import reference
from fusewright.feed_forward.gating.silu_mul import silu_mul, silu_mul_halves
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class GatingOp:
    """SiLU gating of ``operands`` tensors, which are ``widening`` times as wide as the result."""

    name: str
    public: Callable
    operands: int
    widening: int
    twin: Callable

    def kernels(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def reference(self, *tensors: torch.Tensor) -> torch.Tensor:
        return getattr(reference, self.name)(*tensors)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an operand for a result of this shape."""
        return (*shape[:-1], self.widening * shape[-1])

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        """Operands for a result of this shape, from a normal distribution twice as wide."""
        shape = self.shape(shape)
        return [2 * torch.randn(shape, device=device).to(dtype) for _ in range(self.operands)]

    def check(self, tensors: Tensors, dy: torch.Tensor | None = None) -> None:
        """Hold the kernels' output and gradients against the yardstick."""
        yardstick = Yardstick(self.reference, tensors, None if dy is None else [dy])
        yardstick.check(self.kernels)

    def first(self, y: torch.Tensor) -> torch.Tensor:
        """The one output."""
        return y


def torch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def torch_silu_mul_halves(joint: torch.Tensor) -> torch.Tensor:
    return torch_silu_mul(*joint.chunk(2, -1))


OPS = {
    op.name: op
    for op in (
        GatingOp("silu_mul", silu_mul, operands=2, widening=1, twin=torch_silu_mul),
        GatingOp(
            "silu_mul_halves", silu_mul_halves, operands=1, widening=2, twin=torch_silu_mul_halves
        ),
    )
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> GatingOp:
    """Each op of the package; a module that is about one says so by its parametrization."""
    return OPS[request.param]


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No launch planned before the test, and none of its own kept: for tests that change tables."""
    if "triton" not in feed_forward.available_backends():
        yield
        return
    from fusewright.feed_forward.gating.launch import backward_plan, forward_plan

    for plan in (forward_plan, backward_plan):
        plan.cache_clear()
    yield
    for plan in (forward_plan, backward_plan):
        plan.cache_clear()


@pytest.fixture
def many_programs(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs so small that few elements take several, which begin amid rows."""
    from fusewright.feed_forward.gating import launch

    for table in ("FORWARD", "BACKWARD"):
        config = getattr(launch, table)._replace(block=64, num_warps=1)
        monkeypatch.setattr(launch, table, config)
