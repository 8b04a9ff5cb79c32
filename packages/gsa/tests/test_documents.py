"""GatedSparseAttention of packed documents and of padded rows: what each is alone, forward, in its
loss and in every gradient; decoding of sequences of different lengths.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.gsa import GatedSparseAttention, Selection, all_keys
from fusewright.gsa.layer.tokens import ranges_of_tokens
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from .test_module import RELU, assert_same_but_for_rounding, layer, tokens

F32, F64 = torch.float32, torch.float64
# Of 24 tokens: documents of several tiles, of one token and of none, and tokens that are in none.
BOUNDS, TOKENS = [2, 19, 19, 20, 23], 24
DOCUMENTS = [(2, 19), (19, 20), (20, 23)]
# Left, right, both, none, and all of it.
PADDINGS = [(3, 9), (0, 4), (2, 7), (0, 9), (5, 5)]


def bounds(device="cpu"):
    return torch.tensor(BOUNDS, dtype=torch.int32, device=device)


def padding(device="cpu"):
    """A mask of five rows of nine."""
    place = torch.arange(9, device=device)
    return torch.stack([(place >= first) & (place < last) for first, last in PADDINGS])


def parts_of(kind, device):
    """The options of a call, and each document's row, first and last token."""
    if kind == "packed":
        return dict(cu_seqlens=bounds(device)), [(0, *d) for d in DOCUMENTS], (1, TOKENS)
    if kind == "packed and padded":
        mask = torch.ones(1, TOKENS, dtype=torch.bool, device=device)
        mask[:, [2, 3, 18, 22]] = False
        documents = [(0, 4, 18), (0, 19, 20), (0, 20, 22)]
        return dict(cu_seqlens=bounds(device), mask=mask), documents, (1, TOKENS)
    documents = [(row, *p) for row, p in enumerate(PADDINGS) if p[0] < p[1]]
    return dict(mask=padding(device)), documents, (5, 9)


KINDS = pytest.mark.parametrize("kind", ["packed", "packed and padded", "padded"])


def drawn(shape, dtype=F32, device="cpu"):
    return tokens(shape[1], dtype, device, batches=shape[0])


def alone_of(attention, selection, documents, shape):
    """y, zero where no document is, and the mean loss of the documents' tokens, each document by
    itself with its part of a selection.
    """

    def of(x, *parameters):
        named = dict(zip(dict(attention.named_parameters()), parameters, strict=True))
        y, losses = torch.zeros_like(x), []
        for row, first, last in documents:
            place = (torch.tensor([row], device=x.device), slice(first, last))
            part = None
            if selection is not None:
                indices, count = (z[place] for z in selection)
                part = Selection(torch.where(indices >= 0, indices - first, -1), count)
            found, _, loss = functional_call(
                Losing(attention), {f"of.{k}": v for k, v in named.items()}, (x[place], part)
            )
            y = y + torch.zeros_like(x).index_put(
                (place[0][:, None], torch.arange(first, last, device=x.device)), found
            )
            losses.append((last - first) * loss)
        return y, torch.stack(losses).sum() / sum(b - a for _, a, b in documents)

    return of


class Losing(torch.nn.Module):
    """forward_with_loss as a call."""

    def __init__(self, of: GatedSparseAttention) -> None:
        super().__init__()
        self.of = of

    def forward(self, x, selection, **options):
        return self.of.forward_with_loss(x, selection, **options)


def together_of(attention, selection, options):
    """The same of one call."""

    def of(x, *parameters):
        named = dict(zip(dict(attention.named_parameters()), parameters, strict=True))
        named = {f"of.{k}": v for k, v in named.items()}
        y, _, loss = functional_call(Losing(attention), named, (x, selection), options)
        return y, loss

    return of


