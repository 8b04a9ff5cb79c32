"""The ops of the package as data, so that a property of both is tested on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fusewright import attention
from fusewright.attention.positions import reference as rotary_reference
from fusewright.attention.rectangular import reference as rectangular_reference
from fusewright.attention.window import reference as window_reference
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

SCALE = 0.3
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class AttentionOp:
    """One public function of q [B, Nq, H, D] and k and v [B, M, H, D]."""

    name: str

    def kernels(self, q, k, v, key_lengths=None, **options: Any) -> Any:
        """The Triton kernels."""
        return self.public(q, k, v, key_lengths, **{"backend": "triton"} | options)

    def public(self, q, k, v, key_lengths=None, **options: Any) -> Any:
        options = {"scale": SCALE} | options
        return getattr(attention, self.name)(q, k, v, key_lengths=key_lengths, **options)

    def reference(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return getattr(rectangular_reference, self.name)(*tensors, **{"scale": SCALE} | options)

    def check(self, tensors: Tensors, lengths: list[int] | None = None, **options: Any) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        key_lengths = None if lengths is None else torch.tensor(lengths, device=tensors[0].device)
        inputs = [*tensors, key_lengths]
        yardstick = Yardstick(partial(self.reference, **options), inputs)
        yardstick.check(partial(self.kernels, **options))

    def draw(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensors:
        """q, k and v of a (B, Nq, M, H, D) from normal distributions."""
        batches, queries, keys, heads, width = shape
        rows = (queries, keys, keys)
        return [torch.randn(batches, n, heads, width, device=device).to(dtype) for n in rows]

    def first(self, outputs: Any) -> torch.Tensor:
        """o among what the op returns."""
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


@dataclass(frozen=True)
class WindowOp(AttentionOp):
    """One public function of q [B, Nq, H, D], the last rows of a sequence, and k and v
    [B, T, H, D].
    """

    window: int = 3
    prefix: int = 2

    def kernels(self, *tensors: torch.Tensor, **options: Any) -> Any:
        return self.public(*tensors, **{"backend": "triton"} | options)

    def public(self, *tensors: torch.Tensor, **options: Any) -> Any:
        options = dict(scale=SCALE, window=self.window, prefix=self.prefix) | options
        return getattr(attention, self.name)(*tensors, **options)

    def reference(self, *tensors: torch.Tensor, **options: Any) -> Any:
        options = dict(scale=SCALE, window=self.window, prefix=self.prefix) | options
        return getattr(window_reference, self.name)(*tensors, **options)

    def check(self, tensors: Tensors, grads: Tensors | None = None, **options: Any) -> None:
        yardstick = Yardstick(partial(self.reference, **options), tensors, grads)
        yardstick.check(partial(self.kernels, **options))


@dataclass(frozen=True)
class RotaryOp:
    """rotary of rows [B, T, K, H, D] and optionally of a second operand and a prefix; cos
    and sin are those of the tokens' positions.
    """

    base: float = 100.0

    def kernels(self, *tensors: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def public(self, rows, beside=None, prefix=None, **options: Any) -> torch.Tensor:
        angles = self.angles(rows)
        return attention.rotary(rows, *angles, beside=beside, prefix=prefix, **options)

    def reference(self, rows, beside=None, prefix=None) -> torch.Tensor:
        return rotary_reference.rotary(rows, *self.angles(rows), beside, prefix)

    def angles(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of position / base^(2 i / D), [T, D / 2]."""
        tokens, width = rows.shape[1], rows.shape[-1]
        steps = torch.arange(0, width, 2, device=rows.device, dtype=torch.float64)
        positions = torch.arange(tokens, device=rows.device, dtype=torch.float64)
        angles = positions.unsqueeze(-1) * self.base ** (-steps / width)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)

    def check(self, tensors: list[torch.Tensor | None]) -> None:
        """Hold the kernel's output and gradients against the yardstick."""
        Yardstick(self.reference, tensors).check(self.kernels)

    def draw(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        beside: bool = True,
        prefix: tuple[int, ...] | None = (3,),
    ) -> list[torch.Tensor | None]:
        """Rows, a second operand, and a prefix with these leading axes; None for what is absent."""
        _, _, *row = shape
        before = None if prefix is None else (*prefix, *row)
        shapes = (shape, shape if beside else None, before)
        return [None if x is None else torch.randn(x, device=device).to(dtype) for x in shapes]

    def first(self, joint: torch.Tensor) -> torch.Tensor:
        """The one output."""
        return joint


