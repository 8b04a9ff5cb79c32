"""What the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from .kinds import ADAMW, LEARNED, STACKED, of_kinds

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

# A block more than one, odd, empty and without axes.
SHAPES = ((3,), (33, 40), (0, 4), (), (1, 1025))


class Training:
    """Parameters and gradients that are the same in every call, and steps with them."""

    shapes = SHAPES

    def parameters(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(7)
        draws = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [torch.nn.Parameter(x.to(device, dtype)) for x in draws]

    def give_gradients(self, ps: Sequence[torch.Tensor], step: int, scale: float = 1.0) -> None:
        """They depend on the step alone, and bf16 holds them."""
        generator = torch.Generator().manual_seed(step)
        for p in ps:
            drawn = torch.randn(p.shape, generator=generator) * scale
            p.grad = drawn.bfloat16().to(p.device, p.dtype)

    def run(
        self,
        make: Callable[..., Any],
        ps: list[torch.nn.Parameter],
        steps: int = 5,
        first: int = 0,
        scale: float = 1.0,
        **options: Any,
    ) -> Any:
        """Take some steps; returns the optimizer."""
        optimizer = make(ps, **options)
        for step in range(first, first + steps):
            self.give_gradients(ps, step, scale)
            optimizer.step()
        return optimizer


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def capture(monkeypatch):
    """Makes tables and steps believe, or not, that a graph is captured."""
    from fusewright.optimizer.common import contract, tables
    from fusewright.optimizer.norms import launch

    def believe(on):
        for module in (contract, tables, launch):
            monkeypatch.setattr(module, "is_captured", lambda device: on)

    return believe


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's reference takes its own formula on a CPU too, as on a GPU."""
    from fusewright.optimizer.adamw import reference

    monkeypatch.setattr(reference, "takes_fused", lambda device: False)


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that few numbers take several, and sums several rounds."""
    from fusewright.optimizer.adamw import launch as adamw
    from fusewright.optimizer.common import launch as common
    from fusewright.optimizer.norms import launch as norms

    stride = common.GridStride(size=32, num_warps=1, programs_per_sm=2)
    for module in (common, norms):
        monkeypatch.setattr(module, "PREPARE", common.Block(size=2, num_warps=1))
    monkeypatch.setattr(adamw, "ADAMW", common.Block(size=64, num_warps=1))
    monkeypatch.setattr(common, "SQUARES", stride)
    monkeypatch.setattr(norms, "SCALE", stride)
    norms.gradients_plan.cache_clear()
    yield
    norms.gradients_plan.cache_clear()


class Learned:
    """Networks, parameters and gradients for the learned optimizer."""

    # Without axes, with one, two, three, and none of a kind.
    kinds = ((), (5,), (3, 4), (2, 5, 3), (0, 4))

    def network(self, extra: int = 0, device: str = "cpu") -> Any:
        """One whose every weight, bias and offset matters."""
        from fusewright.optimizer.learned.learned_update import UpdateMLP

        generator = torch.Generator().manual_seed(3)
        mlp = UpdateMLP(extra, exp_mult=0.3, step_mult=0.1)
        for x in mlp.weights():
            torch.nn.init.normal_(x, std=0.4, generator=generator)
        for x in mlp.offsets():
            torch.nn.init.normal_(x, std=0.05, generator=generator)
        return mlp.to(device)

    def velo_networks(self, device: str = "cpu") -> Any:
        """VeLO's, small, whose every weight and bias matters and whose steps stay small."""
        from fusewright.optimizer.velo.velo_networks import VeLONetworks

        generator = torch.Generator().manual_seed(3)
        networks = VeLONetworks(8, 6, exp_mult=0.1, step_mult=0.1)
        for x in networks.parameters():
            torch.nn.init.normal_(x, std=0.4, generator=generator)
        # Perceptrons are a hundred times the mean of these.
        for x in (*networks.controls.parameters(), *networks.bank()):
            torch.nn.init.normal_(x, std=0.1, generator=generator)
        return networks.to(device)

    def drawn(self, shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    def gradient(self, p: torch.Tensor, step: int) -> torch.Tensor:
        """Of a parameter's own value, so that an error stays."""
        return torch.sin(p.detach() * (3 + step)) + 0.1


@pytest.fixture
def learned() -> Learned:
    return Learned()


@pytest.fixture
def small_learned_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that few numbers take several programs, and sums several rounds."""
    from fusewright.optimizer.common.launch import Block
    from fusewright.optimizer.common.statistics import launch as statistics
    from fusewright.optimizer.learned import launch as learned
    from fusewright.optimizer.velo import launch as velo

    stretch = statistics.Stretch(size=16, num_warps=1, shortest=16, programs=2)
    strip = statistics.Strip(size=16, num_warps=1, shortest=2, programs=3, ahead=False)
    tile = statistics.SumTile(lines=4, line=2, tall=2, wide=4, tiles=1, chunks=3, num_warps=1)
    means = statistics.Means(size=4, partials=2, span=8, num_warps=1)
    for name, table in (
        ("STATISTICS", stretch),
        ("APPLY", stretch),
        ("STATISTICS_STRIP", strip),
        ("APPLY_STRIP", strip._replace(shortest=3, ahead=True)),
        ("SQUARES_OVER_AXES", tile),
        ("MEANS", means),
    ):
        monkeypatch.setattr(statistics, name, table)
    monkeypatch.setattr(learned, "BACKWARD", stretch)
    for module in (statistics, learned):
        monkeypatch.setattr(module, "LINES", Block(size=4, num_warps=1))
    for module in (learned, velo):
        monkeypatch.setattr(module, "FOLD", statistics.Sums(rows=2, size=32, num_warps=1))
    add_partials = statistics.Sums(rows=2, size=128, num_warps=1)
    monkeypatch.setattr(learned, "ADD_PARTIALS", add_partials)


kind = of_kinds([*ADAMW, *STACKED, *LEARNED])
# Those that update matrices of one shape together, and those with a network.
stacked = of_kinds(STACKED)
networked = of_kinds(LEARNED)
