"""GatedSparseAttention: causality, replay of a selection, positions, what learns."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from fusewright.gsa import GatedSparseAttention, Selection, all_keys, gated_indexer
from fusewright.gsa.layer.positions import rotated
from fusewright_testkit import Yardstick

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def layer(backend="reference", dtype=F32, device="cpu", **options):
    torch.manual_seed(0)
    options = dict(key_heads=2, index_heads=2, index_width=8, sinks=1) | options
    counts = dict(k_base=5, k_min=2, k_max=8)
    place = dict(backend=backend, dtype=dtype, device=device)
    built = GatedSparseAttention(24, 4, head_width=8, **counts | options | place)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10.0)
    return built


def tokens(count=11, dtype=F32, device="cpu", batches=1):
    return torch.randn(batches, count, 24, device=device, dtype=dtype)


def by_hand(layer, x, counted):
    """The docstring's formula over the keys that ``counted`` [B, T, T] names: y, and the heads'
    probabilities.
    """
    q, k, v, gate = (
        getattr(layer, name)(x).unflatten(-1, (-1, layer.head_width))
        for name in ("q_proj", "k_proj", "v_proj", "value_gate")
    )
    step = torch.arange(layer.head_width // 2, dtype=F64, device=x.device) * 2 / layer.head_width
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] / layer.rope_base**step
    phases = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(*z.chunk(2, -1)) * phases for z in (q, k))
    group = layer.heads // layer.key_heads
    k, v = (z.repeat_interleave(group, 2) for z in (k, v * gate.sigmoid()))
    scores = torch.einsum("bthd,bshd->bhts", q, k.conj()).real / math.sqrt(layer.head_width)
    p = scores.masked_fill(~counted[:, None], -math.inf).softmax(-1)
    o = torch.einsum("bhts,bshd->bthd", p, v).flatten(2)
    return layer.o_proj(o * layer.output_gate(x).sigmoid()), p


def assert_same_but_for_rounding(found, expected):
    """Two orders of the same fp64 sums, the longest of fewer than 2^10 terms: apart by no more than
    one rounding per term.
    """
    bound = 2**10 * torch.finfo(F64).eps * expected.abs().max()
    assert found.dtype == expected.dtype == F64
    assert (found - expected).abs().max() <= bound


def outputs_of(layer, selection):
    """y and the loss of x, whose dtype is that of the parameters."""

    def of(x):
        y, _, loss = copy.deepcopy(layer).to(x.dtype).forward_with_loss(x, selection)
        return y, loss

    return of


def counted_of(selection, tokens):
    """Which keys each query has selected, [B, T, T]."""
    return (selection.indices[..., None] == torch.arange(tokens)).any(-2)


def everything(tokens, device="cpu"):
    """All keys up to each query's position, as a selection that names no other."""
    slot = torch.arange(tokens, device=device)
    indices = torch.where(slot <= slot[:, None], slot, -1).int()
    return Selection(indices[None], 1 + slot.int()[None])


def test_it_computes_its_formula():
    attention, x = layer(dtype=F64, rope_base=5.0), tokens(dtype=F64)
    y, selection = attention(x)
    counted = counted_of(selection, 11)
    assert torch.equal(counted.sum(-1), selection.count)
    assert counted[:, -1].sum() < 11
    assert_same_but_for_rounding(y, by_hand(attention, x, counted)[0])


@pytest.mark.parametrize("chosen", [None, everything(11)], ids=["sparse phase", "dense warm-up"])
def test_loss_is_the_divergence_over_the_selected_keys(chosen):
    attention, x = layer(dtype=F64), tokens(dtype=F64)
    _, selection, loss = attention.forward_with_loss(x, chosen)
    counted = counted_of(selection, 11) if chosen is None else torch.ones(1, 11, 11).tril() > 0
    target = by_hand(attention, x, counted)[1].mean(1)
    scores = gated_indexer(*attention._index(x), attention.index_bias)
    logits = (attention.index_temperature * scores).masked_fill(~counted, -math.inf)
    ratio = target.log() - logits.log_softmax(-1)
    expected = torch.where(counted, target * ratio, 0.0).sum() / 11
    assert_same_but_for_rounding(loss, expected)


def test_law_is_inverse_unless_another_is_asked_for():
    x = tokens(16)

    def count_of(**law):
        attention = layer(**law).eval()
        attention.variance_ema.fill_(0.03)
        return attention(x)[1].count

    assert torch.equal(count_of(), count_of(law="inverse"))
    for law in ("proportional", "entropy", "fixed"):
        assert not torch.equal(count_of(), count_of(law=law))


