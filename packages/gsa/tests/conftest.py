"""What the tests of this package share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fusewright import gsa
from fusewright.gsa.indexer import reference as indexer_reference
from fusewright.gsa.selection import reference as selection_reference
from fusewright_testkit.plugin import forget_plans

from .operations import INDEXER, LOSS, OPERATIONS, SCALE, GsaOp, IndexerOp, LossOp, SparseOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=OPERATIONS)
def op(request: pytest.FixtureRequest) -> GsaOp:
    """Each differentiable op of the package."""
    return OPERATIONS[request.param]


@pytest.fixture
def indexer() -> IndexerOp:
    return INDEXER


@pytest.fixture
def loss() -> LossOp:
    return LOSS


@pytest.fixture
def sparse() -> SparseOp:
    """Sparse attention with the log-sum-exp."""
    return SparseOp("sparse_attention_with_lse")


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """On a CPU, tiles so small that tiny tensors are several of them."""
    if device == "cuda":
        yield
        return
    from fusewright.gsa.common.launches import TileConfig
    from fusewright.gsa.indexer import launch as scores
    from fusewright.gsa.loss import launch as loss
    from fusewright.gsa.selection import launch as selection
    from fusewright.gsa.sparse import launch as sparse
    from fusewright.gsa.sparse import launch_backward as sparse_backward
    from fusewright.gsa.sparse import launch_problem, launch_segments, launch_unions

    tile = (TileConfig(256, 4, queries=16, keys=16, num_warps=4, num_stages=1),)
    rows = (launch_problem.GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1),)
    union = (
        launch_problem.UnionConfig(256, 4, rows=16, columns=16, num_warps=4, num_stages=1, stack=4),
    )
    members = launch_unions.ListConfig(block=32, num_warps=1)
    select = selection.SelectConfig(float("inf"), 64, num_warps=4, max_registers=80)
    for module, tables in (
        (scores, dict(SCORES=tile, SCORES_DQ=tile, SCORES_DK=tile)),
        (selection, dict(SCORES=tile, SELECT=(select,), SCORES_TO_SELECT=1000, SCORES_IN_LINE=16)),
        (loss, dict(TARGET=tile, DIVERGENCE=loss.RowConfig(block=16, num_warps=1))),
        (loss, dict(SCORES_AT_A_TIME=1000, ROWS=16)),
        (sparse, dict(SPARSE=rows, UNION=union)),
        (sparse_backward, dict(SPARSE_DQ=rows, SPARSE_DKDV=rows, LIST_SEGMENT=3)),
        (sparse_backward, dict(UNION_DQ=union, UNION_DKDV=union)),
        (launch_segments, dict(SEGMENTS=24, SHORTEST=16, TILES_AT_A_TIME=2)),
        (launch_unions, dict(MEMBERS=members, KEYS_OF_TILES=members, QUERIES_OF_TILES=members)),
        (launch_unions, dict(KEYS_AT_A_TIME=32, WORDS_AT_A_TIME=2)),
    ):
        for name, value in tables.items():
            monkeypatch.setattr(module, name, value)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(params=["held", "streamed", "listed"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels find the last selected score: among scores that are held, among scores that
    are read again for each use, or in a list of the candidates.
    """
    from fusewright.gsa.selection import launch

    held = request.param == "held"
    line = launch.SelectConfig(
        float("inf"), 64 if held else 16, num_warps=4, max_registers=80, held=held
    )
    monkeypatch.setattr(launch, "SELECT", (line,))
    # So many times the most keys of a row: more than there are, or so few that rows are cut.
    monkeypatch.setattr(launch, "LISTED", 1 if request.param == "listed" else 1 << 20)
    launch.selection_plan.cache_clear()
    return request.param


@pytest.fixture
def selected():
    """What the scores of the kernels, or of the reference, select by a stable sort."""

    def of(tensors, backend, causal=True, q_offset=0, variance_ema=None, form="gated", **options):
        places = dict(causal=causal, q_offset=q_offset, form=form)
        scores = gsa.gated_indexer(*tensors, scale=SCALE, backend=backend, **places)
        seen = indexer_reference.keys_seen(*tensors[:2], causal, q_offset)
        return selection_reference.select(scores, seen, variance_ema, **options)

    return of
