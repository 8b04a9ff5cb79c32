"""The passes of warp groups on Hopper, by a GPU; their plans and shares of work, by none."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.attention import rectangular_attention_with_lse
from fusewright.attention.common import tiles
from fusewright.attention.common.launch_hopper import tile_strides
from fusewright.attention.rectangular import (
    launch,
    launch_backward,
    launch_hopper,
    launch_hopper_backward,
)
from fusewright_testkit import Yardstick, capture
from fusewright_testkit.conformance import everything, same_bits

from .operations import SCALE

BF16, FP16 = torch.bfloat16, torch.float16
# Dtypes and widths that have kernels of their own.
KINDS = [(BF16, 64), (BF16, 128), (FP16, 64), (FP16, 128)]
of_each_kind = pytest.mark.parametrize(("dtype", "width"), KINDS, ids=str)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0")
# Tasks, queries, keys and heads whose scores in fp64 are gigabytes.
GREAT = pytest.param((3, 3000, 2000, 4), marks=pytest.mark.large)


@pytest.mark.parametrize(
    ("tiles", "steps", "programs", "rounds", "expected"),
    [
        (1848, 79, 132, None, (1848, 1)),
        (1856, 79, 132, None, (1848, 16)),
        # A tile is cut into no more parts than it has steps.
        (140, 5, 132, None, (132, 5)),
        # More than half of the programs have one more tile.
        (200, 79, 132, None, (132, 5)),
        (200, 79, 132, 1, (200, 1)),
        # Fewer tiles than programs.
        (48, 1563, 132, None, (0, 11)),
        (1, 1563, 132, None, (0, 131)),
        (5, 79, 5, None, (5, 1)),
    ],
)
def test_tiles_that_do_not_fill_the_gpu_are_cut(tiles, steps, programs, rounds, expected):
    assert launch_hopper.parts_of(tiles, steps, programs, rounds) == expected


def test_axis_of_one_element_has_the_stride_of_a_contiguous_tensor():
    x = torch.empty(1, 4, 1, 8).expand(1, 4, 1, 8).transpose(0, 2)
    assert tile_strides(x) == [32, 8, 8, 1]


@pytest.mark.parametrize("batches", [1, 2])
def test_one_row_of_each_task_is_described_whatever_its_stride(batches):
    x = torch.empty(batches * 128, dtype=torch.bfloat16)
    x = x.as_strided((batches, 1, 2, 64), (128, 132, 64, 1))
    described = tiles.descriptor(x, 16)
    assert (described.shape, described.strides) == ([batches, 128], [128, 1])


def counted_plans(
    monkeypatch, module, user, table="HOPPER_BACKWARD", planner="plan_hopper_backward"
) -> list:
    """The plans that ``user`` has a module make from now on, whatever the size of a call."""
    made, plan = [], getattr(module, planner)

    def counted(*args):
        made.append(plan(*args))
        return made[-1]

    lines = tuple(line._replace(fewest_scores=0) for line in getattr(module, table))
    monkeypatch.setattr(module, table, lines)
    monkeypatch.setattr(user, planner, counted)
    return made


@pytest.fixture
def plans(fresh_plans, monkeypatch) -> list[launch_hopper.HopperPlan]:
    """The plans of forward passes that tests make, whatever the size."""
    monkeypatch.setattr(launch_hopper, "FEWEST_RAGGED", 0)
    return counted_plans(monkeypatch, launch_hopper, launch, "HOPPER_FORWARD", "plan_hopper")


@pytest.fixture
def backward_plans(plans, monkeypatch) -> list[launch_hopper_backward.HopperBackwardPlan]:
    """Those of backward passes, too."""
    return counted_plans(monkeypatch, launch_hopper_backward, launch_backward)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [129, 457, 500, 1000, 1024])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 192, 193, 500])
def test_values_and_gradients_are_as_near_to_fp64_as_torch(lse_op, backward_plans, queries, keys):
    # Of few rows eager torch's largest error may be small by luck.
    heads = 3 if queries > 1 else 64
    lse_op.check(lse_op.draw((2, queries, keys, heads, 64), BF16, "cuda"))
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
@pytest.mark.parametrize("shape", [GREAT, (1, 1500, 1300, 17)], ids=str)
def test_many_tiles_and_parts_are_as_near_to_fp64_as_torch(
    lse_op, plans, backward_plans, shape, dtype, width
):
    lse_op.check(lse_op.draw((*shape, width), dtype, "cuda"))
    assert plans[0].combine is not None
    assert backward_plans[0].add_parts is not None


@pytest.mark.gpu
@on_hopper
@pytest.mark.large
def test_many_keys_of_few_queries_are_as_near_to_fp64_as_torch(lse_op, plans, backward_plans):
    """A head's keys are several ranges, whose sums of dq are added at the end."""
    lse_op.check(lse_op.draw((1, 1024, 200_000, 1, 64), BF16, "cuda"))
    assert plans[0].combine is not None
    assert backward_plans[0].sums().shape[0] > 1024


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("queries", [1, 63, 128, 129, 500])
@pytest.mark.parametrize("keys", [129, 457, 1024])
@pytest.mark.parametrize(("dtype", "width"), KINDS[1:], ids=str)
def test_fp16_and_heads_of_128_columns_are_as_near_to_fp64_as_torch(
    lse_op, plans, backward_plans, queries, keys, dtype, width
):
    heads = 3 if queries > 1 else 64
    lse_op.check(lse_op.draw((2, queries, keys, heads, width), dtype, "cuda"))
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
@pytest.mark.parametrize("shape", [(2, 1100, 1500, 3), GREAT], ids=str)
@pytest.mark.parametrize("factor", [5.0, 20.0, 60.0])
def test_keys_that_grow_late_in_the_row_are_computed_again(
    lse_op, plans, backward_plans, factor, shape, dtype, width
):
    """Keys are visited from the last one on."""
    q, k, v = lse_op.draw((*shape, width), dtype, "cuda")
    k[:, : shape[2] // 2] *= factor
    lse_op.check([q, k, v])
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
@pytest.mark.parametrize("growth", [15.0, 15.999, 16.0, 16.5, 40.0])
def test_a_score_this_many_powers_of_2_above_those_before_it(
    lse_op, plans, backward_plans, growth, dtype, width
):
    """A probability of 2^16, beside a reference of 1, is infinite in fp16."""
    q, k, v = lse_op.draw((2, 300, 700, 3, width), dtype, "cuda")
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, 5] = 0.0
    k[:, 5, :, 0] = growth * math.log(2.0) / (SCALE * 4.0)
    q[..., 1:] *= 0.1
    lse_op.check([q, k, v])
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("dtype", "width", "size"),
    [(BF16, 64, 1e-30), (BF16, 64, 1e30), (BF16, 128, 1e30), (FP16, 64, 1e-3), (FP16, 128, 100.0)],
    ids=str,
)
def test_tiny_and_huge_values(lse_op, backward_plans, dtype, width, size):
    q, k, v = lse_op.draw((1, 300, 700, 2, width), dtype, "cuda")
    k[:, :300] *= 4.0
    lse_op.check([q, k, v * size])
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_strange_number_stays_in_its_head_and_row(plans, value):
    """The rows of its tile are computed again, which changes their bits."""

    def call(q, k, v):
        return rectangular_attention_with_lse(q, k, v, scale=0.125, backend="triton")

    clean = [torch.randn(2, n, 3, 64, device="cuda", dtype=BF16) for n in (300, 700, 700)]
    expected = call(*clean)
    for place in range(3):
        tensors = [x.clone() for x in clean]
        tensors[place][1, 33, 2, 5] = value
        o, lse = call(*tensors)
        # A score of -inf, which an infinite key may have, counts for nothing.
        assert value == float("inf") or not o[1, 33, 2].isfinite().all()
        again = torch.zeros_like(o, dtype=torch.bool)
        again[1, slice(64) if place == 0 else slice(None), 2] = True
        assert torch.equal(o[~again], expected[0][~again])
        rows = again[..., 0].mT
        assert torch.equal(lse[~rows], expected[1][~rows])
        if place == 0:
            again[1, 33] = False
            assert (o - expected[0])[again].abs().max() <= 2 * torch.finfo(BF16).eps
    assert plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