@KINDS
@pytest.mark.parametrize("form", [dict(window=0), RELU], ids=["gated", "relu"])
def test_selection_and_outputs_are_those_of_each_document_alone(kind, form):
    options, documents, shape = parts_of(kind, "cpu")
    attention = layer(dtype=F64, **form).eval()
    attention.variance_ema.fill_(0.03)
    x = drawn(shape, F64)
    y, selection = attention(x, **options)
    expected = torch.zeros_like(y)
    inside = torch.zeros(shape, dtype=torch.bool)
    for row, first, last in documents:
        found, alone = attention(x[row : row + 1, first:last])
        expected[row, first:last] = found[0]
        inside[row, first:last] = True
        indices = torch.where(alone.indices >= 0, alone.indices + first, -1)
        assert torch.equal(selection.indices[row, first:last], indices[0])
        assert torch.equal(selection.count[row, first:last], alone.count[0])
    assert not y[~inside].any()
    assert not selection.count[~inside].any()
    assert_same_but_for_rounding(y, expected)


@pytest.mark.sampled
@KINDS
@pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])
def test_every_gradient_is_that_of_each_document_alone(kind, dense, device):
    options, documents, shape = parts_of(kind, device)
    plain = layer(device=device)
    x = drawn(shape, device=device)
    if dense:
        selection = all_keys(*shape, device, **options)
    else:
        _, selection = layer(device=device)(x, **options)
    leaves = [x, *(p.detach() for p in plain.parameters())]
    yardstick = Yardstick(alone_of(plain, selection, documents, shape), leaves)
    for backend in ("triton", "reference"):
        attention = layer(backend, device=device)
        yardstick.check(together_of(attention, selection, options))


@KINDS
@pytest.mark.sampled
def test_other_documents_change_no_bit(kind, backend, device):
    options, documents, shape = parts_of(kind, device)
    attention = layer(backend, device=device).eval()
    attention.variance_ema.fill_(0.03)
    x = drawn(shape, device=device).requires_grad_()
    y, _, _ = attention.forward_with_loss(x, **options)
    for row, first, last in documents:
        inside = torch.zeros(shape, dtype=torch.bool, device=device)
        inside[row, first:last] = True
        other = torch.where(inside.unsqueeze(-1), x, torch.randn_like(x))
        assert same_bits([y[inside]], [attention(other, **options)[0][inside]])
        (dx,) = torch.autograd.grad(y[inside].square().sum(), x, retain_graph=True)
        assert dx[inside].any()
        assert not dx[~inside].any()


@KINDS
@pytest.mark.sampled
def test_padding_may_hold_anything(kind, backend, device):
    options, documents, shape = parts_of(kind, device)
    attention = layer(backend, device=device)
    x = drawn(shape, device=device)
    inside = torch.zeros(shape, dtype=torch.bool, device=device)
    for row, first, last in documents:
        inside[row, first:last] = True
    found = []
    for filling in (0.0, float("nan")):
        z = x.masked_fill(~inside.unsqueeze(-1), filling).requires_grad_()
        attention.variance_ema.zero_()
        y, selection, loss = attention.forward_with_loss(z, **options)
        (dx,) = torch.autograd.grad(y.square().sum() + loss, z)
        found.append([y, *selection, loss, dx, attention.variance_ema.clone()])
    assert same_bits(*found)


def test_average_of_the_variance_is_of_tokens_alone():
    attention, x = layer(ema_decay=0.75), drawn((5, 9))
    attention(x, mask=padding())
    variances = []
    for row, (first, last) in enumerate(PADDINGS):
        if first < last:
            part = attention._index(x[row : row + 1, first:last])
            variances.append(attention._select(part, 0)[1].flatten().double())
    expected = torch.cat(variances).mean()
    # Roundings of the mean of fewer than 2^5 variances, and of each variance of up to nine scores.
    assert (attention.variance_ema - expected).abs() <= 2**6 * torch.finfo(F32).eps
    average = attention.variance_ema.clone()
    attention(x, mask=torch.zeros(5, 9, dtype=torch.bool))
    assert torch.equal(attention.variance_ema, average)


