"""cu_seqlens and key_ranges: no row sees another document's keys, and packed documents are what
each is alone, forward and in every gradient.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fusewright.gsa import gated_indexer, indexer_kl_loss, indexer_topk, sparse_attention_with_lse
from fusewright.gsa.common.ranges import rows_seeing
from fusewright.gsa.indexer.reference import keys_seen
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

F32, F64 = torch.float32, torch.float64
# Of 44 tokens: documents of many tiles, of one token and of none, and tokens that are in none.
BOUNDS = [3, 20, 20, 21, 40]
TOKENS = 44
DOCUMENTS = [(a, b) for a, b in itertools.pairwise(BOUNDS) if a < b]
COUNTS = dict(k_base=6, k_min=3, k_max=9, sinks=1, window=2)


def bounds(device, dtype=torch.int32):
    return torch.tensor(BOUNDS, device=device, dtype=dtype)


def document_of(token):
    """The document of a token; None for one that is in none."""
    return next((d for d in DOCUMENTS if d[0] <= token < d[1]), None)


def cut(tensors, first, last):
    """The tokens of a document of q, k and w [1, T, ..]; a bias is of all."""
    return [x[:, first:last] if x.ndim > 1 else x for x in tensors]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scores_of_packed_documents_are_those_of_each_alone(indexer, causal, dtype, device):
    packed = dict(causal=causal, cu_seqlens=bounds(device, dtype))

    def alone(*tensors):
        rows = torch.full((1, TOKENS, TOKENS), -math.inf, device=device, dtype=tensors[0].dtype)
        for first, last in DOCUMENTS:
            part = indexer.reference(*cut(tensors, first, last), causal=causal)
            rows = rows.index_put(
                (
                    torch.tensor(0, device=device),
                    torch.arange(first, last, device=device)[:, None],
                    torch.arange(first, last, device=device),
                ),
                part[0].to(rows.dtype),
            )
        return rows

    tensors = indexer.draw((1, TOKENS, TOKENS, 2, 5), F32, device)
    yardstick = Yardstick(alone, tensors)
    yardstick.check(partial(indexer.kernels, **packed))
    yardstick.check(partial(indexer.reference, **packed))


def test_unseen_scores_are_minus_infinity_and_unseen_keys_change_no_bit(indexer, backend, device):
    tensors = indexer.draw((1, TOKENS, TOKENS, 2, 5), F32, device)
    packed = dict(causal=True, cu_seqlens=bounds(device), backend=backend)
    before = indexer.public(*tensors, **packed)
    for row, scores in enumerate(before[0]):
        document = document_of(row)
        seen = range(document[0], row + 1) if document else ()
        assert scores.isfinite().nonzero().flatten().tolist() == list(seen)
        assert (scores[~scores.isfinite()] == -math.inf).all()
    for first, last in DOCUMENTS:
        others = [x.clone() for x in tensors]
        inside = torch.zeros(TOKENS, dtype=torch.bool, device=device)
        inside[first:last] = True
        for x in others[:3]:
            x[:, ~inside] = math.nan
        after = indexer.public(*others, **packed)
        assert same_bits([before[:, first:last]], [after[:, first:last]])


@pytest.mark.parametrize("law", ["inverse", "entropy"])
def test_selection_of_packed_documents_is_that_of_each_alone(indexer, backend, search, law, device):
    ema = torch.tensor(0.04, device=device)
    tensors = indexer.draw((1, TOKENS, TOKENS, 2, 8), F32, device)
    options = dict(law=law, variance_ema=ema, backend=backend, scale=0.3) | COUNTS
    indices, count, stats = indexer_topk(*tensors, cu_seqlens=bounds(device), **options)
    for first, last in DOCUMENTS:
        part = cut(tensors, first, last)
        alone, same, stats_alone = indexer_topk(*part, **options)
        alone = torch.where(alone >= 0, alone + first, -1)
        assert torch.equal(count[:, first:last], same)
        # Where the document begins is no other arithmetic of the scores.
        assert torch.equal(indices[:, first:last], alone)
        of_both = stats.variance[:, first:last], stats_alone.variance
        # Two orders of the same sums of fewer than 2^5 terms, each term as wrong as its score.
        bound = 2**5 * torch.finfo(F32).eps * tensors[2].shape[2]
        assert (of_both[0] - of_both[1]).abs().max() <= bound
    outside = [row for row in range(TOKENS) if document_of(row) is None]
    assert not count[0, outside].any()
    assert (indices[0, outside] == -1).all()
    assert not stats.variance[0, outside].any()


def test_parts_of_packed_documents_select_as_the_whole(indexer, backend, device):
    q, k, w, bias = indexer.draw((1, TOKENS, TOKENS, 2, 8), F32, device)
    options = dict(law="fixed", backend=backend, cu_seqlens=bounds(device)) | COUNTS
    whole = indexer_topk(q, k, w, bias, **options)
    for first, last in ((0, 16), (16, 23), (23, 44)):
        rows = q[:, first:last], k, w[:, first:last], bias
        part = indexer_topk(*rows, q_offset=first, **options)
        assert same_bits(part[:2], [x[:, first:last] for x in whole[:2]])
    beyond = indexer_topk(q, k, w, bias, q_offset=2**40, **options)
    assert not beyond[1].any()


@pytest.mark.parametrize("selects", [False, True], ids=["dense", "selected"])
def test_loss_of_packed_documents_is_the_mean_of_their_rows(indexer, selects, device):
    """And so is every gradient; rows outside all documents do not count."""
    torch.manual_seed(0)
    learning = [*indexer.draw((1, TOKENS, TOKENS, 2, 5), F32, device)]
    learning.append(torch.tensor(3.0, device=device))
    q, k = torch.randn(1, TOKENS, 4, 8, device=device), torch.randn(1, TOKENS, 2, 8, device=device)
    lse = torch.randn(1, 4, TOKENS, device=device)
    cu_seqlens = bounds(device)
    found = indexer_topk(
        *learning[:4], cu_seqlens=cu_seqlens, law="fixed", backend="reference", **COUNTS
    )

    def loss(first, last, backend, tensors, **packed):
        *operands, temperature = tensors
        attention = [x[:, first:last].to(operands[0].dtype) for x in (q, k)]
        attention.append(lse[..., first:last].to(operands[0].dtype))
        selection = []
        if selects:
            indices, count = (x[:, first:last] for x in found[:2])
            selection = [indices - first, count]
        return indexer_kl_loss(
            *cut(operands, first, last), *attention, *selection,
            temperature=temperature, backend=backend, **packed,
        )  # fmt: skip

    def alone(*tensors):
        parts = [(b - a) * loss(a, b, "reference", tensors) for a, b in DOCUMENTS]
        return torch.stack(parts).sum() / sum(b - a for a, b in DOCUMENTS)

    def packed(backend):
        return lambda *tensors: loss(0, TOKENS, backend, tensors, cu_seqlens=cu_seqlens)

    yardstick = Yardstick(alone, learning)
    for backend in ("triton", "reference"):
        yardstick.check(packed(backend))


def test_any_ranges_are_those_of_their_formula(indexer, device):
    """In no order, empty, beyond all keys: what is skipped follows from them."""
    torch.manual_seed(1)
    ranges = torch.randint(-3, 50, (2, 37, 2), device=device)
    clean = ranges.clamp(0, 40)

    def formula(q, k, w, bias):
        z = 0.3 * torch.einsum("bthd,bsd->bths", q, k) + bias[:, None]
        scores = (w.sigmoid().unsqueeze(-1) * z.sigmoid()).sum(2)
        key = torch.arange(40, device=device)
        seen = (key >= clean[..., :1]) & (key < clean[..., 1:])
        return torch.where(seen, scores, -math.inf)

    tensors = indexer.draw((2, 37, 40, 2, 5), F32, device)
    yardstick = Yardstick(formula, tensors)
    yardstick.check(partial(indexer.kernels, key_ranges=ranges))
    yardstick.check(partial(indexer.reference, key_ranges=ranges))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_any_ranges_select_by_a_stable_sort(indexer, search, backend, device):
    torch.manual_seed(2)
    ranges = torch.randint(0, 41, (2, 37, 2), device=device, dtype=torch.int32)
    tensors = indexer.draw((2, 37, 40, 2, 8), F32, device)
    options = dict(scale=0.3, backend=backend, key_ranges=ranges, causal=False)
    indices, count, _ = indexer_topk(*tensors, law="fixed", **COUNTS, **options)
    scores = gated_indexer(*tensors, **options)
    for b in range(2):
        for row in range(37):
            first, last = ranges[b, row].tolist()
            keys = list(range(first, last))
            always = keys[:1] + keys[1:][-2:]
            others = sorted(set(keys) - set(always), key=lambda s: (-scores[b, row, s].item(), s))
            wanted = sorted((always + others)[: min(6, len(keys))])
            assert indices[b, row].tolist() == wanted + [-1] * (9 - len(wanted))
            assert count[b, row] == len(wanted)


def test_documents_pass_opcheck(indexer, device):
    ops = torch.ops.fusewright_gsa
    leaves = [t.requires_grad_() for t in indexer.draw((1, 4, 4, 2, 3), device=device)]
    ranges = torch.tensor([[[0, 2], [0, 2], [2, 4], [2, 4]]], dtype=torch.int32, device=device)
    torch.library.opcheck(ops.gated_indexer.default, (*leaves, ranges, 0.3, True, 0, "relu"))
    law = ("fixed", 3, 2, 4, 1, 1, True, 0, "relu")
    torch.library.opcheck(ops.indexer_topk.default, (*leaves, ranges, None, 0.3, *law))


def test_documents_have_second_derivatives(indexer, backend, device):
    leaves = [x.requires_grad_() for x in indexer.draw((1, 8, 8, 2, 3), F32, device)]
    cu_seqlens = torch.tensor([0, 3, 8], device=device)

    def second(backend, **packed):
        scores = indexer.public(*leaves, causal=True, backend=backend, **packed)
        first = torch.autograd.grad(
            torch.where(scores.isfinite(), scores, 0.0).square().sum(), leaves, create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    found = second(backend, cu_seqlens=cu_seqlens)
    ranges = torch.tensor([[[0, 3]] * 3 + [[3, 8]] * 5], device=device)
    for one, other in zip(found, second(backend, key_ranges=ranges), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found, second(backend), strict=True):
        assert not torch.equal(one, other)


def test_rows_seeing_a_tile_are_those_of_the_ranges():
    ranges = torch.tensor([[[0, 2], [0, 2], [2, 2], [2, 5], [2, 5]]], dtype=torch.int32)
    assert rows_seeing(ranges, 6, 1).tolist() == [[[0, 2], [0, 2], [3, 5], [3, 5], [3, 5], [5, 5]]]
    assert rows_seeing(ranges, 6, 4).tolist() == [[[0, 5], [3, 5]]]
    torch.manual_seed(0)
    ranges = torch.randint(0, 12, (3, 9, 2), dtype=torch.int32)
    seen = keys_seen(torch.empty(3, 9), torch.empty(3, 11), False, 0, ranges)
    for tile in (1, 3):
        places = rows_seeing(ranges, 11, tile)
        for b, row, key in seen.nonzero().tolist():
            first, last = places[b, key // tile].tolist()
            assert first <= row < last


def test_bounds_out_of_order_count_as_the_nearest_that_are_not(indexer, backend, device):
    tensors = indexer.draw((1, 12, 12, 2, 5), F32, device)
    for given, meant in (([-4, 5, 3, 40], [0, 5, 5, 12]), ([0, 12], [0, 12])):
        one, other = (
            indexer.public(
                *tensors, causal=True, cu_seqlens=torch.tensor(x, device=device), backend=backend
            )
            for x in (given, meant)
        )
        assert torch.equal(one, other)


def test_attention_to_a_packed_selection_is_that_of_each_document(indexer, sparse, device):
    torch.manual_seed(3)
    of_indexer = indexer.draw((1, TOKENS, TOKENS, 2, 8), F32, device)
    selection = indexer_topk(
        *of_indexer, cu_seqlens=bounds(device), law="fixed", backend="reference", **COUNTS
    )[:2]

    def alone(*tensors):
        o = torch.zeros_like(tensors[0])
        for first, last in DOCUMENTS:
            indices, count = (x[:, first:last] for x in selection)
            part = cut(tensors, first, last)
            found, _ = sparse_attention_with_lse(
                *part, indices - first, count, scale=0.3, backend="reference"
            )
            o = o + F.pad(found, (0, 0, 0, 0, first, TOKENS - last))
        return o

    tensors = sparse.draw((1, TOKENS, TOKENS, 4, 8), F32, device)
    for path in ("queries", "tiles"):
        Yardstick(alone, tensors).check(
            lambda *t, path=path: sparse.kernels(*t, *selection, path=path)[0]
        )
