"""Documents that are packed into a sequence, and padding: each is as it would be alone, and what
one holds reaches no other.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from fusewright.attention import sliding_window_attention
from fusewright.attention.window import documents, reference, tiles
from fusewright_testkit import Yardstick, capture, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits
from torch.nn import functional as F

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
one_tiling = pytest.mark.parametrize("tiles", [(32, 16)], indirect=True)
both_backends = pytest.mark.parametrize("backend", ["triton", "reference"])

# Rows behind the prefix, window, prefix, rows for each query, where documents begin and end: of one
# row, empty, longer than the window, with ends beside those of tiles, and with padding around them.
PACKED = {
    "short window": (90, 7, 0, 1, (0, 20, 20, 21, 54, 90)),
    "long window": (90, 80, 0, 1, (0, 33, 34, 90)),
    "prefix": (90, 20, 17, 1, (0, 20, 20, 21, 60, 90)),
    "padding": (90, 20, 0, 1, (3, 20, 20, 21, 60, 80)),
    "prefix and padding": (90, 12, 17, 1, (37, 40, 73, 81)),
    "tiles": (96, 32, 16, 1, (0, 32, 64, 96)),
    "of one row": (40, 5, 3, 1, tuple(range(41))),
    "one document": (40, 5, 3, 1, (0, 40)),
    "none": (40, 5, 3, 1, (0, 0, 0)),
    "pairs": (92, 20, 7, 2, (0, 20, 20, 22, 60, 80)),
}
packed = pytest.mark.parametrize("name", PACKED)


def draw(op, name, dtype=F32, device="cpu", heads=1, with_prefix=False):
    """q, k and v, and the options of a call; of queries those of the prefix too, or none of
    them.
    """
    rows, window, prefix, every, bounds = PACKED[name]
    queries = rows // every + (prefix if with_prefix else 0)
    tensors = op.draw((1, queries, prefix + rows, heads, 16), dtype, device)
    options = dict(window=window, prefix=prefix, every=every)
    return tensors, options | dict(cu_seqlens=torch.tensor(bounds, device=device))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "with_prefix"),
    [*((name, False) for name in PACKED), ("prefix", True), ("prefix and padding", True)],
)
def test_values_and_gradients(window_op, tiles, name, with_prefix, device):
    tensors, options = draw(window_op, name, device=device, with_prefix=with_prefix)
    window_op.check(tensors, **options)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_and_gradients_of_16_bits_by_the_tables_of_the_package(window_op, dtype, device):
    tensors = window_op.draw((1, 280, 297, 2, 64), dtype, device)
    bounds = torch.tensor([2, 120, 121, 250, 270], device=device)
    window_op.check(tensors, window=75, prefix=17, scale=0.125, cu_seqlens=bounds)


@pytest.mark.parametrize("name", ["prefix and padding", "pairs"])
def test_heads_that_share_keys_with_sinks(window_op, tiles, name, device):
    tensors, options = draw(window_op, name, device=device, heads=2)
    tensors[0] = torch.cat([tensors[0], torch.randn_like(tensors[0])], 2)
    sinks = torch.tensor([-6.0, 0.5, 6.0, 0.0], device=device)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, sinks=sinks, **options)

    yardstick = Yardstick(with_sinks(window_op.reference), [*tensors, sinks])
    yardstick.check(with_sinks(window_op.kernels))


@pytest.mark.parametrize("tiles", [(16, 16, "descriptors")], indirect=True)
def test_descriptors(window_op, tiles, device):
    tensors, options = draw(window_op, "padding", device=device, heads=2)
    window_op.check(tensors, **options)


@packed
def test_reference_sees_what_the_definition_says(window_op, name):
    (q, k, _), options = draw(window_op, name)
    rows, window, prefix, every, bounds = PACKED[name]
    of_bounds = options["cu_seqlens"].unsqueeze(0).int()
    seen = reference.keys_seen(q, k, window, prefix, every, of_bounds)[0, 0]
    for query, row in enumerate(range(every - 1, rows, every)):
        begin = max((bound for bound in bounds if bound <= row), default=None)
        keys = set()
        if begin is not None and row < bounds[-1]:
            keys = set(range(prefix + max(begin, row - window + 1), prefix + row + 1))
            keys |= set(range(prefix))
        assert set(seen[query].nonzero().flatten().tolist()) == keys


def by_rows(q, k, v, options, call, upstream):
    """Outputs of all queries and the gradients of q and of k and v behind the prefix, each
    [1, rows, ..].
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse, dq, *grads = everything(lambda *xs: call(*xs, **options), leaves, upstream)
    return [o, lse.mT, dq, *(x[:, options["prefix"] :] for x in grads)]