@pytest.mark.parametrize("max_seqlen", [None, 17])
def test_all_keys_of_documents_are_those_that_each_query_sees(max_seqlen):
    found = all_keys(1, TOKENS, "cpu", cu_seqlens=bounds(), max_seqlen=max_seqlen)
    assert found.indices.shape == (1, TOKENS, max_seqlen or TOKENS)
    for row in range(TOKENS):
        first = next((a for a, b in DOCUMENTS if a <= row < b), row + 1)
        keys = found.indices[0, row, : found.count[0, row]].tolist()
        assert keys == list(range(first, row + 1))


def test_padding_is_left_right_or_all():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]]) > 0
    ranges = ranges_of_tokens(5, 4, mask, None)
    assert (ranges.diff(dim=1) >= 0).all()
    wanted = [range(1, 3), range(4), (), range(2, 4), range(3)]
    for one, places in zip(ranges.tolist(), wanted, strict=True):
        for t, (first, last) in enumerate(one):
            assert list(range(first, last)) == (list(places) if t in places else [])


PARTS = [(2, 0, 3), (1, 1, 1), (0, 4, 0), (3, 1, 2)]


def caches_of(attention, x, how, device):
    """y of the sequences' tokens, ``[3, 7]`` or so many of each, decoded by parts."""
    cache = attention.new_cache(3, 24)
    begun, found = [0, 0, 0], [[], [], []]
    for counts in PARTS:
        most = max(counts)
        parts = [x[b, i : i + n] for b, (i, n) in enumerate(zip(begun, counts, strict=True))]
        if how == "packed":
            cu_seqlens = torch.tensor([0, *counts], device=device).cumsum(0)
            row = torch.cat(parts)[None]
            y = attention.decode(row, cache, cu_seqlens=cu_seqlens, max_seqlen=most)[0]
            of_each = y.split(counts)
        else:
            place = torch.arange(most, device=device)
            number = torch.tensor(counts, device=device)[:, None]
            mask = place < number if how == "right" else place >= most - number
            padded = torch.full((3, most, 24), float("nan"), dtype=x.dtype, device=device)
            padded[mask] = torch.cat(parts)
            y = attention.decode(padded, cache, mask)
            assert not y[~mask].any()
            of_each = y[mask].split(counts)
        for b, part in enumerate(of_each):
            found[b].append(part)
            begun[b] += counts[b]
    assert cache.lengths.tolist() == begun
    # One token of each, without a mask.
    last = torch.stack([x[b, i] for b, i in enumerate(begun)])[:, None]
    y = attention.decode(last, cache)
    assert cache.lengths.tolist() == [i + 1 for i in begun]
    return [torch.cat([*parts, y[b]]) for b, parts in enumerate(found)]


HOW = pytest.mark.parametrize("how", ["left", "right", "packed"])


@HOW
@pytest.mark.parametrize("window", [0, 1])
def test_decoding_of_different_lengths_is_that_of_each_sequence(how, window):
    attention = layer(dtype=F64, window=window).eval()
    attention.variance_ema.fill_(0.03)
    x = drawn((3, 8), F64)
    for b, found in enumerate(caches_of(attention, x, how, "cpu")):
        expected, _ = attention(x[b : b + 1, : len(found)])
        assert_same_but_for_rounding(found, expected[0])


@HOW
def test_decoding_of_different_lengths_by_the_kernels(how, device):
    attention = layer("triton", device=device).eval()
    attention.variance_ema.fill_(0.03)
    x = drawn((3, 8), device=device)
    plain = layer("reference", device=device).eval()
    for b, found in enumerate(caches_of(attention, x, how, device)):
        row = x[b : b + 1, : len(found)]
        whole = together_of(plain, attention(row)[1], {})
        leaves = [row, *(p.detach() for p in plain.parameters())]

        def of_one(*leaves, whole=whole):
            return whole(*leaves)[0][0]

        Yardstick(of_one, leaves, [None]).check(lambda *_, found=found: found)


