"""What memory_update computes: near to fp64, on rows of any layout, number and size."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_update
from fusewright.memory_mlp.common.reference import over
from fusewright.memory_mlp.update.memory_update import reference_gradients
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan


def parts(update):
    """W', S' and the numbers of a MemoryUpdate, flat."""
    return [*update.weights, *update.momentum, *update[2:]]


CASES = {
    "37x20-hidden24-float32-silu-sum": ((), 37, 20, 24, F32, {}),
    "3x7x5-hidden6-float32-gelu-mean_all-clip-weights": (
        *((3,), 7, 5, 6, F32),
        dict(row_weights=True, activation="gelu", reduction="mean_all", max_grad_norm=0.01),
    ),
    "33x24-hidden40-float32-relu-mean_feature-clip": (
        *((), 33, 24, 40, F32),
        dict(activation="relu", reduction="mean_feature", max_grad_norm=1.0),
    ),
    "37x20-hidden24-bfloat16-silu-sum-clip-weights": (
        *((), 37, 20, 24, BF16),
        dict(row_weights=True, max_grad_norm=1.0),
    ),
    "37x20-hidden24-float16-gelu-mean_all": (
        *((), 37, 20, 24, F16),
        dict(activation="gelu", reduction="mean_all"),
    ),
    "1x1-hidden3-float32-silu-sum-weights": ((), 1, 1, 3, F32, dict(row_weights=True)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(update_op, name, device):
    *sizes, dtype, options = CASES[name]
    op = update_op.having(**options)
    op.check(op.draw(*sizes, dtype, device))


def test_many_tiles_and_splits_add_up(update_op, many_update_programs, device):
    op = update_op.having(row_weights=True, max_grad_norm=1.0)
    op.check(op.draw((), 37, 20, 24, BF16, device))


def test_many_turned_tiles_and_splits_add_up(update_op, many_update_programs, in_tf32, device):
    op = update_op.having(row_weights=True, max_grad_norm=1.0)
    op.check(op.draw((2,), 37, 20, 24, F32, device))


def test_tf32_is_as_near_to_fp64_as_torch_in_tf32(update_op, in_tf32, device):
    update_op.check(update_op.draw((), 37, 20, 24, F32, device))


def test_tf32_reads_rows_of_any_strides(update_op, in_tf32, device):
    k, v, *others = update_op.draw((2, 3), 5, 4, 6, F32, device)
    expected = parts(update_op.whole(k, v, *others, backend="triton"))
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert same_bits(parts(update_op.whole(k, v, *others, backend="triton")), expected)


def test_rows_of_all_leading_axes_are_pooled_where_the_memory_has_none(update_op, device):
    op = update_op.having(row_weights=True)
    k, v, *others, row_weights = op.draw((), 12, 4, 6, F32, device)
    pooled = k.view(2, 3, 2, 4), v.view(2, 3, 2, 4), *others, row_weights.view(2, 3, 2)
    found = op.whole(*pooled, backend="triton", reduction="mean_all")
    expected = op.whole(k, v, *others, row_weights, backend="triton", reduction="mean_all")
    assert same_bits(parts(found), parts(expected))


@pytest.mark.parametrize("lead", [(), (0,)], ids=["no-rows", "no-memories"])
def test_without_rows_the_memory_forgets_and_its_momentum_decays(update_op, lead, backend, device):
    tensors = update_op.draw(lead, 0, 4, 6, F32, device)
    leaves = [x.requires_grad_() for x in tensors]
    update = update_op.whole(*leaves, backend=backend, reduction="mean_all")
    alpha, eta = tensors[10:12]
    for w, s, w_new, s_new in zip(
        tensors[2:6], tensors[6:10], update.weights, update.momentum, strict=True
    ):
        torch.testing.assert_close(s_new, over(eta, s) * s)
        torch.testing.assert_close(w_new, over(1 - alpha, w) * w + s_new)
    assert torch.equal(update.loss, torch.zeros_like(update.loss))
    assert not update.skipped.any()
    grads = torch.autograd.grad(update.weights.w1.sum(), leaves, allow_unused=True)
    torch.testing.assert_close(grads[2], over(1 - alpha, tensors[2]).expand_as(grads[2]))
    assert grads[0].shape == tensors[0].shape


@pytest.mark.parametrize("strange", [NAN, INF])
def test_memory_with_a_strange_row_is_skipped_and_others_keep_their_bits(
    update_op, strange, backend, device
):
    tensors = update_op.draw((3,), 5, 4, 6, F32, device)
    expected = parts(update_op.whole(*tensors, backend=backend))
    poisoned = [tensors[0].clone(), *tensors[1:]]
    poisoned[0][1, 2, 3] = strange
    update = update_op.whole(*poisoned, backend=backend)
    assert update.skipped.tolist() == [False, True, False]
    assert not update.grad_norm[1].isfinite()
    for x, old in zip((*update.weights, *update.momentum), tensors[2:10], strict=True):
        assert torch.equal(x[1], old[1])
    for found, truth in zip(parts(update), expected, strict=True):
        assert torch.equal(found[[0, 2]], truth[[0, 2]])


STRANGE_INPUTS = {
    "key": [0],
    "value": [1],
    "weight": [4],
    "row-weight": [13],
    "everything": list(range(14)),
}


def assert_handed_on(grads, upstream):
    """The second of two memories was skipped: its state gets what came, all else zeros; the first
    was not.
    """
    for found, came in zip(grads[2:10], upstream[:8], strict=True):
        assert torch.equal(found[1], came[1])
    for found in (*grads[:2], *grads[10:]):
        assert not found[1].any()
    assert all(g[0].isfinite().all() and g[0].any() for g in grads)


def poisoned_inputs(op, name, device):
    tensors = op.draw((2,), 5, 4, 6, F32, device)
    for index in STRANGE_INPUTS[name]:
        tensors[index][1].view(-1)[:1] = NAN
    return tensors


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", STRANGE_INPUTS)
def test_skipped_memory_hands_on_its_gradients_and_nothing_else(
    update_op, name, clip, backend, device
):
    op = update_op.having(row_weights=True, max_grad_norm=clip)
    leaves = [x.requires_grad_() for x in poisoned_inputs(op, name, device)]
    outputs = op.public(*leaves, backend=backend)
    upstream = [torch.randn_like(y) for y in outputs]
    assert_handed_on(torch.autograd.grad(outputs, leaves, upstream), upstream)


@pytest.mark.parametrize("name", STRANGE_INPUTS)
def test_reference_backward_of_a_skipped_memory_hands_on_its_gradients(update_op, name, device):
    """What the kernels' second derivative goes through, once more differentiated too."""
    op = update_op.having(row_weights=True)
    tensors = poisoned_inputs(op, name, device)
    leaves = [x.requires_grad_() for x in tensors]
    upstream = [torch.randn_like(x) for x in leaves[2:10]]
    dloss = torch.full((2,), NAN if name == "everything" else 1.0, device=device)
    dloss[0] = 1.0
    options = "silu", "sum", 0.5, True, True
    found = reference_gradients((*upstream, dloss), leaves, options)
    assert_handed_on(found, upstream)
    for second in torch.autograd.grad(sum(g.sum() for g in found), leaves):
        assert second[0].isfinite().all()
        assert not second[1].any()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_gradient_of_zero_differentiates_without_a_strange_number(
    update_op, max_grad_norm, backend, device
):
    """Rows of no weight: the root in the norm has no derivative there."""
    op = update_op.having(row_weights=True, max_grad_norm=max_grad_norm)
    *tensors, row_weights = op.draw((2,), 5, 4, 6, F32, device)
    leaves = [x.requires_grad_() for x in (*tensors, torch.zeros_like(row_weights))]
    outputs = op.public(*leaves, backend=backend)
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("size", [1e20, 1e-30])
def test_great_and_tiny_rows_do_what_fp32_does(update_op, size, backend, device):
    """The squares of such gradients leave the range: the norm is then infinite, or zero."""
    op = update_op.having(max_grad_norm=1.0)
    k, v, *others = op.draw((), 5, 4, 6, F32, device)
    update = op.whole(k, size * v, *[x * 0 for x in others[:4]], *others[4:], backend=backend)
    assert update.skipped.item() == (size > 1)
    assert all(x.isfinite().all() for x in (*update.weights, *update.momentum))
    if size < 1:
        expected = others[9] * others[4]
        torch.testing.assert_close(update.momentum.w1, expected)


