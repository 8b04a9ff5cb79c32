"""What is timed and against whom: ``python -m fusewright_testkit.bench gsa``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.gsa import (
    SelectionStats,
    gated_indexer,
    indexer_kl_loss,
    indexer_topk,
    sparse_attention,
)
from fusewright.gsa.indexer import reference as indexer_reference
from fusewright.gsa.selection.reference import law_factor, score_statistics
from fusewright_testkit.cases import compiled, installed

from .cases import (
    INDEX_WIDTH,
    Op,
    cases,
    counted,
    counts,
    loss_of,
    reference_attention,
    reference_loss,
)
from .selections import WHOLE, selection

# What the names in cases count, in the picture.
WORDS = {
    "Hkv": "{} key heads",
    "Hi": "{} indexer heads",
    "k": "{} selected keys",
    "block": "in blocks of {}",
    "no k": "all keys",
    "law": "{} law",
}
__all__ = [
    "cases",
    "dense_attention",
    "gathered_attention",
    "providers",
    "reference_attention",
    "selection",
]

Tensor = torch.Tensor
# fla's kernel has a tile for the heads.
FEWEST_HEADS = 16


class Selecting:
    """A selection as a step that is timed: it has no backward pass. What is checked is the variance
    of the scores and the number of keys, which ``summary`` computes from what was selected.
    """

    captures = True

    def __init__(self, select: Callable, summary: Callable):
        self.select, self.summary = select, summary

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.summary(*self.select(*tensors))

    def prepare(self, tensors: list[Tensor]) -> Callable[[], object]:
        def step() -> object:
            with torch.no_grad():
                return self.select(*tensors)

        return step


def providers() -> dict[str, dict[str, Callable]]:
    """Ours; torch with all scores at once, eager and compiled; attention by gathered copies of the
    keys; dense attention, which computes something else and is compared with; and fla's attention
    to selected blocks where it is installed. DeepSeek's indexer is on no index: the one in fla is
    plain torch, and DeepGEMM and FlashMLA are built from their repositories.
    """
    scored = functools.partial(indexer_reference.gated_indexer, scale=1 / math.sqrt(INDEX_WIDTH))
    return {
        "fusewright": {
            "gated_indexer": gated_indexer,
            "indexer_topk": Selecting(ours, statistics_of_ours),
            "sparse_attention": sparse_attention,
            "indexer_kl_loss": functools.partial(loss_of, indexer_kl_loss),
        },
        "torch": {
            "gated_indexer": scored,
            "indexer_topk": selecting(scored),
            "sparse_attention": gathered_attention,
            "indexer_kl_loss": functools.partial(loss_of, reference_loss),
        },
        "compile": {
            "gated_indexer": compiled(scored),
            "indexer_topk": selecting(compiled(scored)),
            "indexer_kl_loss": functools.partial(loss_of, compiled(reference_loss)),
        },
        "dense": {"sparse_attention": dense_attention},
        **installed(("fla-nsa", "fla-core", native_sparse_attention)),
    }


def ours(q: Tensor, k: Tensor, w: Tensor, bias: Tensor, average: Tensor | None = None) -> tuple:
    return *indexer_topk(q, k, w, bias, **counts(k.shape[1], average)), average


def statistics_of_ours(
    indices: Tensor, count: Tensor, stats: SelectionStats, average: Tensor | None
) -> tuple:
    return stats.variance, counted(count, average)


def selecting(score: Op) -> Selecting:
    return Selecting(functools.partial(scores_and_topk, score), of_scores)


def scores_and_topk(score: Op, *tensors: Tensor) -> tuple:
    """The greatest scores; how many of them the law gives each row is not timed."""
    average = tensors[4] if len(tensors) > 4 else None
    scores = score(*tensors[:4])
    limits = counts(tensors[1].shape[1], average)
    return scores, scores.topk(limits["k_max"], sorted=False).values, limits


def of_scores(scores: Tensor, values: Tensor, limits: dict[str, Any]) -> tuple[Tensor, Tensor]:
    variance, entropy = score_statistics(scores, scores.isfinite())
    average = limits["variance_ema"]
    factor = law_factor(limits["law"], variance, entropy, average)
    wanted = (limits["k_base"] * factor).floor().clamp(limits["k_min"], limits["k_max"])
    return variance, counted(wanted.minimum(values.isfinite().sum(-1)), average)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """Copies of the selected keys and values for each query."""
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    valid = torch.arange(indices.shape[-1], device=q.device) < count[..., None]
    selected = (batch, indices.clamp(min=0).long())
    k, v = (x[selected].repeat_interleave(q.shape[2] // k.shape[2], 3) for x in (k, v))
    scores = torch.einsum("bthd,btkhd->bhtk", q, k) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~valid.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("bhtk,btkhd->bthd", p, v)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """Causal attention to every key, by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2)


def native_sparse_attention() -> dict[str, Op]:
    """fla's attention to whole blocks, for 16 query heads or more on a head of keys. Each call
    finds the blocks of the keys that are selected, by one division, and takes means of keys and
    values over blocks, which selections by scores need.
    """
    from fla.ops.nsa import parallel_nsa

    def attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        if q.shape[2] < FEWEST_HEADS * k.shape[2]:
            wanted = f"wanted {FEWEST_HEADS} query heads or more on a head of keys"
            raise ValueError(f"{wanted}, got {q.shape[2]} on {k.shape[2]}")
        blocks = indices[..., ::WHOLE].div(WHOLE, rounding_mode="floor").unsqueeze(2)
        return parallel_nsa(
            q, k, v, block_indices=blocks, block_counts=blocks.shape[-1], block_size=WHOLE
        )

    return {"sparse_attention": attention}