def test_packed_decoding_begins_where_a_prompt_ended():
    """Prompts of different lengths in one row, then a token of each, as serving does."""
    attention = layer(dtype=F64).eval()
    attention.variance_ema.fill_(0.03)
    x = drawn((3, 8), F64)
    lengths, cache = (5, 1, 3), attention.new_cache(3, 8)
    prompts = torch.cat([x[b, :n] for b, n in enumerate(lengths)])[None]
    bounds = torch.tensor([0, 5, 6, 9])
    attention.decode(prompts, cache, cu_seqlens=bounds, max_seqlen=5)
    following = torch.stack([x[b, n] for b, n in enumerate(lengths)])[None]
    y = attention.decode(following, cache, cu_seqlens=torch.arange(4), max_seqlen=1)
    for b, n in enumerate(lengths):
        assert_same_but_for_rounding(y[0, b], attention(x[b : b + 1, : n + 1])[0][0, -1])


class Masks(TorchDispatchMode):
    """Counts what is masked, and what looks for the ends of padding."""

    OPERATIONS = (
        torch.ops.aten.masked_fill.Scalar,
        torch.ops.aten.scatter_reduce.two,
        torch.ops.aten.cumprod.default,
    )
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.OPERATIONS
        return func(*args, **(kwargs or {}))


def test_tokens_without_padding_are_decoded_without_masks():
    """With the bits of those under a mask that hides none."""
    attention, x = layer(dtype=F64).eval(), drawn((3, 8), F64)
    attention.variance_ema.fill_(0.03)
    found, counts = [], []
    for mask in (None, torch.ones(3, 1, dtype=torch.bool)):
        cache = attention.new_cache(3, 8)
        attention.decode(x[:, :4], cache, torch.arange(4) < torch.tensor([[4], [1], [3]]))
        for step in range(3):
            with Masks() as masks:
                y = attention.decode(x[:, 4 + step : 5 + step], cache, mask)
            found.append(y)
        counts.append(masks.count)
        assert cache.lengths.tolist() == [7, 4, 6]
    assert all(map(torch.equal, found[:3], found[3:]))
    # Those of the selection itself are the same.
    plain = attention.new_cache(3, 8)
    with Masks() as masks:
        attention.decode(x[:, :1], plain)
    assert counts[0] == masks.count < counts[1]


M = torch.ones(1, 7, dtype=torch.bool)
X = torch.zeros(1, 7, 24)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(mask=M.int()), TypeError, "mask must be a bool tensor, got torch.int32"),
        (dict(mask=M[:, 1:]), ValueError, r"\[B, T\] = \(1, 7\), got \(1, 6\)"),
        (dict(mask=M.to("meta")), ValueError, "mask must.*got meta"),
        (dict(cu_seqlens=M), TypeError, "cu_seqlens must be int32 or int64, got torch.bool"),
        (dict(cu_seqlens=bounds().to_sparse()), TypeError, "cu_seqlens must be a strided tensor"),
        (dict(mask=M.to_sparse()), TypeError, "mask must be a strided tensor, got layout"),
        (dict(cu_seqlens=bounds()[:1]), ValueError, r"\[N \+ 1\] with N at least 1"),
    ],
)
def test_bad_documents_are_refused(options, error, message):
    attention = layer()
    for call in (
        lambda: attention(X, **options),
        lambda: attention.forward_with_loss(X, **options),
        lambda: attention.decode(X, attention.new_cache(1, 9), **options),
        lambda: all_keys(1, 7, "cpu", **options),
    ):
        with pytest.raises(error, match=message):
            call()


def test_packed_tokens_of_other_sequences_are_refused():
    attention = layer()
    cache = attention.new_cache(2, 9)
    with pytest.raises(ValueError, match=r"for the 2 sequences of the cache, got \(5,\)"):
        attention.decode(X, cache, cu_seqlens=bounds())
    with pytest.raises(ValueError, match="one of mask and cu_seqlens"):
        attention.decode(X, cache, M, cu_seqlens=bounds()[:3])
    attention.decode(torch.zeros(2, 3, 24), cache, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="takes tokens of 2 sequences, got 1"):
        attention.decode(X, cache)
    with pytest.raises(ValueError, match="holds 9 tokens, got 10"):
        attention.decode(torch.zeros(2, 7, 24), cache)
    assert (cache.length, cache.lengths.tolist()) == (3, [3, 3])