def test_clipped_step_is_as_long_as_the_limit_says(update_op, backend, device):
    tensors = update_op.draw((4,), 9, 4, 6, F32, device)
    limit = 0.5
    update = update_op.whole(*tensors, backend=backend, max_grad_norm=limit)
    assert bool((update.grad_norm > limit).all())
    eta, theta = tensors[11], tensors[12]
    moved = [
        s_new - over(eta, s) * s for s_new, s in zip(update.momentum, tensors[6:10], strict=True)
    ]
    length = sum(x.double().flatten(1).square().sum(-1) for x in moved).sqrt()
    # The norm that divides is a sum of fewer than 2^7 squares; a difference of fp32 numbers gives
    # each step back, with the roundings of those.
    eps = torch.finfo(F32).eps
    sizes = zip(update.momentum, tensors[6:10], strict=True)
    lost = sum(x.double().flatten(1).square().sum(-1) for pair in sizes for x in pair).sqrt()
    assert ((length - limit * theta).abs() <= eps * (2**7 * limit * theta + 2 * lost)).all()


def test_numbers_serve_as_gates(update_op, backend, device):
    *tensors, alpha, eta, theta = update_op.draw((2,), 5, 4, 6, F32, device)
    numbers = 0.125, 0.5, 0.25
    found = update_op.whole(*tensors, *numbers, backend=backend)
    gates = [torch.full_like(x, n) for x, n in zip((alpha, eta, theta), numbers, strict=True)]
    assert same_bits(parts(found), parts(update_op.whole(*tensors, *gates, backend=backend)))