@pytest.mark.parametrize("law", ["inverse", "entropy"])
def test_future_tokens_change_no_bit_of_the_past(backend, law, device):
    attention = layer(backend, device=device, law=law).eval()
    attention.variance_ema.fill_(0.03)
    x = tokens(device=device)
    before, chosen = attention(x)
    for token in (1, 6):
        later = x.clone()
        later[:, token:] = torch.randn_like(later[:, token:])
        after, selection = attention(later)
        assert torch.equal(before[:, :token], after[:, :token])
        assert torch.equal(chosen.indices[:, :token], selection.indices[:, :token])


def test_replayed_selection_gives_the_same_bits(backend, device):
    attention = layer(backend, device=device)
    x = tokens(device=device).requires_grad_()
    y, selection, loss = attention.forward_with_loss(x)
    average = attention.variance_ema.clone()
    again, same, loss_again = attention.forward_with_loss(x, selection)
    assert torch.equal(y, again)
    assert torch.equal(loss, loss_again)
    assert same is selection
    assert torch.equal(attention.variance_ema, average)
    one, other = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, again))
    assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, dict(form="relu", index_rotary=4)], ids=["gated", "relu"])
def test_kernels_follow_the_reference(options, device):
    x = tokens(device=device)
    ours, plain = (layer(name, device=device, **options) for name in ("triton", "reference"))
    # A copy's average of the variance learns from it.
    _, selection, _ = copy.deepcopy(ours).forward_with_loss(x)
    Yardstick(outputs_of(plain, selection), [x]).check(outputs_of(ours, None))


@pytest.mark.parametrize("window", [0, 1])
def test_window_of_the_layer_is_always_selected(backend, window, device):
    attention = layer(backend, device=device, window=window, law="fixed")
    with torch.no_grad():
        attention.index_w.weight.zero_()
    # All scores tie: but for the window the lowest keys are selected.
    _, selection = attention(0.0 * tokens(device=device))
    kept = [[*range(min(row + 1, 5))] for row in range(11)]
    if window:
        kept = [[*range(min(row, 4)), row] for row in range(11)]
    assert [
        row[:n] for row, n in zip(selection.indices[0].tolist(), selection.count[0], strict=True)
    ] == kept


RELU = dict(form="relu", index_rotary=4, window=1)


def relu_index(layer, x):
    """The indexer's scores of DeepSeek-V3.2-Exp, by hand."""
    q = layer.index_q(x).unflatten(-1, (layer.index_heads, -1))
    k = layer.index_k(x)
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    k = (k * layer.index_norm.weight + layer.index_norm.bias)[:, :, None]
    step = torch.arange(2, dtype=F64) * 2 / 4
    angle = torch.arange(x.shape[1])[:, None, None] / layer.rope_base**step
    phases = torch.polar(torch.ones_like(angle), angle)

    def first_rotated(z):
        first = torch.complex(*z[..., :4].chunk(2, -1)) * phases
        return torch.cat([first.real, first.imag, z[..., 4:]], -1)

    products = torch.einsum("bthd,bshd->bths", first_rotated(q), first_rotated(k).expand_as(q))
    weights = layer.index_w(x) * layer.index_heads**-0.5 * layer.index_width**-0.5
    return (weights[..., None] * products.relu()).sum(2)


def test_relu_form_computes_its_formula():
    attention, x = layer(dtype=F64, rope_base=5.0, **RELU), tokens(dtype=F64)
    with torch.no_grad():
        attention.index_norm.weight.normal_()
        attention.index_norm.bias.normal_()
    expected = relu_index(attention, x)
    options = dict(form="relu", causal=False)
    scores = gated_indexer(*attention._index(x), torch.zeros(2, dtype=F64), **options)
    assert_same_but_for_rounding(scores, expected)
    assert (scores < 0).any()
    _, selection, loss = attention.forward_with_loss(x)
    counted = counted_of(selection, 11)
    target = by_hand(attention, x, counted)[1].mean(1)
    logits = (attention.index_temperature * expected).masked_fill(~counted, -math.inf)
    ratio = target.log() - logits.log_softmax(-1)
    divergence = torch.where(counted, target * ratio, 0.0).sum() / 11
    assert_same_but_for_rounding(loss, divergence)


