"""indexer_topk: exact against a stable sort of the same scores, whatever the ties; causal; the laws
of how many keys a row selects.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.gsa import gated_indexer, indexer_topk
from fusewright.gsa.selection import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LAWS = ("inverse", "proportional", "entropy", "fixed")
COUNTS = dict(k_base=6, k_min=3, k_max=9)


def topk(tensors, backend="triton", **options):
    ema = options.pop("variance_ema", None)
    options = dict(scale=0.3, law="fixed", backend=backend, variance_ema=ema) | COUNTS | options
    return indexer_topk(*tensors, **options)


def hold(tensors, selected, backend="triton", **options):
    """The selection is that of a stable sort of the same backend's scores."""
    options = dict(law="fixed") | COUNTS | options
    indices, count, stats = topk(tensors, backend, **options)
    expected = selected(tensors, backend, **options)
    assert same_bits((indices, count), expected[:2])
    places = dict(causal=options.get("causal", True), q_offset=options.get("q_offset", 0))
    form = options.get("form", "gated")
    scores = gated_indexer(*tensors, scale=0.3, backend=backend, form=form, **places)
    seen = reference.keys_seen(*tensors[:2], *places.values())

    def variance(scores):
        count = seen.sum(-1)
        scores = torch.where(scores.isnan(), 0.0, scores)
        kept = torch.where(seen, scores, 0.0)
        mean = kept.sum(-1, keepdim=True) / count[..., None]
        return torch.where(seen, scores - mean, 0.0).square().sum(-1) / count

    Yardstick(variance, [scores], [None]).check(lambda scores: stats.variance)
    assert (stats.entropy is None) == (options["law"] != "entropy")
    return indices, count, stats


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 9, 24, 3, 20), dict(q_offset=5, sinks=2)),
        ((1, 12, 19, 2, 8), dict(causal=False)),
        ((1, 20, 24, 2, 8), dict(q_offset=1, sinks=1, window=2)),
        ((1, 9, 9, 2, 8), dict(window=3, k_base=3)),
        ((2, 9, 24, 3, 20), dict(q_offset=5, sinks=2, form="relu")),
        ((1, 20, 24, 2, 8), dict(window=2, form="relu", law="entropy")),
    ],
    ids=str,
)
def test_selection_is_that_of_a_stable_sort(indexer, selected, search, shape, options, device):
    hold(indexer.draw(shape, F32, device), selected, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_that_of_the_reference(indexer, selected, search, law, device):
    ema = torch.tensor(0.02, device=device)
    tensors = indexer.draw((1, 10, 30, 2, 8), BF16, device)
    counts = dict(k_base=14, k_min=3, k_max=25)
    options = dict(law=law, q_offset=20, sinks=1, variance_ema=ema)
    _, count, _ = hold(tensors, selected, **options, **counts)
    if law in ("inverse", "proportional"):
        assert count.unique().numel() > 1


@pytest.mark.sampled
@pytest.mark.parametrize("ties", ["all", "most", "zeros"])
def test_ties_go_to_the_lowest_index(indexer, selected, search, ties, device):
    q, k, w, bias = indexer.draw((1, 14, 22, 2, 8), F32, device)
    if ties == "all":
        k = k[:, :1].expand(-1, 22, -1)
    elif ties == "most":
        k = torch.where(torch.arange(22, device=device)[:, None] % 7 == 3, k, k[:, :1])
    else:
        w = torch.full_like(w, -200.0)
    indices, count, _ = hold([q, k, w, bias], selected, sinks=1, q_offset=3)
    if ties != "most":
        slots = torch.arange(9, device=device)
        assert torch.equal(indices, torch.where(slots < count[..., None], slots, -1).int())


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fewer_keys_than_wanted_are_all_selected(indexer, selected, backend, tokens, device):
    tensors = indexer.draw((1, tokens, tokens, 2, 8), F32, device)
    indices, count, _ = hold(tensors, selected, backend, sinks=3, law="inverse")
    assert count.tolist() == [[min(t + 1, 6) for t in range(tokens)]]
    for row in range(tokens):
        assert indices[0, row].tolist() == [*range(min(row + 1, 6)), *[-1] * (8 - min(row, 5))]


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 5), (1, 0, 4, 2, 5), (1, 3, 0, 2, 5)])
def test_nothing_to_select_is_an_empty_selection(indexer, backend, shape, device):
    indices, count, stats = topk(indexer.draw(shape, F32, device), backend, causal=False)
    assert (indices.shape, count.shape) == ((*shape[:2], 9), shape[:2])
    assert (indices == -1).all()
    assert not count.any()
    assert not stats.variance.any()


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("law", ["fixed", "inverse"])
def test_window_is_always_selected(indexer, backend, window, law, device):
    """The last keys up to a row's own, however low their scores, and no more keys than without."""
    q, k, w, bias = indexer.draw((1, 30, 30, 2, 8), F32, device)
    q, k = q.abs(), k - 10.0 * torch.arange(30, device=device)[:, None]
    ema = torch.tensor(0.04, device=device)
    options = dict(law=law, k_min=4, variance_ema=ema)
    indices, count, _ = topk([q, k, w, bias], backend, window=window, **options)
    plain, same, _ = topk([q, k, w, bias], backend, **options)
    assert torch.equal(count, same)
    for row in range(30):
        chosen, others = (set(x[0, row].tolist()) - {-1} for x in (indices, plain))
        last = set(range(max(row - window + 1, 0), row + 1))
        assert len(chosen) == count[0, row]
        assert last <= chosen
        # The best of the others fill up, the lowest of all stay out.
        assert chosen - last <= others
    assert not set(range(28, 30)) & set(plain[0, 29].tolist())