def test_strided_operands_are_read_by_their_strides(op, backward_plans, dtype, width):
    joint = torch.randn(2, 700, 3, 4, width, device="cuda", dtype=dtype)
    strided = [joint[:, :, i] for i in range(3)]
    whole = [x.contiguous() for x in strided]
    assert same_bits(
        *(
            everything(op.kernels, [x.detach().requires_grad_() for x in xs])
            for xs in (strided, whole)
        )
    )
    shared = [x[:1].expand(2, -1, -1, -1) for x in whole]
    assert torch.equal(op.first(op.kernels(*shared))[0], op.first(op.kernels(*shared))[1])
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("queries", [1, 64, 130, 1100])
def test_heads_that_share_keys(lse_op, plans, backward_plans, queries, heads, ragged):
    """A block of queries may be of two heads."""
    # Of few rows eager torch's largest error may be small by luck.
    tasks = 2 if queries > 1 else 16
    q, _, _ = lse_op.draw((tasks, queries, 1500, heads[0], 64), BF16, "cuda")
    _, k, v = lse_op.draw((tasks, queries, 1500, heads[1], 64), BF16, "cuda")
    lse_op.check([q, k, v], [700, 1500] * (tasks // 2) if ragged else None)
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("dtype", "width"), KINDS[1:], ids=str)
def test_heads_that_share_keys_of_128_columns_or_fp16(lse_op, plans, backward_plans, dtype, width):
    q, _, _ = lse_op.draw((2, 130, 1500, 6, width), dtype, "cuda")
    _, k, v = lse_op.draw((2, 130, 1500, 3, width), dtype, "cuda")
    lse_op.check([q, k, v], [700, 1500])
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("factor", [1.0, 20.0], ids=["as they are", "computed again"])
@pytest.mark.parametrize("width", [64, 128])
def test_shared_heads_give_the_bits_of_expanded_ones(lse_op, plans, factor, width):
    q, _, _ = lse_op.draw((3, 1100, 1500, 6, width), BF16, "cuda")
    _, k, v = lse_op.draw((3, 1100, 1500, 2, width), BF16, "cuda")
    k[:, :700] *= factor
    expanded = (x.repeat_interleave(3, 2) for x in (k, v))
    assert same_bits(lse_op.kernels(q, k, v), lse_op.kernels(q, *expanded))
    assert len(plans) == 2


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("lengths", [None, [1500, 0, 700]], ids=["whole", "ragged"])
@of_each_kind
@pytest.mark.parametrize("shape", [(3, 130, 1500, 12), (3, 1100, 1500, 3)], ids=str)
def test_sinks(lse_op, plans, backward_plans, shape, lengths, dtype, width):
    """From hardly any weight to nearly all of it, and so far above all scores that rows are
    computed again.
    """
    tensors = lse_op.draw((*shape, width), dtype, "cuda")
    of_heads = torch.linspace(-6.0, 6.0, shape[3], device="cuda")
    of_heads[-1] = 80.0
    key_lengths = None if lengths is None else torch.tensor(lengths, device="cuda")

    def with_sinks(call):
        return lambda q, k, v: call(q, k, v, key_lengths, sinks=of_heads)

    Yardstick(with_sinks(lse_op.reference), tensors).check(with_sinks(lse_op.kernels))
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
def test_gradient_of_sinks_errs_no_more_than_that_of_rounded_probabilities(lse_op, backward_plans):
    """delta = rowsum(do * o) - dlse has the rounding of the probabilities of o."""
    q, k, v = lse_op.draw((2, 500, 700, 64, 64), BF16, "cuda")
    sinks = torch.randn(64, device="cuda", requires_grad=True)
    do, dlse = torch.randn_like(q), torch.randn(2, 64, 500, device="cuda")
    outputs = lse_op.kernels(q, k, v, sinks=sinks)
    (actual,) = torch.autograd.grad(outputs, sinks, (do, dlse))

    def formula(dtype, rounded):
        scores = SCALE * torch.einsum("bnhd,bmhd->bhnm", q.to(dtype), k.to(dtype))
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(2, 64, 500, 1)], -1)
        p = scores.softmax(-1)
        o = torch.einsum("bhnm,bmhd->bhnd", rounded(p[..., :-1]), v.to(dtype))
        delta = (do.to(dtype).transpose(1, 2) * o).sum(-1) - dlse
        return -(p[..., -1] * delta).sum((0, 2)).detach()

    truth = formula(torch.float64, lambda p: p)
    allowed = formula(torch.float32, lambda p: p.to(BF16).float()) - truth
    error = actual - truth
    assert error.square().mean() <= 4 * allowed.square().mean()
    assert error.abs().max() <= 2 * allowed.abs().max()
    assert backward_plans


