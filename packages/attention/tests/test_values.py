"""Values and gradients against fp64, with the error that plain torch makes."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.attention.rectangular import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import layouts, same_bits
from torch.utils.checkpoint import checkpoint

from .operations import SCALE

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# B, Nq, M, H, D
SHAPES = (
    (2, 17, 16, 2, 16),
    (1, 17, 47, 2, 24),
    (1, 20, 65, 1, 40),
    (1, 34, 40, 2, 64),
    (1, 18, 40, 1, 128),
)
LAYOUTS = (
    layouts.first_of_fused_heads,
    layouts.heads_before_tokens,
    layouts.last_axis_first,
    layouts.repeated_rows,
    layouts.amid_memory,
    layouts.every_other_token,
)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(lse_op, any_scheme, shape, device):
    lse_op.check(lse_op.draw(shape, F32, device))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (2, 5, 3, 1, 8)], ids=str)
def test_a_few_keys(op, shape, device):
    """On every GPU they are one tile."""
    op.check(op.draw(shape, F32, device))


@pytest.mark.parametrize("keys", [7, 40])
@pytest.mark.parametrize(("width", "dtype"), [(136, F32), (256, F32), (200, BF16)])
def test_wide_heads(lse_op, width, dtype, keys, device):
    """Few keys of theirs are one tile."""
    lse_op.check(lse_op.draw((1, 34, keys, 1, width), dtype, device), scale=width**-0.5)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision(lse_op, any_scheme, dtype, device):
    lse_op.check(lse_op.draw((1, 20, 70, 1, 32), dtype, device))


@pytest.mark.parametrize("keys", [127, 128, 129, 300])
def test_many_keys_with_the_tables_of_the_package(lse_op, keys, device):
    lse_op.check(lse_op.draw((1, 70, keys, 1, 64), BF16, device))


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("keys", [24, 40])
def test_heads_that_share_keys(lse_op, any_scheme, heads, keys, device):
    """dk and dv are sums over them."""
    q, _, _ = lse_op.draw((2, 20, keys, heads[0], 16), F32, device)
    _, k, v = lse_op.draw((2, 20, keys, heads[1], 16), F32, device)
    lse_op.check([q, k, v], [keys, 17])


def test_shared_heads_are_those_of_torch(op, scheme, device):
    """Query head h reads head h // group, which also those of a head of its own read."""
    q, _, _ = op.draw((2, 20, 40, 6, 16), F32, device)
    _, k, v = op.draw((2, 20, 40, 3, 16), F32, device)
    o = op.first(op.kernels(q, k, v, scale=None))
    expanded = (x.repeat_interleave(2, 2) for x in (k, v))
    assert torch.equal(o, op.first(op.kernels(q, *expanded, scale=None)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(o, sdpa(q, k, v, enable_gqa=True).transpose(1, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("widths", [(16, 40), (40, 16), (24, 32)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_values_of_another_width(lse_op, any_scheme, widths, dtype, device):
    q, k, _ = lse_op.draw((2, 20, 40, 2, widths[0]), dtype, device)
    _, _, v = lse_op.draw((2, 20, 40, 2, widths[1]), dtype, device)
    lse_op.check([q, k, v], [40, 17])


@pytest.mark.parametrize("only", ["o", "lse"])
def test_gradient_of_one_output_of_values_of_another_width(lse_op, scheme, only, device):
    q, k, _ = lse_op.draw((1, 20, 24, 2, 16), F32, device)
    _, _, v = lse_op.draw((1, 20, 24, 2, 32), F32, device)

    def one(call):
        return lambda *t: call(*t)[("o", "lse").index(only)]

    Yardstick(one(lse_op.reference), [q, k, v]).check(one(lse_op.kernels))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("keys", [24, 40])
def test_sinks(lse_op, any_scheme, keys, dtype, device):
    """Of rows without keys, too."""
    tensors = lse_op.draw((3, 20, keys, 3, 16), dtype, device)
    lengths = torch.tensor([keys, 0, 17], device=device)
    sinks = torch.tensor([-6.0, 0.5, 6.0], device=device)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, lengths, sinks=sinks)

    yardstick = Yardstick(with_sinks(lse_op.reference), [*tensors, sinks])
    yardstick.check(with_sinks(lse_op.kernels))


def test_sink_is_a_key_without_value(lse_op, scheme, device):
    """Whose score is the sink: here that of a key with one column for the purpose."""
    q, k, v = lse_op.draw((2, 20, 24, 2, 16), F32, device)
    q[..., 0], k[..., 0] = 1.0, 0.0
    sink = k.new_zeros(2, 1, 2, 16)
    sink[..., 0] = torch.tensor([2.0, -1.0]).to(device) / SCALE
    zero = torch.zeros_like(sink)
    expected = lse_op.kernels(q, torch.cat([k, sink], 1), torch.cat([v, zero], 1))
    actual = lse_op.kernels(q, k, v, sinks=torch.tensor([2.0, -1.0], device=device))
    torch.testing.assert_close(actual, expected)


def test_task_without_keys_has_the_sink_as_log_sum_exp(lse_op, scheme, device):
    tensors = lse_op.draw((2, 3, 4, 2, 16), F32, device)
    sinks = torch.tensor([1.5, -40.0], device=device, dtype=F32).requires_grad_()
    lengths = torch.tensor([0, 4], device=device)
    o, lse = lse_op.kernels(*tensors, lengths, sinks=sinks)
    assert o[0].eq(0).all()
    torch.testing.assert_close(lse[0], sinks.detach()[:, None].expand(2, 3))
    for keys in (0, 4):
        q, k, v = (x[:1] for x in tensors)
        _, lse = lse_op.kernels(q, k[:, :keys], v[:, :keys], lengths[:1], sinks=sinks)
        (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
        torch.testing.assert_close(dsinks, torch.full_like(dsinks, 3.0))


def test_sink_of_minus_infinity_is_none(lse_op, scheme, device):
    tensors = lse_op.draw((2, 20, 24, 2, 16), F32, device)
    sinks = torch.full((2,), -math.inf, device=device)
    assert same_bits(lse_op.kernels(*tensors, sinks=sinks), lse_op.kernels(*tensors))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_sink_of_infinity_makes_the_rows_of_its_head_nan(lse_op, scheme, backend, device):
    tensors = lse_op.draw((2, 20, 24, 2, 16), F32, device)
    sinks = torch.tensor([math.inf, 0.5], device=device)
    o, _ = lse_op.public(*tensors, sinks=sinks, backend=backend)
    assert o[:, :, 0].isnan().all()
    assert o[:, :, 1].isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("keys", [0, 24])
def test_sink_of_minus_infinity_is_none_where_a_task_has_no_keys(
    lse_op, scheme, keys, backend, device
):
    tensors = [x.requires_grad_() for x in lse_op.draw((2, 20, keys, 2, 16), F32, device)]
    sinks = torch.tensor([-math.inf, 0.5], device=device).requires_grad_()
    lengths = torch.tensor([0, keys], device=device)
    o, lse = lse_op.public(*tensors, lengths, sinks=sinks, backend=backend)
    *grads, dsinks = torch.autograd.grad((o.sum(), lse.sum()), [*tensors, sinks])
    assert o[0].eq(0).all()
    assert lse[0, 0].eq(-math.inf).all()
    assert all(grad[0].eq(0).all() for grad in grads)
    assert dsinks[0] == 0
    assert dsinks[1] > 0


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sink_far_above_all_scores_leaves_nothing(lse_op, scheme, dtype, device):
    tensors = lse_op.draw((1, 20, 40, 1, 16), dtype, device)
    sinks = torch.tensor([300.0], device=device)
    o, lse = lse_op.kernels(*tensors, sinks=sinks)
    assert o.eq(0).all()
    assert lse.eq(300.0).all()


def test_great_scores_beside_a_sink(lse_op, scheme, device):
    """In fp32, where delta is corrected by the sum of ds, the sink's included."""
    q, k, v = lse_op.draw((1, 20, 24, 2, 16), F32, device)
    sinks = torch.tensor([60.0, 200.0], device=device)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, scale=0.25, sinks=sinks)

    yardstick = Yardstick(with_sinks(lse_op.reference), [30 * q, 30 * k, v, sinks])
    yardstick.check(with_sinks(lse_op.kernels))


def test_key_lengths(lse_op, any_scheme, device):
    lse_op.check(lse_op.draw((4, 20, 24, 1, 16), F32, device), [0, 16, 17, 24])


def test_lengths_outside_their_range_count_as_its_ends(lse_op, scheme, device):
    tensors = lse_op.draw((3, 20, 24, 1, 16), F32, device)
    actual, expected, narrow = (
        lse_op.first(lse_op.kernels(*tensors, torch.tensor(lengths, dtype=dtype, device=device)))
        for lengths, dtype in (
            ([-3, 1000, 9], torch.int64),
            ([0, 24, 9], torch.int64),
            ([0, 24, 9], torch.int32),
        )
    )
    assert torch.equal(actual, expected)
    assert torch.equal(narrow, expected)


def test_keys_past_the_length_may_hold_anything(lse_op, any_scheme, device):
    lengths = torch.tensor([5, 0, 23], device=device)
    clean = [x.requires_grad_() for x in lse_op.draw((3, 20, 24, 1, 16), F32, device)]
    past = torch.arange(24, device=device)[None, :, None, None] >= lengths[:, None, None, None]
    with_nan = [
        clean[0],
        *(x.detach().masked_fill(past, math.nan).requires_grad_() for x in clean[1:]),
    ]
    both = []
    for tensors in (clean, with_nan):
        o = lse_op.first(lse_op.kernels(*tensors, lengths))
        both.append((o, *torch.autograd.grad(o.square().sum(), tensors)))
    for value, expected in zip(*reversed(both), strict=True):
        assert torch.equal(value, expected)
    assert both[1][2].masked_select(past).eq(0).all()
    assert both[1][0][1].eq(0).all()


def test_log_sum_exp_without_keys_is_minus_infinity(lse_op, scheme, device):
    lengths = torch.tensor([0, 2], device=device)
    _, lse = lse_op.kernels(*lse_op.draw((2, 3, 4, 1, 16), F32, device), lengths)
    assert lse[0].eq(-math.inf).all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("scale", [1e-4, 3.0])
def test_scale(lse_op, scheme, scale, device):
    lse_op.check(lse_op.draw((1, 20, 24, 1, 16), F32, device), scale=scale)


def test_default_scale(lse_op, scheme, device):
    tensors = [x.requires_grad_() for x in lse_op.draw((1, 20, 24, 1, 16), F32, device)]
    actual, expected = (
        (o, *torch.autograd.grad(o.square().sum(), tensors))
        for o, _ in (lse_op.kernels(*tensors, scale=scale) for scale in (None, 0.25))
    )
    assert all(torch.equal(f, e) for f, e in zip(actual, expected, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("any_scheme", ["single-tile", "pointers", "descriptors"], indirect=True)
def test_strides(lse_op, any_scheme, layout, device):
    tensors = [layout(x) for x in lse_op.draw((2, 9, 20, 2, 16), F32, device)]
    lse_op.check(tensors, grads=[layout(torch.randn_like(tensors[0])), None])


@pytest.mark.parametrize("only", ["o", "lse"])
def test_gradient_of_one_output_alone(lse_op, scheme, only, device):
    def one(call):
        return lambda *t: call(*t)[("o", "lse").index(only)]

    tensors = lse_op.draw((2, 20, 24, 1, 16), F32, device)
    Yardstick(one(lse_op.reference), tensors).check(one(lse_op.kernels))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_great_scores(lse_op, scheme, dtype, device):
    """Scores of thousands: one key takes all."""
    q, k, v = lse_op.draw((1, 20, 24, 1, 16), dtype, device)
    lse_op.check([30 * q, 30 * k, v], scale=0.25)


def test_gradients_vanish_where_one_key_takes_all(lse_op, scheme, device):
    """do v^T and do o are then the same sum, and nearly zero: whatever rounds them apart is left in
    dq and dk, where eager torch, which has one of them only, leaves nothing.
    """
    q, k, v = lse_op.draw((1, 20, 24, 1, 64), F32, device)
    tensors = [30 * q, 30 * k, v]
    o = lse_op.reference(*(x.double() for x in tensors))[0]
    do = torch.randn_like(o)
    do = (do - (do * o).sum(-1, keepdim=True) / o.square().sum(-1, keepdim=True) * o).float()
    Yardstick(lse_op.reference, tensors, [do, None]).check(lse_op.kernels)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_do_not_see_how_the_output_was_rounded(lse_op, scheme, dtype, device):
    """The greater part of do times any value, and so times o, is nearly zero; of the o that was
    written, it would take the rounding.
    """
    q, k, v = lse_op.draw((1, 20, 40, 1, 64), dtype, device)
    v = v - v.mean(-1, keepdim=True)
    do = 16.0 + torch.randn_like(q)
    Yardstick(lse_op.reference, [q, k, v], [do, None]).check(lse_op.kernels)


def test_equal_scores_average_the_values(lse_op, scheme, device):
    q, k, v = lse_op.draw((1, 20, 24, 1, 16), F32, device)

    def mean(v):
        return v.mean(1, keepdim=True).expand(-1, 20, -1, -1)

    def attention(v):
        return lse_op.first(lse_op.kernels(q, torch.zeros_like(k), v))

    Yardstick(mean, [v]).check(attention)


def test_repeated_keys(lse_op, scheme, device):
    """Every key four times over: several probabilities are the row's greatest."""
    q, k, v = lse_op.draw((1, 20, 10, 1, 16), BF16, device)
    lse_op.check([q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)])


def test_nan_in_a_query_stays_in_its_row(lse_op, scheme, device):
    q, k, v = lse_op.draw((2, 20, 24, 2, 16), F32, device)
    clean = lse_op.first(lse_op.kernels(q, k, v))
    q[1, 3, 0, 5] = math.nan
    o = lse_op.first(lse_op.kernels(q, k, v))
    assert o[1, 3, 0].isnan().all()
    o[1, 3, 0] = clean[1, 3, 0]
    assert torch.equal(o, clean)


@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_nan_in_a_key_or_value_stays_in_its_head(lse_op, scheme, which, device):
    tensors = lse_op.draw((2, 9, 20, 2, 16), F32, device)
    clean = lse_op.first(lse_op.kernels(*tensors))
    tensors[which][1, 19, 0] = math.nan
    o = lse_op.first(lse_op.kernels(*tensors))
    assert o[1, :, 0].isnan().all()
    assert torch.equal(o[0], clean[0])
    assert torch.equal(o[1, :, 1], clean[1, :, 1])


def test_order_of_the_keys_does_not_matter(lse_op, scheme, device):
    q, k, v = lse_op.draw((1, 20, 24, 2, 16), F32, device)
    order = torch.randperm(24, device=device)

    def shuffled(call):
        return lambda q, k, v, lengths: call(q, k[:, order], v[:, order])

    Yardstick(lse_op.reference, [q, k, v, None]).check(shuffled(lse_op.kernels))


def test_removing_a_query_changes_no_bit_of_the_others(lse_op, scheme, device):
    q, k, v = lse_op.draw((2, 21, 24, 2, 16), F32, device)
    all_rows = lse_op.first(lse_op.kernels(q, k, v))
    assert torch.equal(lse_op.first(lse_op.kernels(q[:, :-1], k, v)), all_rows[:, :-1])


def test_parts_merge_to_the_whole(lse_op, scheme, device):
    """What the log-sum-exp is for."""
    tensors = lse_op.draw((1, 20, 50, 2, 16), F32, device)

    def merged(q, k, v):
        parts = [lse_op.kernels(q, k[:, s], v[:, s]) for s in (slice(0, 18), slice(18, 50))]
        outputs = torch.stack([o for o, _ in parts])
        lse = torch.stack([lse for _, lse in parts])
        weights = torch.softmax(lse, 0).transpose(2, 3).unsqueeze(-1)
        return (weights * outputs).sum(0), lse.logsumexp(0)

    Yardstick(lse_op.reference, tensors).check(merged)


@pytest.mark.parametrize("sinks", [None, (0.7, -1.2), (-math.inf, 0.3)], ids=str)
def test_reference_backward_is_that_of_autograd(lse_op, sinks):
    tensors = [x.double().requires_grad_() for x in lse_op.draw((3, 3, 4, 2, 8))]
    lengths = torch.tensor([4, 2, 0])
    if sinks is not None:
        sinks = torch.tensor(sinks).double().requires_grad_()
    o, lse = reference.rectangular_attention_with_lse(*tensors, lengths, sinks, scale=0.3)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    asked = tensors if sinks is None else [*tensors, sinks]
    expected = torch.autograd.grad((o, lse), asked, (do, dlse))
    backward = reference.rectangular_attention_backward
    actual = backward(do, dlse, *tensors, lengths, sinks, scale=0.3)
    torch.testing.assert_close(actual[: len(asked)], expected)
    assert sinks is not None or not actual[3].numel()


def test_without_heads_of_queries_keys_have_gradients_of_zero_twice(lse_op, device):
    q = torch.randn(2, 3, 0, 8, device=device).requires_grad_()
    k, v = (torch.randn(2, 4, 3, 8, device=device).requires_grad_() for _ in range(2))
    o, lse = lse_op.kernels(q, k, v)
    first = torch.autograd.grad((o.sum() + lse.sum()), [q, k, v], create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), [q, k, v])
    for grads in (first, second):
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
        assert not any(x.any() for x in grads)


def test_gradient_of_the_log_sum_exp_alone_under_checkpointing(lse_op, device):
    tensors = lse_op.leaves((1, 5, 140, 1, 8), F32, device)

    def lse(*tensors):
        return lse_op.kernels(*tensors)[1]

    recomputed = checkpoint(lse, *tensors, use_reentrant=False)
    actual = torch.autograd.grad(recomputed.sum(), tensors)
    assert same_bits(actual, torch.autograd.grad(lse(*tensors).sum(), tensors))


def test_agrees_with_torch(op, device):
    q, k, v = op.draw((2, 20, 40, 2, 32), F32, device)
    o = op.first(op.kernels(q, k, v, scale=None))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(o, expected)