def test_window_counts_from_the_last_key_that_a_row_sees(indexer, backend, device):
    tensors = indexer.draw((1, 2, 20, 2, 8), F32, device)
    indices, _, _ = topk(tensors, backend, window=3, q_offset=2**40)
    assert (indices[0, :, 3:6].tolist()) == [[17, 18, 19]] * 2


@pytest.mark.sampled
@pytest.mark.parametrize("law", LAWS)
def test_same_inputs_same_bits(indexer, search, law, device):
    ema = torch.tensor(0.04, device=device)
    tensors = indexer.draw((1, 5, 30, 2, 8), BF16, device)
    one, other = (topk(tensors, law=law, q_offset=25, variance_ema=ema) for _ in range(2))
    measured = slice(2 if law == "entropy" else 1)
    assert same_bits((*one[:2], *one[2][measured]), (*other[:2], *other[2][measured]))


def test_indices_ascend_and_end_with_nothing(indexer, backend, device):
    tensors = indexer.draw((2, 20, 20, 2, 8), F32, device)
    indices, count, _ = topk(tensors, backend, law="proportional", sinks=2)
    assert (indices.dtype, count.dtype) == (torch.int32, torch.int32)
    valid = torch.arange(9, device=device) < count[..., None]
    assert torch.equal(indices >= 0, valid)
    assert (indices.diff(dim=-1)[valid[..., 1:]] > 0).all()
    rows = torch.arange(20, device=device)
    assert (indices.amax(-1) <= rows).all()
    assert torch.equal(indices[:, 2:, :2], torch.tensor([0, 1]).to(indices).expand(2, 18, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("law", LAWS)
def test_future_tokens_change_no_selection(indexer, backend, law, device):
    ema = torch.tensor(0.04, device=device)
    q, k, w, bias = indexer.draw((1, 12, 12, 2, 8), F32, device)
    before = topk([q, k, w, bias], backend, law=law, sinks=1, variance_ema=ema)
    for token in (1, 9):
        later = [x.clone() for x in (q, k, w)]
        for x in later:
            x[:, token:] = torch.randn_like(x[:, token:])
        after = topk([*later, bias], backend, law=law, sinks=1, variance_ema=ema)
        past, same = (
            [x[:, :token] for x in (*found[:2], found[2].variance)] for found in (before, after)
        )
        assert same_bits(past, same)


def test_parts_of_a_sequence_select_as_the_whole(indexer, backend, device):
    ema = torch.tensor(0.04, device=device)
    q, k, w, bias = indexer.draw((1, 16, 16, 2, 8), F32, device)
    options = dict(law="inverse", sinks=1, variance_ema=ema)
    whole = topk([q, k, w, bias], backend, **options)
    for first, last in ((0, 7), (7, 16)):
        operands = [q[:, first:last], k[:, :last], w[:, first:last], bias]
        part = topk(operands, backend, q_offset=first, **options)
        assert same_bits(part[:2], [x[:, first:last] for x in whole[:2]])


@pytest.mark.parametrize("q_offset", [2**31 - 2, 2**40, 2**63 - 1, 2**63, 2**70])
def test_rows_beyond_all_keys_select_among_all_of_them(indexer, backend, q_offset, device):
    tensors = indexer.draw((1, 5, 20, 2, 8), F32, device)
    found = topk(tensors, backend, q_offset=q_offset, sinks=1)
    expected = topk(tensors, backend, causal=False, sinks=1)
    assert same_bits(found[:2], expected[:2])


def test_variance_is_of_the_keys_that_a_row_sees(indexer, backend, device):
    tensors = indexer.draw((1, 12, 12, 2, 8), F32, device)
    stats = topk(tensors, backend, law="entropy")[2]

    def by_rows(*tensors):
        variances, entropies = [], []
        for row, scores in enumerate(indexer.reference(*tensors)[0]):
            seen = scores[: row + 1]
            p = seen.softmax(-1)
            entropies.append(-(p * p.log()).sum() / math.log(row + 2))
            variances.append(seen.var(correction=0))
        return torch.stack(variances)[None], torch.stack(entropies)[None]

    found = stats.variance, stats.entropy
    Yardstick(by_rows, tensors, [None, None]).check(lambda *tensors: found)


@pytest.mark.parametrize("law", ["inverse", "proportional"])
def test_count_follows_from_the_variance(indexer, backend, law, device):
    ema = torch.tensor(0.04, device=device)
    tensors = indexer.draw((1, 20, 20, 2, 8), F32, device)
    _, count, stats = topk(tensors, backend, law=law, variance_ema=ema, k_base=8, k_max=15, k_min=1)
    ratio = stats.variance / ema
    factor = ratio if law == "proportional" else 0.5 + 1.0 / (1.0 + ratio)
    expected = (8 * factor).floor().clamp(1, 15).int()
    assert torch.equal(count, expected.minimum(torch.arange(1, 21, device=device).int()))


def test_law_is_inverse_unless_another_is_asked_for(indexer, backend, device):
    ema = torch.tensor(0.04, device=device)
    tensors = indexer.draw((1, 20, 20, 2, 8), F32, device)
    options = dict(k_base=8, k_max=15, k_min=1, variance_ema=ema, scale=0.3, backend=backend)
    _, count, stats = indexer_topk(*tensors, **options)
    expected = (8 * (0.5 + 1.0 / (1.0 + stats.variance / ema))).floor().int()
    assert torch.equal(count, expected.minimum(torch.arange(1, 21, device=device).int()))
    for law in ("proportional", "entropy", "fixed"):
        assert not torch.equal(count, indexer_topk(*tensors, law=law, **options)[1])


@pytest.mark.sampled
@pytest.mark.parametrize("ema", [None, 0.0, math.nan])
@pytest.mark.parametrize("law", ["inverse", "proportional"])
def test_without_an_average_every_row_is_typical(indexer, backend, law, ema, device):
    tensors = indexer.draw((1, 12, 12, 2, 8), F32, device)
    ema = None if ema is None else torch.tensor(ema, device=device)
    _, count, _ = topk(tensors, backend, law=law, variance_ema=ema)
    assert count.tolist() == [[min(t + 1, 6) for t in range(12)]]


def test_nan_counts_as_zero(indexer, selected, search, device):
    tensors = indexer.draw((1, 12, 12, 2, 8), F32, device)
    tensors[1][:, [2, 7]] = math.nan
    tensors[0][:, 10] = math.nan
    indices, _, stats = hold(tensors, selected)
    assert not ((indices[0, 8:10] == 2) | (indices[0, 8:10] == 7)).any()
    assert indices[0, 10, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert stats.variance.isfinite().all()


@pytest.mark.parametrize("name", ["w", "k", "bias", "q"])
def test_minus_infinity_closes_its_head(indexer, backend, name, device):
    """Scores of 0 then, of which the lowest index is selected first."""
    tensors = indexer.draw((1, 12, 12, 2, 8), F32, device)
    tensors[0].abs_()
    tensors[1].abs_()
    plain = topk(tensors, backend)[0]
    at = dict(q=(0, [9, 10]), k=(0, [2, 7]), w=(0, [9, 10]), bias=slice(None))[name]
    tensors["qkw".find(name)][at] = -math.inf
    indices, count, stats = topk(tensors, backend)
    assert stats.variance.isfinite().all()
    assert count.tolist() == [[min(t + 1, 6) for t in range(12)]]
    if name == "k":
        assert not ((indices[0, 8:] == 2) | (indices[0, 8:] == 7)).any()
        return
    rows = [9, 10] if name in "qw" else range(5, 12)
    others = [row for row in range(12) if row not in rows]
    assert all(indices[0, row].tolist() == [*range(6), -1, -1, -1] for row in rows)
    assert torch.equal(indices[0, others], plain[0, others])
    assert not stats.variance[0, rows].any()


def test_rows_do_not_see_one_another(indexer, backend, device):
    tensors = indexer.draw((3, 12, 12, 2, 8), F32, device)
    together = topk(tensors, backend)
    alone = topk([x[1:2] for x in tensors[:3]] + tensors[3:], backend)
    assert torch.equal(together[0][1:2], alone[0])


def test_selection_has_no_gradient(indexer, backend, device):
    tensors = [x.requires_grad_() for x in indexer.draw((1, 12, 12, 2, 8), F32, device)]
    indices, count, stats = topk(tensors, backend, law="entropy")
    assert not any(x.requires_grad for x in (indices, count, *stats))


def test_kernels_and_reference_differ_only_where_scores_nearly_tie(indexer, device):
    tensors = indexer.draw((1, 30, 30, 2, 8), F32, device)
    found, expected = (topk(tensors, b)[0] for b in ("triton", "reference"))
    scores = indexer.reference(*[x.double() for x in tensors])[0]
    # What only one of them selects lies between the last selected scores, each wrong by its error.
    errors = (indexer.public(*tensors, backend=b)[0] - scores for b in ("triton", "reference"))
    bound = 3 * sum(error.abs().max() for error in errors)
    for row in range(30):
        one, other = (set(x[0, row].tolist()) for x in (found, expected))
        odd = scores[row, list(one ^ other)]
        assert not len(odd) or odd.max() - odd.min() <= bound


def test_sorting_the_reference_is_the_definition():
    scores = torch.tensor([[[0.5, 0.25, 0.5, 1.0, 0.25, 2.0]]])
    seen = torch.ones(1, 6, dtype=torch.bool)
    indices, count, _, _ = reference.select(
        *(scores, seen), law="fixed", k_base=4, k_min=1, k_max=5, sinks=2
    )
    assert (indices.tolist(), count.tolist()) == ([[[0, 1, 3, 5, -1]]], [[4]])
    scores[..., -2:] = -scores[..., -2:]
    indices, count, _, _ = reference.select(
        *(scores, seen), law="fixed", k_base=4, k_min=3, k_max=5, sinks=1, window=2
    )
    assert (indices.tolist(), count.tolist()) == ([[[0, 3, 4, 5, -1]]], [[4]])