# Of each task; with tiles of 128 keys.
LENGTHS = [1500, 0, 1, 127, 128, 129, 700, 1499, -3, 2000]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("queries", [1, 130, 1100])
def test_tasks_have_numbers_of_keys_of_their_own(lse_op, plans, backward_plans, queries, heads):
    # Of few rows eager torch's largest error may be small by luck.
    heads *= 1 if queries > 1 else 4
    tensors = lse_op.draw((len(LENGTHS), queries, 1500, heads, 64), BF16, "cuda")
    lse_op.check(tensors, LENGTHS)
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("dtype", "width"), KINDS[1:], ids=str)
def test_lengths_with_fp16_or_heads_of_128_columns_and_parts(
    lse_op, plans, backward_plans, dtype, width
):
    lse_op.check(lse_op.draw((10, 1100, 1500, 3, width), dtype, "cuda"), LENGTHS)
    # So few tiles that each is cut into many parts, of which most have no keys.
    lse_op.check(lse_op.draw((3, 100, 9000, 1, width), dtype, "cuda"), [300, 9000, 0])
    assert plans[1].combine is not None
    assert len(backward_plans) == 2


@pytest.mark.gpu
@on_hopper
@of_each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 6e4])
def test_what_lies_behind_the_keys_of_a_task_is_not_seen(
    op, plans, backward_plans, value, dtype, width
):
    q, k, v = op.draw((len(LENGTHS), 300, 1500, 2, width), dtype, "cuda")
    lengths = torch.tensor(LENGTHS, device="cuda")
    behind = torch.arange(1500, device="cuda") >= lengths[:, None]
    upstream = torch.randn_like(q)
    results = []
    for filling in (0.0, value):
        leaves = [q, *(x.masked_fill(behind[..., None, None], filling) for x in (k, v))]
        leaves = [x.detach().requires_grad_() for x in leaves]
        o = op.first(op.kernels(*leaves, lengths))
        results.append([o, *torch.autograd.grad(o, leaves, upstream)])
    for clean, actual in zip(*results, strict=True):
        # Tiles of queries that saw NaN were computed again.
        assert (clean - actual).abs().max() <= 2 * torch.finfo(dtype).eps * clean.abs().max()
    for dk_or_dv in results[1][2:]:
        assert not dk_or_dv[behind].any()
    assert plans
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
def test_graph_and_repeated_calls_give_the_same_bits(op, backward_plans, ragged, dtype, width):
    """A replay reads its own numbers of keys."""
    shape = 3, 1300, 1500, 3, width
    tensors = [x.requires_grad_() for x in op.draw(shape, dtype, "cuda")]
    if ragged:
        tensors.append(torch.tensor([1500, 800, 0], device="cuda", dtype=torch.int32))
    graph, captured = capture(lambda: everything(op.kernels, tensors))
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor.normal_()
        for tensor in tensors[3:]:
            tensor.copy_(torch.tensor([3, 1500, 1000]))
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, everything(op.kernels, tensors))
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@of_each_kind
def test_keys_past_the_last_have_no_part_in_gradients(lse_op, backward_plans, dtype, width):
    """Their scores are 0, infinitely more likely than real ones far below it."""
    q, k, v = lse_op.draw((2, 300, 130, 3, width), dtype, "cuda")
    lse_op.check([q.abs(), -8 * k.abs(), v])
    assert backward_plans