@pytest.mark.sampled
@packed
def test_each_document_has_the_bits_that_it_has_alone(window_op, tiles, name, device):
    (q, k, v), options = draw(window_op, name, device=device, heads=2)
    _, _, prefix, every, bounds = PACKED[name]
    do = torch.randn_like(q)
    dlse = torch.randn(*q.shape[:3], device=device).mT
    actual = by_rows(q, k, v, options, window_op.kernels, (do, dlse))
    options["cu_seqlens"] = None
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        own, queries = slice(begin, end), slice(begin // every, end // every)
        keys = (torch.cat([x[:, :prefix], x[:, prefix:][:, own]], 1) for x in (k, v))
        upstream = do[:, queries], dlse[..., queries]
        alone = by_rows(q[:, queries], *keys, options, window_op.kernels, upstream)
        parts = [x[:, queries] for x in actual[:3]] + [x[:, own] for x in actual[3:]]
        assert same_bits(parts, alone)


@both_backends
@pytest.mark.parametrize("document", range(5))
@one_tiling
def test_what_a_document_holds_reaches_no_other(window_op, tiles, backend, document, device):
    (q, k, v), options = draw(window_op, "prefix", device=device)
    _, _, prefix, _, bounds = PACKED["prefix"]
    call = window_op.kernels if backend == "triton" else window_op.reference
    do, dlse = torch.randn_like(q), torch.randn(1, 1, q.shape[1], device=device)
    clean = by_rows(q, k, v, options, call, (do, dlse))
    own = slice(bounds[document], bounds[document + 1])
    for x in (q, k[:, prefix:], v[:, prefix:]):
        x[:, own] = math.nan
    if backend == "triton":
        do[:, own] = dlse[..., own] = math.nan
    actual = by_rows(q, k, v, options, call, (do, dlse))
    others = torch.ones(q.shape[1], dtype=torch.bool, device=device)
    others[own] = False
    assert same_bits([x[:, others] for x in actual], [x[:, others] for x in clean])
    assert actual[0][:, own].isnan().all()
    assert actual[1][:, own].isnan().all()


@pytest.mark.sampled
@both_backends
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize(
    ("rows", "window", "left", "right"), [(60, 20, 23, 41), (110, 100, 104, 5)]
)
@one_tiling
def test_padding_on_either_side_is_zeros_and_reaches_nothing(
    window_op, tiles, backend, rows, window, left, right, prefix, device
):
    """Three rows of the batch: padded on the left, on the right, and nothing else."""
    tensors = window_op.draw((3, rows, prefix + rows, 2, 16), F32, device)
    bounds = torch.tensor([[left, rows], [0, right], [rows, rows]], device=device)
    row = torch.arange(rows, device=device)
    padding = (row < bounds[:, :1]) | (row >= bounds[:, 1:])
    upstream = torch.randn_like(tensors[0]), torch.randn(3, 2, rows, device=device)
    sinks = torch.tensor([0.5, -1.0], device=device)
    call = window_op.kernels if backend == "triton" else window_op.reference

    def run(filled: float):
        parts = [tensors[0], *(x[:, prefix:] for x in tensors[1:]), upstream[0], upstream[1].mT]
        for x in parts:
            x[padding] = filled
        leaves = [x.detach().requires_grad_() for x in (*tensors, sinks)]
        options = dict(window=window, prefix=prefix, cu_seqlens=bounds)
        return everything(
            lambda q, k, v, sinks: call(q, k, v, sinks=sinks, **options), leaves, upstream
        )

    clean, actual = run(1.0), run(math.nan)
    assert same_bits(actual, clean)
    o, lse, dq, dk, dv, _ = actual
    assert (lse.mT[padding] == -math.inf).all()
    assert lse.mT[~padding].isfinite().all()
    for x in (o, dq, dk[:, prefix:], dv[:, prefix:]):
        assert (x[padding] == 0.0).all()
        assert (x[~padding] != 0.0).any(-1).all()


@pytest.mark.parametrize("filled", [1.0, math.nan])
def test_reference_backward_is_that_of_autograd_and_reads_no_padding(window_op, filled):
    rows, prefix = 9, 2
    tensors = window_op.draw((2, rows, prefix + rows, 2, 8), torch.float64)
    bounds = torch.tensor([[3, 5, 9], [0, 4, 6]], dtype=torch.int32)
    row = torch.arange(rows)
    padding = (row < bounds[:, :1]) | (row >= bounds[:, -1:])
    do, dlse = torch.randn_like(tensors[0]), torch.randn(2, rows, 2, dtype=torch.float64)
    for x in (tensors[0], *(x[:, prefix:] for x in tensors[1:]), do, dlse):
        x[padding] = filled
    leaves = [x.requires_grad_() for x in (*tensors, torch.randn(2, dtype=torch.float64))]
    band = dict(window=3, prefix=prefix)

    def call(q, k, v, sinks):
        return window_op.reference(q, k, v, sinks=sinks, cu_seqlens=bounds, **band)

    _, _, *expected = everything(call, leaves, (do, dlse.mT))
    backward = reference.sliding_window_attention_backward
    options = dict(bounds=bounds, sinks=leaves[3], scale=0.3, **band)
    actual = backward(do, dlse.mT, *leaves[:3], **options)
    torch.testing.assert_close(list(actual), expected)
    assert all(x.isfinite().all() for x in actual)


@both_backends
@one_tiling
def test_lengths_and_bounds_say_the_same(window_op, tiles, backend, device):
    tensors = window_op.draw((4, 50, 55, 1, 16), F32, device)
    lengths = torch.tensor([50, 33, -2, 99], dtype=torch.int32, device=device)
    call = window_op.kernels if backend == "triton" else window_op.reference
    leaves = [x.requires_grad_() for x in tensors]
    options = dict(window=9, prefix=5)
    actual = everything(lambda *xs: call(*xs, key_lengths=lengths, **options), leaves)
    bounds = torch.tensor([[0, 50], [0, 33], [0, 0], [0, 50]], device=device)
    assert same_bits(
        actual, everything(lambda *xs: call(*xs, cu_seqlens=bounds, **options), leaves)
    )


@one_tiling
def test_each_row_of_a_batch_has_the_bits_that_it_has_alone(window_op, tiles, device):
    tensors = window_op.draw((3, 50, 55, 1, 16), F32, device)
    lengths = [50, 33, 0]
    options = dict(window=9, prefix=5)
    of_batch = torch.tensor(lengths, device=device)
    actual = window_op.kernels(*tensors, key_lengths=of_batch, **options)
    for row, length in enumerate(lengths):
        q, k, v = (x[row : row + 1, : n + length] for x, n in zip(tensors, (0, 5, 5), strict=True))
        o, lse = window_op.kernels(q, k, v, **options)
        assert same_bits((actual[0][row, :length], actual[1][row, :, :length]), (o[0], lse[0]))


@both_backends
def test_bounds_out_of_range_or_order_count_as_the_nearest_that_are_not(window_op, backend, device):
    tensors, options = draw(window_op, "padding", device=device)
    results = [
        window_op.public(
            *tensors,
            **options | dict(cu_seqlens=torch.tensor(bounds, device=device), backend=backend),
        )
        for bounds in ([-9, 40, 20, 60, 200, 70], [0, 40, 40, 60, 90, 90])
    ]
    assert same_bits(*results)


@one_tiling
def test_a_batch_of_packed_rows(window_op, tiles, device):
    """Each row of the batch has documents of its own."""
    tensors = window_op.draw((2, 60, 63, 2, 16), F32, device)
    bounds = torch.tensor([[0, 10, 43, 60], [5, 40, 40, 41]], device=device)
    window_op.check(tensors, window=15, prefix=3, cu_seqlens=bounds)


@one_tiling
def test_streaming_from_a_cache(window_op, tiles, device):
    """Few new rows, each of the last document of its row of the batch."""
    tensors = window_op.draw((2, 3, 40, 1, 16), F32, device)
    bounds = torch.tensor([[7, 20, 40], [0, 38, 40]], device=device)
    window_op.check(tensors, window=15, prefix=0, cu_seqlens=bounds)


@triton.jit
def tiles_kernel(
    bounds_ptr,
    found_ptr,
    rows,
    documents,
    prefix,
    keys,
    offset,
    every,
    window,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What is found out about tile number program_id, and how many tiles of keys it sees."""
    batch = 0
    sequence = bounds_ptr, documents, batch, prefix, keys
    first, last, seeing, begin, end = tiles.rows_of_tile(
        tl.program_id(0), rows, sequence, offset, every, BLOCK_Q
    )
    row = offset + first * every
    newest = tl.minimum(row + (BLOCK_Q - 1) * every, end - 1)
    border, inner, _ = tiles.keys_of_rows(row, newest, window, prefix, begin, BLOCK_K)
    at = found_ptr + tl.program_id(0) * 6
    tl.store(at, first)
    tl.store(at + 1, last)
    tl.store(at + 2, seeing)
    tl.store(at + 3, begin)
    tl.store(at + 4, end)
    tl.store(at + 5, border + inner)


def tiles_of(bounds, rows, prefix, every, window, queries, device) -> list[list[int]]:
    """Of each tile of 32 queries: the first, the last and those that see something, their document,
    and how many tiles of 16 keys they see.
    """
    keys = prefix + rows
    count = 0 if bounds is None else len(bounds) - 1
    of_bounds = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    found = torch.empty(documents.count_tiles(queries, 32, count), 6, dtype=torch.int32)
    found = found.to(device)
    offset = keys - 1 - (queries - 1) * every
    sizes = queries, count, prefix, keys, offset, every, window
    tiles_kernel[(len(found),)](of_bounds, found, *sizes, BLOCK_Q=32, BLOCK_K=16)
    return found.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_in_one_tile_and_documents_cost_what_they_cost_alone(seed, device):
    drawn = random.Random(seed)
    rows, prefix = 2 * drawn.randint(1, 150), drawn.choice([0, 1, 17, 40])
    every = drawn.choice([1, 2])
    count = drawn.choice([1, 2, 5, 70])
    bounds = sorted(2 * drawn.randint(0, rows // 2) for _ in range(count + 1))
    window = drawn.choice([1, 9, 50, 400])
    queries = rows // every
    if every == 1 and drawn.random() < 0.5:
        queries += prefix
    found = tiles_of(bounds, rows, prefix, every, window, queries, device)
    offset = prefix + rows - 1 - (queries - 1) * every
    document_of = [
        next((d for d, end in enumerate(bounds[1:]) if bounds[d] <= row - prefix < end), None)
        if row >= prefix
        else "prefix"
        for row in range(offset, prefix + rows, every)
    ]
    tile_of, work = {}, 0
    for number, (first, last, seeing, begin, end, keys) in enumerate(found):
        assert seeing in (0, last)
        own = {document_of[i] for i in range(first, min(first + 32, last))}
        assert len(own) <= 1
        assert (own == {None}) <= (first >= seeing)
        for i in range(first, min(first + 32, last)):
            assert i not in tile_of
            tile_of[i] = number
        if first < seeing:
            work += keys
            (document,) = own
            wanted = (prefix, prefix)
            if document != "prefix":
                wanted = tuple(prefix + bounds[document + i] for i in (0, 1))
            assert (begin, end) == wanted
    assert sorted(tile_of) == list(range(queries))

    def alone(rows, queries):
        sizes = rows, prefix, every, window, queries
        return sum(keys for *_, keys in tiles_of(None, *sizes, device)) if queries else 0

    lengths = [b - a for a, b in pairwise(bounds)]
    of_prefix = document_of.count("prefix")
    assert work == alone(0, of_prefix) + sum(alone(n, n // every) for n in lengths)


@pytest.mark.gpu
def test_replayed_graph_serves_the_bounds_of_the_replay_and_waits_for_nothing(window_op):
    tensors = window_op.draw((1, 700, 717, 4, 64), BF16, "cuda")
    bounds = torch.tensor([0, 100, 650, 700], device="cuda")
    leaves = [x.requires_grad_() for x in tensors]

    def call():
        return everything(
            lambda *xs: window_op.kernels(*xs, window=130, prefix=17, cu_seqlens=bounds), leaves
        )

    graph, captured = capture(call)
    bounds.copy_(torch.tensor([3, 431, 432, 690]))
    graph.replay()
    torch.cuda.synchronize()
    with no_synchronisation():
        expected = call()
    assert same_bits(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_long_documents_are_as_near_to_fp64_as_torch(window_op, dtype, width):
    tensors = window_op.draw((1, 1500, 1517, 3, width), dtype, "cuda")
    bounds = torch.tensor([5, 700, 701, 701, 900, 1480], device="cuda")
    for prefix, part in ((17, tensors), (0, [x[:, -1500:] for x in tensors])):
        window_op.check(part, window=300, prefix=prefix, scale=0.125, cu_seqlens=bounds)


def test_documents_give_what_a_mask_gives(device):
    """By torch's own attention."""
    q, k, v = (torch.randn(1, 50, 2, 16, device=device) for _ in range(3))
    bounds = torch.tensor([0, 13, 14, 50], device=device)
    row = torch.arange(50, device=device)
    document = torch.searchsorted(bounds, row, right=True)
    distance = row[:, None] - row
    mask = (distance >= 0) & (distance < 9) & (document[:, None] == document)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*transposed, attn_mask=mask).transpose(1, 2)
    for backend in ("triton", "reference"):
        o = sliding_window_attention(q, k, v, 9, cu_seqlens=bounds, backend=backend)
        torch.testing.assert_close(o, expected)


q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
bounds, lengths = torch.tensor([0, 2, 6]), torch.tensor([4])
BAD = {
    "list": (dict(cu_seqlens=[0, 6]), TypeError, "cu_seqlens must be a tensor, got list"),
    "fractions": (
        dict(cu_seqlens=bounds.float()),
        *(TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    ),
    "one bound": (dict(cu_seqlens=bounds[:1]), ValueError, "with N at least 1, got .*1"),
    "number": (dict(cu_seqlens=bounds[0]), ValueError, r"must be \[N \+ 1\] or \[B, N \+ 1\]"),
    "other rows": (dict(cu_seqlens=bounds.expand(2, 3)), ValueError, "with q's B = 1, got .*2, 3"),
    "fractional length": (
        dict(key_lengths=lengths.float()),
        TypeError,
        "key_lengths must be int32",
    ),
    "two lengths": (
        dict(key_lengths=bounds[:2]),
        ValueError,
        r"must have shape \(1,\).* got \(2,\)",
    ),
    "both": (
        dict(cu_seqlens=bounds, key_lengths=lengths),
        *(ValueError, "one of cu_seqlens and key_lengths may be given, got both"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        sliding_window_attention(q, k, v, 2, **options)


def test_bounds_of_one_row_beside_two_are_refused():
    pair = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match=r"with cu_seqlens \[N \+ 1\] q must have one row, B = 1"):
        sliding_window_attention(pair, pair, pair, 2, cu_seqlens=bounds)