@pytest.mark.parametrize("shape", [(7, 24), (1, 7, 23), (24,)])
def test_tokens_of_another_shape_are_refused(shape):
    attention = layer()
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got"):
        attention(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got"):
        attention.decode(torch.zeros(shape), attention.new_cache(1, 9))


@pytest.mark.parametrize("convert", [torch.nn.Module.bfloat16, torch.nn.Module.half])
def test_average_of_the_variance_stays_in_fp32(convert):
    attention = layer()
    attention(tokens())
    average = attention.variance_ema.clone()
    converted = convert(attention)
    assert converted.q_proj.weight.dtype != F32
    assert converted.variance_ema.dtype == F32
    assert torch.equal(converted.variance_ema, average)
    assert torch.equal(converted.state_dict()["variance_ema"], average)
    assert converted.to("meta").variance_ema.is_meta


@pytest.mark.parametrize("path", ["queries", "tiles"])
def test_path_is_that_of_the_caller(path, device, monkeypatch):
    from fusewright.gsa.layer import gated_sparse_attention

    paths = []

    def recorded(*arguments, path="auto", **options):
        paths.append(path)
        return attend(*arguments, path=path, **options)

    attend = gated_sparse_attention.sparse_attention_with_lse
    monkeypatch.setattr(gated_sparse_attention, "sparse_attention_with_lse", recorded)
    attention = layer("triton", device=device, path=path).eval()
    x = tokens(device=device)
    y, selection = attention(x)
    layer("triton", device=device).eval()(x)
    attention.decode(x, attention.new_cache(1, 11))
    assert paths == [path, "auto", "auto"]
    plain = outputs_of(layer("reference", device=device).eval(), selection)
    Yardstick(lambda x: plain(x)[0], [x], [None]).check(lambda x: y)


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
def test_every_parameter_learns_and_the_indexer_by_its_loss_alone(backend, options, device):
    attention = layer(backend, device=device, **options)
    x = tokens(device=device).requires_grad_()
    y, _, loss = attention.forward_with_loss(x)
    of_indexer = {n: p for n, p in attention.named_parameters() if n.startswith("index")}
    others = {n: p for n, p in attention.named_parameters() if n not in of_indexer}
    everything = [*of_indexer.values(), *others.values(), x]
    by_loss = torch.autograd.grad(loss, everything, allow_unused=True, retain_graph=True)
    by_output = torch.autograd.grad(y.square().sum(), everything, allow_unused=True)
    few = len(of_indexer)
    assert all(g is not None and g.any() for g in by_loss[:few])
    assert by_loss[few:] == (None,) * (len(others) + 1)
    assert by_output[:few] == (None,) * few
    assert all(g is not None and g.any() for g in by_output[few:])


def test_products_of_rotated_rows_know_the_distance_alone():
    q, k = (torch.randn(1, 1, 1, 8, dtype=F64) for _ in "qk")

    def score(m, n):
        at = (torch.tensor([p]) for p in (m, n))
        return (rotated(next(at), 100.0, q)[0] * rotated(next(at), 100.0, k)[0]).sum()

    for distance in (0, 3, 40):
        expected = score(distance, 0)
        for n in (1, 17, 5000):
            # Both angles are rounded, products and sums of the rows too.
            roundings = 2 * (n + distance) + 8
            bound = roundings * torch.finfo(F64).eps * q.norm() * k.norm()
            assert (score(n + distance, n) - expected).abs() <= bound
    assert (score(3, 0) - score(4, 0)).abs() > bound


def test_average_of_the_variance_starts_with_the_first_and_then_follows(device):
    attention = layer(device=device, ema_decay=0.75)
    x, z = tokens(device=device), tokens(device=device)
    attention(x)
    first = attention.variance_ema.clone()
    assert first > 0
    variance = attention._select(attention._index(z), 0)[1]
    attention(z)
    expected = 0.75 * first.double() + 0.25 * variance.double().mean()
    # Roundings of the mean of eleven, the products and the sum.
    bound = 14 * torch.finfo(F32).eps * expected
    found = attention.variance_ema.clone()
    assert (found - expected).abs() <= bound
    attention.eval()
    attention(x)
    assert torch.equal(attention.variance_ema, found)


def test_closed_gates_let_nothing_through(backend, device):
    x = tokens(device=device).abs()
    for gate in ("value_gate", "output_gate"):
        attention = layer(backend, device=device)
        with torch.no_grad():
            getattr(attention, gate).weight.fill_(-1000.0)
        assert not attention(x)[0].any()


def test_state_is_loaded_again(device):
    one, other = layer(device=device), layer(device=device)
    x = tokens(device=device)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    one(x)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.eval()(x)[0], other.eval()(x)[0])