@pytest.mark.gpu
@on_hopper
def test_strange_upstream_gradient_stays_in_its_head_and_row(op, backward_plans):
    tensors = [x.requires_grad_() for x in op.draw((2, 300, 700, 3, 64), BF16, "cuda")]
    o = op.first(op.kernels(*tensors))
    upstream = torch.randn_like(o)
    expected = torch.autograd.grad(o, tensors, upstream, retain_graph=True)
    upstream[1, 33, 2, 5] = float("nan")
    actual = torch.autograd.grad(o, tensors, upstream)
    # Of dq a row, of dk all keys, of dv their column.
    reached = (33, 2, slice(None)), (slice(None), 2, slice(None)), (slice(None), 2, 5)
    for grad, clean, place in zip(actual, expected, reached, strict=True):
        spread = torch.zeros_like(grad, dtype=torch.bool)
        spread[(1, *place)] = True
        assert grad[spread].isnan().all()
        assert torch.equal(grad[~spread], clean[~spread])
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_have_the_same_bits_beside_other_work(op, backward_plans, width):
    """Programs wait for one another's turn, in an order that time does not change."""
    tensors = [x.requires_grad_() for x in op.draw((2, 2000, 3000, 8, width), BF16, "cuda")]
    o = op.first(op.kernels(*tensors))
    upstream = torch.randn_like(o)

    def gradients():
        return torch.autograd.grad(o, tensors, upstream, retain_graph=True)

    expected = gradients()
    beside, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    for _ in range(8):
        with torch.cuda.stream(beside):
            matrix @ matrix
        assert same_bits(expected, gradients())
    assert backward_plans
