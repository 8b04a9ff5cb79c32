"""Attention to a window and a prefix: values, what a row sees, what is refused."""

from __future__ import annotations

import math
import pathlib
from functools import partial

import pytest
import torch
from fusewright.attention import sliding_window_attention
from fusewright.attention.window import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.bench import load
from fusewright_testkit.conformance import same_bits
from torch.nn.functional import scaled_dot_product_attention

from .operations import tf32

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
bench = load(pathlib.Path(__file__).parents[1])
one_tiling = pytest.mark.parametrize("tiles", [(32, 16)], indirect=True)

# T, rows of q, window, prefix
BANDS = (
    (1, 1, 1, 0),
    (1, 1, 4, 1),
    (40, 40, 1, 0),
    (50, 50, 7, 17),
    (52, 52, 33, 1),
    (49, 49, 16, 16),
    (50, 50, 80, 0),
    (40, 40, 5, 40),
    (50, 9, 6, 17),
    (50, 1, 20, 3),
    (40, 20, 3, 33),
)

# And how many rows there are for each of q.
SPARSE_BANDS = (
    (40, 20, 6, 0, 2),
    (57, 20, 40, 17, 2),
    (50, 8, 9, 5, 3),
    (41, 21, 80, 1, 2),
    (34, 1, 5, 3, 7),
)


def draw(op, tokens, rows, width=16, dtype=F32, device="cpu", batches=1, heads=1):
    return op.draw((batches, rows, tokens, heads, width), dtype, device)


@pytest.mark.sampled
@pytest.mark.parametrize(("tokens", "rows", "window", "prefix"), BANDS)
def test_values_and_gradients(window_op, tiles, tokens, rows, window, prefix, device):
    tensors = draw(window_op, tokens, rows, device=device)
    window_op.check(tensors, window=window, prefix=prefix)


@pytest.mark.sampled
@pytest.mark.parametrize(("tokens", "rows", "window", "prefix", "every"), SPARSE_BANDS)
def test_values_and_gradients_of_every_so_many_rows(
    window_op, tiles, tokens, rows, window, prefix, every, device
):
    tensors = draw(window_op, tokens, rows, device=device)
    window_op.check(tensors, window=window, prefix=prefix, every=every)


@pytest.mark.parametrize(
    ("width", "dtype", "tokens", "window"),
    [
        (40, F32, 70, 40),
        (64, BF16, 140, 75),
        (128, F16, 140, 75),
        (136, F32, 40, 20),
        (256, BF16, 70, 40),
    ],
)
def test_tables_of_the_package(window_op, width, dtype, tokens, window, device):
    """Tiles of up to 32 queries and keys of fp32 and of 128 queries or 64 keys of the others, so
    that a band begins and ends within them.
    """
    tensors = draw(window_op, tokens, tokens, width, dtype, device)
    window_op.check(tensors, window=window, prefix=17, scale=width**-0.5)


@pytest.mark.parametrize("tiles", [(16, 16, "descriptors")], indirect=True)
def test_descriptors(window_op, tiles, device):
    tensors = draw(window_op, 24, 24, device=device, batches=2, heads=2)
    window_op.check(tensors, window=9, prefix=5)


@pytest.mark.parametrize(
    ("tokens", "rows", "window", "prefix", "every"),
    [*((*band, 1) for band in BANDS), *SPARSE_BANDS],
)
def test_reference_sees_what_the_definition_says(tokens, rows, window, prefix, every):
    q, k = torch.empty(1, rows, 1, 8), torch.empty(1, tokens, 1, 8)
    seen = reference.keys_seen(q, k, window, prefix, every)
    asking = range(tokens)[::-every][:rows][::-1]
    for index, row in enumerate(asking):
        keys = set(range(prefix))
        if row >= prefix:
            keys |= set(range(max(prefix, row - window + 1), row + 1))
        assert set(seen[index].nonzero().flatten().tolist()) == keys


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("band", [(7, 17), (60, 0)], ids=str)
def test_heads_that_share_keys(window_op, tiles, heads, band, device):
    """dk and dv are sums over them, those of a prefix too."""
    window, prefix = band
    q, _, _ = draw(window_op, 50, 50, device=device, heads=heads[0])
    _, k, v = draw(window_op, 50, 50, device=device, heads=heads[1])
    window_op.check([q, k, v], window=window, prefix=prefix)


@pytest.mark.parametrize("widths", [(16, 40), (40, 16)], ids=str)
@pytest.mark.parametrize("band", [(7, 17), (60, 0)], ids=str)
def test_values_of_another_width(window_op, tiles, band, widths, device):
    """Partial sums of dk and dv of a prefix have widths of their own."""
    window, prefix = band
    q, k, _ = draw(window_op, 50, 50, widths[0], device=device, heads=2)
    _, _, v = draw(window_op, 50, 50, widths[1], device=device, heads=2)
    window_op.check([q, k, v], window=window, prefix=prefix)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("band", [(7, 17), (60, 0)], ids=str)