@pytest.mark.parametrize("count", [1, 11, 70])
def test_all_keys_are_those_that_each_query_sees(backend, count, device):
    attention, x = layer(backend, device=device), tokens(count, device=device)
    every, one_by_one = all_keys(1, count, device), everything(count, device)
    found, expected = (attention.forward_with_loss(x, each) for each in (every, one_by_one))
    assert found[1] is every
    for one, other in ((found[0], expected[0]), (found[2], expected[2])):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_rotations_compile_into_one_graph(device):
    def rotate(x):
        return torch.stack(rotated(torch.arange(5, device=device), 100.0, x))

    x = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    found = []
    for call in (torch.compile(rotate, fullgraph=True, backend="aot_eager"), rotate):
        y = call(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), x)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_all_keys_take_the_memory_of_one_query():
    indices, count = all_keys(2, 65_536, "cpu")
    assert indices.shape == (2, 65_536, 65_536)
    assert [x.untyped_storage().nbytes() for x in (indices, count)] == [4 * 65_537] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_few_tokens_are_all_attended_to(backend, count, device):
    attention = layer(backend, device=device)
    y, selection = attention(tokens(count, device=device))
    assert y.shape == (1, count, 24)
    assert selection.count.tolist() == [list(range(1, count + 1))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(key_heads=3), "multiple of key_heads, got 4, 3"),
        (dict(head_width=7), "even, got 7"),
        (dict(k_min=9), "k_min must be from 1 to k_max, 8, got 9"),
        (dict(sinks=1, window=2), "window must be from 0 to k_min - sinks, 1, got 2"),
        (dict(sinks=3), "sinks must be from 0 to k_min, 2, got 3"),
        (dict(law="best"), "got 'best'"),
        (dict(form="sum"), "form must be.*got 'sum'"),
        (dict(index_rotary=3), "index_rotary must be even, up to index_width 64, got 3"),
        (dict(index_rotary=66), "even, up to index_width 64, got 66"),
        (dict(backend="cuda"), "got 'cuda'"),
        (dict(index_width=0), "index_width must be at least 1, got 0"),
        (dict(index_width=257), "index_width must be from 1 to 256, got 257"),
        (dict(head_width=258), "head_width must be from 1 to 256, got 258"),
        (dict(head_width=0), "head_width must be at least 1, got 0"),
        (dict(key_heads=0), "key_heads must be at least 1, got 0"),
        (dict(width=30), "width must be a multiple of heads .*, got 30, 4"),
        (dict(ema_decay=1.5), "ema_decay must be from 0 to 1, got 1.5"),
        (dict(rope_base=-1.0), "rope_base must be from .*, got -1"),
        (dict(temperature=float("nan")), "temperature must be from .*, got nan"),
        (dict(path="rows"), "got 'rows'"),
    ],
    ids=str,
)
def test_bad_options_are_told_what_was_wanted_and_what_came(options, message):
    counts = dict(k_base=5, k_min=2, k_max=8, sinks=1)
    with pytest.raises(ValueError, match=message):
        GatedSparseAttention(**dict(width=32, heads=4) | counts | options)


def test_temperature_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="temperature must be a number, got str"):
        GatedSparseAttention(32, 4, temperature="hot")


def test_gradients_of_rotated_rows_are_those_of_its_formula():
    positions, base = torch.arange(5), 100.0
    rows = [torch.randn(2, 5, heads, 6, dtype=F64, requires_grad=True) for heads in (3, 1)]

    def by_formula(*rows):
        angles = positions.double()[:, None, None] * base ** -(torch.arange(0, 6, 2).double() / 6)
        parts = [x.chunk(2, -1) for x in rows]
        cos, sin = angles.cos(), angles.sin()
        return [torch.cat([x * cos - y * sin, y * cos + x * sin], -1) for x, y in parts]

    cotangents = [torch.randn_like(x) for x in rows]
    found, expected = rotated(positions, base, *rows), by_formula(*rows)
    pairs = [*zip(found, expected, strict=True)]
    grads = [torch.autograd.grad(ys, rows, cotangents) for ys in (found, expected)]
    bound = 16 * torch.finfo(F64).eps
    for x, y in (*pairs, *zip(*grads, strict=True)):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)
    assert all(len(y.grad_fn.next_functions) == 3 for y in found)
    assert torch.autograd.gradgradcheck(lambda *x: rotated(positions, base, *x), rows)
    mapped = torch.vmap(lambda x: rotated(positions, base, x.unsqueeze(0))[0])(rows[0])
    torch.testing.assert_close(mapped.squeeze(1), found[0], rtol=0, atol=0)
    # A rotation is linear.
    tangents = tuple(map(torch.randn_like, rows))
    pushed = torch.func.jvp(lambda *x: tuple(rotated(positions, base, *x)), tuple(rows), tangents)
    for x, y in zip(pushed[1], rotated(positions, base, *tangents), strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)


def test_state_dicts_with_a_scalar_temperature_load():
    saved = layer(temperature=3.0).state_dict()
    scalar = saved | {"index_temperature": saved["index_temperature"].squeeze()}
    assert scalar["index_temperature"].ndim == 0
    built = layer()
    built.load_state_dict(scalar)
    assert torch.equal(built.index_temperature, torch.full((1,), 3.0))
