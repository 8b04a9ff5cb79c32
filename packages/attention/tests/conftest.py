"""What the tests of this package share."""

from __future__ import annotations

import pytest
import torch

from .operations import LSE_OP, RECTANGULAR, WINDOW_OP, AttentionOp, RotaryOp, WindowOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=RECTANGULAR)
def op(request: pytest.FixtureRequest) -> AttentionOp:
    """Each op of the package; a module that is about one says so by its parametrization."""
    return RECTANGULAR[request.param]


@pytest.fixture
def lse_op() -> AttentionOp:
    """The op that returns the log-sum-exp too."""
    return LSE_OP


@pytest.fixture
def window_op() -> WindowOp:
    """Attention to a window and a prefix, with the log-sum-exp."""
    return WINDOW_OP


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
    return tiled(request.param, monkeypatch)


@pytest.fixture
def one_tiling(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    return tiled((32, 16), monkeypatch)


def tiled(sizes: tuple, monkeypatch: pytest.MonkeyPatch) -> tuple:
    from fusewright.attention.common.problem import TileConfig
    from fusewright.attention.window import launch

    queries, keys, *descriptors = sizes
    line = TileConfig(128, 4, queries, keys, num_warps=4, num_stages=2)
    if descriptors:
        line = line._replace(hopper=True, descriptors=True)
    for table in ("FORWARD", "DQ", "DKDV"):
        monkeypatch.setattr(launch, table, (line,))
    return sizes


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