def test_sinks(window_op, tiles, band, dtype, device):
    window, prefix = band
    tensors = draw(window_op, 50, 50, dtype=dtype, device=device, heads=3)
    sinks = torch.tensor([-6.0, 0.5, 6.0], device=device)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, window=window, prefix=prefix, sinks=sinks)

    yardstick = Yardstick(with_sinks(window_op.reference), [*tensors, sinks])
    yardstick.check(with_sinks(window_op.kernels))


@one_tiling
def test_window_as_long_as_the_sequence_is_causal_attention(window_op, tiles, device):
    q, k, v = draw(window_op, 50, 50, device=device, heads=2)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*transposed, is_causal=True).transpose(1, 2)
    for window in (50, 2**40):
        o = sliding_window_attention(q, k, v, window, backend="triton")
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("change", [1.0, math.nan, math.inf])
@one_tiling
def test_a_token_reaches_no_row_that_does_not_see_it(window_op, tiles, backend, change, device):
    """No earlier row, and no row from the end of the window on: not a bit, NaN or not."""
    tensors = draw(window_op, 50, 50, device=device)
    options = dict(window=9, prefix=5, backend=backend)
    clean = window_op.public(*tensors, **options)
    for x in tensors[1:]:
        x[:, 21] += change
    actual = window_op.public(*tensors, **options)
    unseen = torch.ones(50, dtype=torch.bool, device=device)
    unseen[21:30] = False
    assert torch.equal(actual[0][:, unseen], clean[0][:, unseen])
    assert torch.equal(actual[1][..., unseen], clean[1][..., unseen])
    reached = actual[0][:, ~unseen]
    if change == 1.0:
        assert (reached != clean[0][:, ~unseen]).any(-1).all()
    else:
        assert (~reached.isfinite()).any(-1).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("change", [math.nan, math.inf])
@one_tiling
def test_a_strange_value_reaches_the_rows_that_see_it(window_op, tiles, backend, change, device):
    """In border tiles and inner ones, and in the statistics of none."""
    q, k, v = draw(window_op, 70, 70, device=device)
    options = dict(window=60, prefix=5, backend=backend)
    clean = window_op.public(q, k, v, **options)
    v[:, 8, 0, 3] = change
    actual = window_op.public(q, k, v, **options)
    seeing = torch.zeros(70, dtype=torch.bool, device=device)
    seeing[8:68] = True
    assert torch.equal((~actual[0].isfinite()).any(-1)[0, :, 0], seeing)
    assert torch.equal(actual[0][:, ~seeing], clean[0][:, ~seeing])
    assert torch.equal(actual[1], clean[1])


@one_tiling
def test_prefix_rows_see_the_prefix_alone(window_op, tiles, device):
    q, k, v = draw(window_op, 40, 40, device=device)
    o, lse = window_op.kernels(q, k, v, window=9, prefix=20)
    alone = window_op.kernels(q[:, :20], k[:, :20], v[:, :20], window=1, prefix=20)
    assert same_bits((o[:, :20], lse[..., :20]), alone)


@one_tiling
def test_a_longer_sequence_changes_no_bit_of_its_beginning(window_op, tiles, device):
    tensors = draw(window_op, 50, 50, device=device)
    o, lse = window_op.kernels(*tensors, window=9, prefix=5)
    shorter = window_op.kernels(*(x[:, :43] for x in tensors), window=9, prefix=5)
    assert same_bits((o[:, :43], lse[..., :43]), shorter)


@one_tiling
def test_streaming_from_a_cache_is_the_whole_sequence(window_op, tiles, device):
    """The cache holds the prefix and no more tokens than the window needs."""
    tensors = draw(window_op, 50, 50, device=device)
    options = dict(window=9, prefix=5)

    def whole(*tensors):
        return window_op.first(window_op.reference(*tensors, **options))[:, 20:]

    def streamed(q, k, v):
        parts = []
        for begin, end in ((20, 21), (21, 22), (22, 39), (39, 50)):
            cached = slice(max(5, begin - 8), end)
            keys, values = (torch.cat([x[:, :5], x[:, cached]], 1) for x in (k, v))
            parts.append(
                window_op.first(window_op.kernels(q[:, begin:end], keys, values, **options))
            )
        return torch.cat(parts, 1)

    Yardstick(whole, tensors).check(streamed)