OPS = {
    op.name: op
    for op in map(AttentionOp, ("rectangular_attention", "rectangular_attention_with_lse"))
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> AttentionOp:
    """Each op of the package; a module that is about one says so by its parametrization."""
    return OPS[request.param]


@pytest.fixture
def lse_op() -> AttentionOp:
    """The op that returns the log-sum-exp too."""
    return OPS["rectangular_attention_with_lse"]


@pytest.fixture
def window_op() -> WindowOp:
    """Attention to a window and a prefix, with the log-sum-exp."""
    return WindowOp("sliding_window_attention_with_lse")


@pytest.fixture
def rotary_op() -> RotaryOp:
    """Rotary positions."""
    return RotaryOp()


@pytest.fixture
def small_programs(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of rotary that begin amid the rows of a token, and loop over the batch."""
    from fusewright.attention.positions import launch

    monkeypatch.setattr(launch, "ROTARY", launch.ROTARY._replace(pairs=64, batches=2))


@pytest.fixture(params=[(32, 16), (16, 32)])
def tiles(
    request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Queries and keys of a tile in the kernels of a band."""
    from fusewright.attention.common.problem import TileConfig
    from fusewright.attention.window import launch

    queries, keys, *descriptors = request.param
    line = TileConfig(128, 4, queries, keys, num_warps=4, num_stages=2)
    if descriptors:
        line = line._replace(hopper=True, descriptors=True)
    for table in ("FORWARD", "DQ", "DKDV"):
        monkeypatch.setattr(launch, table, (line,))
    return request.param


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No launch planned before the test, and none of its own kept: for tests that change tables."""
    from fusewright.attention.positions import launch as rotary
    from fusewright.attention.rectangular import launch as forward
    from fusewright.attention.rectangular import launch_backward as backward
    from fusewright.attention.window import launch as window

    plans = (
        forward.forward_plan,
        backward.backward_plan,
        window.forward_plan,
        window.backward_plan,
        rotary.forward_plan,
        rotary.backward_plan,
    )
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture(params=["single-tile", "pointers"])
def scheme(
    request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """How keys are read: as one tile, the queries cut into chunks; or in many small tiles."""
    return arranged(request.param, monkeypatch)


@pytest.fixture(params=["tables", "single-tile", "pointers", "descriptors"])
def any_scheme(
    request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """As ``scheme``; or as the tables of the package say, or in many small tiles by descriptors."""
    return arranged(request.param, monkeypatch)


def arranged(scheme: str, monkeypatch: pytest.MonkeyPatch) -> str:
    from fusewright.attention.common.problem import TileConfig
    from fusewright.attention.rectangular import launch, launch_backward

    if scheme == "single-tile":
        tile = launch.SingleTileConfig(128, 128, 4, queries=16, num_warps=4, num_stages=1)
        monkeypatch.setattr(launch, "SINGLE_TILE_FORWARD", (tile,))
        monkeypatch.setattr(launch_backward, "SINGLE_TILE_BACKWARD", (tile,))
        monkeypatch.setattr(launch, "SINGLE_TILE_FITS", 1)
    elif scheme != "tables":
        monkeypatch.setattr(launch, "SINGLE_TILE_KEYS", 0)
        line = TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2)
        described = line._replace(hopper=True, descriptors=True)
        lines = (described, line) if scheme == "descriptors" else (line,)
        monkeypatch.setattr(launch, "FORWARD", lines)
        for table in ("DQ", "DKDV"):
            monkeypatch.setattr(launch_backward, table, lines)
    return scheme