def test_step_of_alpha_one_and_eta_zero_leaves_the_gradient_alone(update_op, backend, device):
    *tensors, _, _, _ = update_op.draw((), 5, 4, 6, F32, device)
    update = update_op.whole(*tensors, 1.0, 0.0, 1.0, backend=backend)
    assert same_bits(update.weights, update.momentum)

    def slopes(k, v, *state):
        weights = [x.detach().requires_grad_() for x in state[:4]]
        halves = MemoryWeights(*weights), MemoryWeights(*state[4:])
        loss = memory_update(k, v, *halves, 1.0, 0.0, 1.0, backend="reference").loss
        return tuple(-slope for slope in torch.autograd.grad(loss, weights))

    Yardstick(slopes, tensors, [None] * 4).check(lambda *tensors: update.weights)


def test_gates_out_of_range_are_as_near_to_fp64_as_torch(update_op, backend, device):
    """The formula holds for any number: nothing is clamped, forward or backward."""

    def formula(*tensors):
        *others, alpha, eta, theta = tensors
        zero = torch.zeros_like(alpha)
        *_, s1, c1, s2, c2, loss = op.reference(*others, zero, zero, torch.ones_like(alpha))
        weights, momentum = others[2:6], others[6:10]
        moved = [
            over(eta, s) * s + over(theta, step) * step
            for s, step in zip(momentum, (s1, c1, s2, c2), strict=True)
        ]
        kept = [over(1 - alpha, w) * w for w in weights]
        return *(w + s for w, s in zip(kept, moved, strict=True)), *moved, loss

    op = update_op.having(max_grad_norm=1.0)
    *tensors, _, _, _ = op.draw((3,), 5, 4, 6, F32, device)
    outside = [-0.5, 1.5, 3.0], [-1.5, 1.25, -0.5], [-0.25, 2.0, -1.0]
    gates = [torch.tensor(numbers, device=device) for numbers in outside]
    yardstick = Yardstick(formula, [*tensors, *gates])
    yardstick.check(lambda *tensors: op.public(*tensors, backend=backend))


def test_gates_that_are_nan_stay_in_their_memory(update_op, backend, device):
    """Its step is not skipped: the gradient is finite."""
    tensors = update_op.draw((2, 2), 5, 4, 6, F32, device)
    poisoned = [x.clone() for x in tensors]
    for gate in poisoned[10:]:
        gate[1, 0] = NAN
    both = []
    for inputs in (poisoned, tensors):
        leaves = [x.requires_grad_() for x in inputs]
        update = update_op.whole(*leaves, backend=backend)
        assert not update.skipped.any()
        outputs = [*update.weights, *update.momentum, update.loss]
        both.append([*outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), leaves)])
    for found, truth in zip(*both, strict=True):
        assert torch.equal(found.flatten(0, 1)[[0, 1, 3]], truth.flatten(0, 1)[[0, 1, 3]])
    assert all(x[1, 0].isnan().all() for x in both[0][:8])