@one_tiling
def test_both_functions_give_the_same_bits(window_op, tiles, device):
    tensors = draw(window_op, 50, 50, dtype=BF16, device=device)
    alone = sliding_window_attention(*tensors, 9, 17, scale=0.3, backend="triton")
    o, _ = window_op.kernels(*tensors, window=9, prefix=17)
    assert torch.equal(o, alone)


@pytest.mark.parametrize("only", ["o", "lse"])
@one_tiling
def test_gradient_of_one_output_alone(window_op, tiles, only, device):
    def one(call):
        return lambda *t: call(*t, window=9, prefix=5)[("o", "lse").index(only)]

    yardstick = Yardstick(one(window_op.reference), draw(window_op, 40, 40, device=device))
    yardstick.check(one(window_op.kernels))


@one_tiling
def test_great_scores(window_op, tiles, device):
    q, k, v = draw(window_op, 50, 50, dtype=BF16, device=device)
    window_op.check([30 * q, 30 * k, v], window=9, prefix=5)


@pytest.mark.parametrize("shape", [(2, 0, 0, 1, 16), (2, 0, 9, 1, 16), (0, 9, 9, 1, 16)], ids=str)
def test_no_rows_no_tasks(window_op, shape, device):
    tensors = window_op.draw(shape, F32, device)
    window_op.check(tensors, prefix=0)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_reference_backward_is_that_of_autograd(window_op, with_sinks):
    tensors = [x.requires_grad_() for x in draw(window_op, 9, 8, 8, F64, batches=2)]
    sinks = torch.randn(1, dtype=F64).requires_grad_() if with_sinks else None
    o, lse = window_op.reference(*tensors, sinks=sinks)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    asked = [*tensors, sinks] if with_sinks else tensors
    expected = torch.autograd.grad((o, lse), asked, (do, dlse))
    backward = reference.sliding_window_attention_backward
    band = window_op.window, window_op.prefix
    actual = backward(do, dlse, *tensors, *band, scale=0.3, sinks=sinks)
    torch.testing.assert_close(actual[: len(asked)], expected)
    assert with_sinks or not actual[3].numel()


def test_tf32_only_where_torch_takes_it(window_op, device):
    tensors = draw(window_op, 40, 40, 64, device=device)
    exact = window_op.first(window_op.kernels(*tensors))
    with tf32():
        window_op.check(tensors)
        assert not torch.equal(window_op.first(window_op.kernels(*tensors)), exact)


def test_benchmark_asks_its_peer_for_the_same_keys():
    tensors = bench.normal([(1, 600, 1, 64)] * 3, F32, "cpu")
    actual = bench.sdpa_with_mask(*tensors)
    expected = reference.sliding_window_attention(*tensors, bench.WINDOW, scale=0.125)
    torch.testing.assert_close(actual, expected)
    tensors = bench.normal([(1, 900, 1, 64)] * 3, F32, "cpu")
    bounds = bench.bounds_of(900, "cpu")
    assert bounds.tolist() == [0, 700, 800, 801, 900]
    actual = bench.sdpa_with_mask(*tensors, bounds)
    torch.testing.assert_close(actual, bench.reference_window(*tensors, bounds, scale=0.125))


q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
BAD = {
    "fraction": ((q, k, v, 2.0), TypeError, "window must be a whole number, got float"),
    "true": ((q, k, v, True), TypeError, "window must be a whole number, got bool"),
    "tensor": ((q, k, v, 2, torch.tensor(1)), TypeError, "prefix must be a whole .* got Tensor"),
    "no window": ((q, k, v, 0), ValueError, "window must be 1 or more keys, got 0"),
    "negative prefix": ((q, k, v, 2, -1), ValueError, "prefix must be 0 to 6, .* got -1"),
    "long prefix": ((q, k, v, 2, 7), ValueError, "prefix must be 0 to 6, .* got 7"),
    "none of a row": (dict(every=0), ValueError, "every must be 1 or more rows, got 0"),
    "half a row": (dict(every=0.5), TypeError, "every must be a whole number, got float"),
    "too few rows": (dict(every=2), ValueError, "last of each 2 rows of 6 at most, got 6 rows"),
    "more rows": ((q, k[:, 1:], v[:, 1:], 2), ValueError, "last rows of 5 at most, got 6"),
    "heads": ((q[:, :, :1], k, v, 2), ValueError, r"k and v must be \[1, M, G, 8\]"),
    "dtypes": ((q, k, v.half(), 2), ValueError, "v must have q's dtype torch.float32, got"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    arguments, error, message = BAD[name]
    options = {}
    if isinstance(arguments, dict):
        arguments, options = (q, k, v, 2), arguments
    with pytest.raises(error, match=message):
        sliding_window_attention(*arguments, **options)


def test_default_scale_and_prefix():
    expected = partial(sliding_window_attention, q, k, v, 2)
    assert torch.equal(expected(), expected(0, scale=8**-0.5))
