"""What a sparse attention would look at if it saw all keys, and what of it the selected ones hold.

With p_ts the softmax over s <= t of the scores of query t, its mean over the heads, and k_t keys
selected,

    selected    sum of p_ts over the keys that the indexer selected
    window      over the k_t last keys, t itself among them
    random      over k_t keys drawn from those before that window: its expectation
    sinks       over the first keys, which are always selected: a part of `selected`

each of the queries that see 2 k_t keys and more: fewer are no k_t beyond a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from fusewright.gsa import GatedSparseAttention, Selection, indexer_kl_loss
from fusewright.gsa.layer.positions import rotated
from torch import Tensor

MASSES = ("selected", "window", "random", "sinks")


def dense_attention(attention: GatedSparseAttention, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries ``[B, T, H, D]`` and keys ``[B, T, Hkv, D]`` of inputs ``u [B, T, C]``, and
    the log-sum-exp of the attention's scores over all keys that a query sees, ``[B, H, T]``.
    """
    place = torch.arange(u.shape[1], device=u.device)
    rows = (
        layer(u).unflatten(-1, (-1, attention.head_width))
        for layer in (attention.q_proj, attention.k_proj)
    )
    q, k = rotated(place, attention.rope_base, *rows)
    sums = [scores.logsumexp(-1) for scores in row_scores(q, k)]
    return q, k, torch.stack(sums)


def row_scores(q: Tensor, k: Tensor) -> Iterator[Tensor]:
    """For each row of the batch the scores ``[H, T, T]``, in fp32 or wider; -inf in the future."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    for queries, keys in zip(q.to(wide), k.to(wide), strict=True):
        keys = keys.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(q.shape[-1])
        yield scores.masked_fill(future, -torch.inf)


def layer_sums(
    attention: GatedSparseAttention, u: Tensor, selection: Selection
) -> tuple[Tensor, Tensor]:
    """Sums over queries, fp64: ``[6]`` of the masses, the keys and ones, over the queries that see
    2 k_t keys and more; ``[2]`` of the divergences, over all.
    """
    # The study trains indexers of the presets' form.
    assert attention.index_bias is not None
    with torch.autocast(u.device.type, enabled=False):
        # Measured in the precision of the parameters, whatever the model is used in.
        q, k, lse = dense_attention(attention, u.to(attention.q_proj.weight.dtype))
        q_index = attention.index_q(u.to(q.dtype))
        kl = indexer_kl_loss(
            q_index.unflatten(-1, (attention.index_heads, -1)),
            attention.index_k(u.to(q.dtype)),
            attention.index_w(u.to(q.dtype)),
            *(attention.index_bias, q, k, lse),
            temperature=attention.index_temperature,
            backend=attention.backend,
        )
        length = u.shape[1]
        seen = torch.arange(1, length + 1, device=u.device)
        masses = torch.zeros(len(MASSES) + 2, dtype=torch.float64, device=u.device)
        entropy = torch.zeros((), dtype=torch.float64, device=u.device)
        for row, scores in enumerate(row_scores(q, k)):
            p = scores.softmax(-1).mean(0).double()
            count = selection.count[row].long()
            of_row = row_masses(p, selection.indices[row], count, attention.counts["sinks"])
            masses += of_row.sum(1)
            entropy -= torch.xlogy(p, p).sum()
        queries = u.shape[0] * length
        uniform = u.shape[0] * seen.double().log().sum() - entropy
        return masses, torch.stack([kl.double() * queries, uniform])


def row_masses(p: Tensor, indices: Tensor, count: Tensor, sinks: int) -> Tensor:
    """``[6, T]``: the masses of each query, its number of keys and a one; zeros of queries that see
    fewer than 2 k_t keys.

    Args:
        p: ``[T, T]``, fp64.
        indices, count: ``[T, K]`` and ``[T]``, of one row's selection.
        sinks: how many first keys are always selected.
    """
    length = len(p)
    seen = torch.arange(1, length + 1, device=p.device)
    slots = torch.arange(indices.shape[1], device=p.device)
    chosen = p.gather(1, indices.long().clamp_min(0))
    selected = torch.where(slots < count[:, None], chosen, 0.0).sum(1)
    before = (seen - count).clamp_min(0)
    # What lies before the window, of which nothing where it begins with the first key.
    earlier = torch.where(seen <= before[:, None], p, 0.0).sum(1)
    window = p.sum(1) - earlier
    random = earlier * count / before.clamp_min(1)
    sunk = p[:, :sinks].sum(1)
    counts = seen >= 2 * count
    found = torch.stack([selected, window, random, sunk, count.double(), torch.ones_like(window)])
    return torch.where(counts, found, 0.0)
