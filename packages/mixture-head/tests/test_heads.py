"""grouped_heads: sizes, layouts, padding, with all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.mixture_head import grouped_heads
from fusewright_testkit import Yardstick

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


SIZES = pytest.mark.parametrize(
    ("rows", "stored", "count"), [(1, 1, 1), (3, 2, 3), (17, 33, 2), (40, 129, 2), (300, 40, 3)]
)


@SIZES
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(
    rows, stored, count, heads, device, draw_heads
):
    heads.check(draw_heads((rows, 6), F32, device, stored, count))


@SIZES
def test_second_layer_in_bf16_is_as_near_to_fp64_as_torch(rows, stored, count, heads, device):
    u = torch.randn(rows, count * stored, device=device).to(BF16)
    # A product with no rounding: the hidden layer is u.
    x = torch.eye(rows, device=device, dtype=BF16)
    heads.check([x, u.mT.contiguous(), torch.randn(count, stored, 3, device=device)])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_is_as_near_to_fp64_as_torch(dtype, heads, device, draw_heads):
    heads.check(draw_heads((100, 6), dtype, device, stored=40, heads=3))


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (2, 1, 3, 4)])
def test_every_leading_axis_counts_rows(shape, device, draw_heads, heads):
    tensors = draw_heads(shape, F32, device)
    heads.check(tensors)
    assert heads.kernels(*tensors).shape == (*shape[:-1], 2, 3)


def test_weights_may_be_strided(device, draw_heads, heads):
    x, hidden, output = draw_heads((7, 4), F32, device)
    output = torch.randn(3, 12, 2, device=device).permute(2, 1, 0)
    heads.check([x.T.contiguous().T, hidden.T.contiguous().T, output])


def test_gradient_of_a_sum_is_read_with_strides_of_zero(device, draw_heads, heads):
    tensors = draw_heads((7, 4), F32, device)
    yardstick = Yardstick(lambda *t: heads.reference(*t).sum(), tensors)
    yardstick.check(lambda *t: heads.kernels(*t).sum())


def test_heads_are_networks_of_their_own(device, draw_heads):
    x, hidden, output = draw_heads((9, 4), F64, "cpu")
    found = grouped_heads(x, hidden, output.double())
    for head in range(2):
        alone = F.silu(x @ hidden[12 * head : 12 * (head + 1)].T) @ output[head].double()
        assert (found[:, head] - alone).abs().max() <= 64 * torch.finfo(F64).eps


def test_padding_changes_nothing_and_gets_exactly_zero(backend, device, draw_heads, heads):
    x, hidden, output = draw_heads((20, 6), F32, device, stored=10, heads=3)
    padded_hidden = F.pad(hidden.view(3, 10, 6), (0, 0, 0, 6)).flatten(0, 1).requires_grad_()
    padded_output = F.pad(output, (0, 0, 0, 6)).requires_grad_()
    out = grouped_heads(x, padded_hidden, padded_output, backend=backend)
    dhidden, doutput = torch.autograd.grad(out.square().sum(), (padded_hidden, padded_output))
    assert not dhidden.view(3, 16, 6)[:, 10:].any()
    assert not doutput[:, 10:].any()
    Yardstick(heads.reference, [x, hidden, output], [None]).check(
        lambda *_: grouped_heads(x, padded_hidden, padded_output, backend=backend)
    )


def test_nan_in_a_row_stays_in_that_row(backend, device, draw_heads):
    x, hidden, output = draw_heads((5, 4), F32, device)
    x[2, 1] = float("nan")
    out = grouped_heads(x, hidden, output, backend=backend)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_no_number_of_heads_passes_the_limits_of_a_grid():
    from fusewright.mixture_head.heads.launch import backward_plan, forward_plan

    shape, device = (3, 70_000, 5), torch.device("cpu")
    for plan in (
        forward_plan(shape, F32, device),
        backward_plan(shape, F32, F32, F32, device),
    ):
        assert plan.launch.grid[0] >= 70_000
        assert max(plan.launch.grid[1:]) < 2**16


@pytest.mark.parametrize("value", [1e4, -1e4, 1e30, -1e30])
def test_extreme_hidden_units_are_as_near_to_fp64_as_torch(value, device, heads):
    x = torch.ones(3, 1, device=device)
    hidden = torch.tensor([[value], [1.0], [-1.0], [value]], device=device)
    heads.check([x, hidden, torch.randn(2, 2, 3, device=device)])
