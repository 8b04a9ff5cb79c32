"""The ops of the package as data, so that a property of all of them is tested on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fusewright import gsa
from fusewright.gsa.indexer import reference as indexer_reference
from fusewright.gsa.selection import reference as selection_reference
from fusewright.gsa.sparse import reference as sparse_reference
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

SCALE = 0.3
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class GsaOp:
    """One public function of differentiable tensors; options beside it are the same everywhere."""

    name: str

    def public(self, *tensors: torch.Tensor, **options: Any) -> Any:
        raise NotImplementedError

    def kernels(self, *tensors: torch.Tensor, **options: Any) -> Any:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def reference(self, *tensors: torch.Tensor, **options: Any) -> Any:
        return self.public(*tensors, **{"backend": "reference"} | options)

    def check(self, tensors: Tensors, **options: Any) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        yardstick = Yardstick(partial(self.reference, **options), tensors)
        yardstick.check(partial(self.kernels, **options))


class IndexerOp(GsaOp):
    """gated_indexer of q [B, Tq, H, d], k [B, Tkv, d], w [B, Tq, H] and bias [H]."""

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return gsa.gated_indexer(*tensors, **{"scale": SCALE, "causal": False} | options)

    def draw(
        self,
        shape: tuple[int, ...] = (1, 6, 7, 2, 5),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Tensors:
        """Operands of a (B, Tq, Tkv, H, d) from normal distributions."""
        batches, queries, keys, heads, width = shape
        q = torch.randn(batches, queries, heads, width, device=device).to(dtype)
        k = torch.randn(batches, keys, width, device=device).to(dtype)
        w = torch.randn(batches, queries, heads, device=device).to(dtype)
        return [q, k, w, torch.randn(heads, device=device)]


@dataclass(frozen=True)
class SparseOp(GsaOp):
    """Attention of q [B, T, H, D] to keys and values [B, Tkv, Hkv, D], and a selection that follows
    from the sizes: half of the keys, two queries of five with fewer.
    """

    key_heads: int = 2

    def public(self, q, k, v, indices=None, count=None, **options: Any) -> Any:
        if indices is None:
            indices, count = self.selection(q, k)
        options = {"scale": SCALE} | options
        return getattr(gsa, self.name)(q, k, v, indices, count, **options)

    def selection(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        number = torch.arange(batches * queries, device=q.device).view(batches, queries, 1)
        slot = torch.arange((keys + 1) // 2, device=q.device)
        indices = (3 * number + slot) % max(keys, 1)
        count = len(slot) - 2 * (number % 5 == 1) - 9 * (number % 5 == 3)
        return indices.int(), count.squeeze(-1).clamp(min=0).int()

    def draw(
        self,
        shape: tuple[int, ...] = (1, 6, 7, 4, 5),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Tensors:
        """q, k and v of a (B, T, Tkv, H, D) from normal distributions."""
        batches, queries, keys, heads, width = shape
        q = torch.randn(batches, queries, heads, width, device=device).to(dtype)
        wide = (batches, keys, min(self.key_heads, heads), width)
        return [q, *(torch.randn(wide, device=device).to(dtype) for _ in "kv")]


class LossOp(IndexerOp):
    """indexer_kl_loss of the indexer's operands and a temperature, beside an attention that follows
    from the sizes.
    """

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        *operands, temperature = tensors
        attention = options.pop("attention", None) or self.attention(*operands[:2])
        options = {"scale": SCALE, "index_scale": SCALE, "causal": False} | options
        return gsa.indexer_kl_loss(*operands, *attention, temperature=temperature, **options)

    def attention(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and lse of four heads on two heads of keys."""
        batches, queries, keys = *q.shape[:2], k.shape[1]

        def wave(*shape):
            numbers = torch.arange(torch.Size(shape).numel(), device=q.device)
            # What stays the same in every dtype that the yardstick takes.
            return (3.0 * (numbers * 0.7).cos()).bfloat16().to(q.dtype).view(shape)

        tensors = wave(batches, queries, 4, 8), wave(batches, keys, 2, 8)
        slots = torch.arange(keys, device=q.device).expand(batches, 1, queries, -1)
        with torch.autocast(q.device.type, enabled=False):
            operands = (*tensors, tensors[1], slots)
            _, lse = sparse_reference.sparse_attention_with_lse(*operands, scale=SCALE)
        return *tensors, lse

    def draw(self, shape=(1, 6, 7, 2, 5), dtype=torch.float32, device="cpu") -> Tensors:
        return [*super().draw(shape, dtype, device), torch.tensor(3.0, device=device)]


INDEXER = IndexerOp("gated_indexer")
LOSS = LossOp("indexer_kl_loss")
OPS = {"gated_indexer": INDEXER, "sparse_attention": SparseOp("sparse_attention"), LOSS.name: LOSS}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> GsaOp:
    """Each differentiable op of the package."""
    return OPS[request.param]


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
    from fusewright.gsa.sparse import launch_problem, launch_unions

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
        (launch_unions, dict(MEMBERS=members, KEYS_OF_TILES=members, QUERIES_OF_TILES=members)),
    ):
        for name, value in tables.items():
            monkeypatch.setattr(module, name, value)
    plans = (
        *(scores.scores_plan, scores.gradients_plan, selection.selection_plan),
        *(sparse.forward_plan, sparse_backward.backward_plan),
        *(loss.target_plan, loss.divergence_plan),
    )
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


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

    def of(tensors, backend, causal=True, q_offset=0, variance_ema=None, **options):
        places = dict(causal=causal, q_offset=q_offset)
        scores = gsa.gated_indexer(*tensors, scale=SCALE, backend=backend, **places)
        seen = indexer_reference.keys_seen(*tensors[:2], causal, q_offset)
        return selection_reference.select(scores, seen, variance_ema, **options)

    return of
