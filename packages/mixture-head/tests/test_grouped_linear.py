"""grouped_linear: groups of any sizes, layouts, input that does not fit, with all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.mixture_head import grouped_linear
from fusewright.mixture_head.grouped import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.conformance.input import NothingRuns

from .operations import group_weights

F32, BF16, F16, I32, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64
# Rows, and where groups end: one group, empty ones, one row, rows of none, ends that go back or
# beyond all rows, several tiles.
GROUPS = pytest.mark.parametrize(
    ("rows", "ends"),
    [
        *((5, [5]), (7, [0, 3, 3, 7]), (9, [1, 4, 5]), (6, [4, 2, 5]), (6, [2, 60]), (6, [-3, 4])),
        *((6, [0, 0]), (200, [129, 130, 190])),
    ],
    ids=str,
)


@GROUPS
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(rows, ends, dtype, device):
    x, weight = group_weights((rows, 6), dtype, device, stored=9, groups=len(ends))
    ends = torch.tensor(ends, device=device)
    Yardstick(lambda *t: reference.grouped_linear(*t, ends), [x, weight]).check(
        lambda *t: grouped_linear(*t, ends, backend="triton")
    )


@GROUPS
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_each_group_is_a_linear_layer(rows, ends, backend, device):
    x, weight = group_weights((rows, 40), F32, device, stored=24, groups=len(ends))
    found = grouped_linear(x, weight, torch.tensor(ends, device=device), backend=backend)
    begin = 0
    for end, matrix in zip(ends, weight, strict=True):
        end = min(max(end, begin), rows)
        torch.testing.assert_close(found[begin:end], F.linear(x[begin:end], matrix))
        begin = end
    assert not found[begin:].any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_one_row_without_further_axes_has_both_derivatives(backend, device):
    ends = torch.tensor([0, 1], device=device)

    def found(x, weight):
        y = grouped_linear(x, weight, ends, backend=backend)
        first = torch.autograd.grad(y.square().sum(), [x, weight], create_graph=True)
        return y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, weight])

    x, weight = (t.requires_grad_() for t in group_weights((1, 6), F32, device, groups=2))
    y, dx, dweight, ddx, ddweight = found(x, weight)
    row = found(x[0].detach().requires_grad_(), weight)
    assert same_bits(row, (y[0], dx[0], dweight, ddx[0], ddweight))


def test_more_rows_or_longer_weights_than_can_be_counted_are_refused():
    from fusewright.mixture_head.grouped import launch

    most, options = 2**31 - 2**13, (BF16, I64, torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"up to 2147475456 rows.*got 2147475457 and"):
        launch.plan_product(most + 1, 8, 8, 2, True, *options)
    # Each group may have a tile of 128 rows that is not whole, and so may the rows behind them.
    assert launch.plan_product(most, 8, 8, 63, True, *options).grid[0] == 2**24
    with pytest.raises(ValueError, match=r"up to 2147475328 rows.*got 2147475456 and"):
        launch.plan_product(most, 8, 8, 64, True, *options)
    with pytest.raises(ValueError, match=r"2147483647 numbers in the weight.*and 2147483648"):
        launch.plan_product(5, 2**16, 2**15, 2, True, *options)
    with pytest.raises(ValueError, match="up to 2147475456 rows"):
        launch.plan_weight(most + 1, 2, 8, 8, *options)


@pytest.mark.parametrize("dtype", [I32, I64])
def test_ends_are_of_either_integer_type_and_of_any_strides(dtype, device):
    x, weight = group_weights((9, 6), F32, device)
    ends = torch.tensor([2, 0, 5, 0, 9], device=device)
    found = grouped_linear(x, weight, ends.to(dtype)[::2], backend="triton")
    assert torch.equal(found, grouped_linear(x, weight, ends[::2].clone(), backend="triton"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_and_weights_that_are_not_finite_stay_in_their_group(backend, device):
    x, weight = (t.requires_grad_() for t in group_weights((9, 6), F32, device))
    ends = torch.tensor([2, 5, 8], device=device)

    def call(*leaves):
        return grouped_linear(*leaves, ends, backend=backend)

    clean = everything(call, [x, weight])
    with torch.no_grad():
        x[3], weight[1, 0] = float("nan"), float("inf")
        x[8] = float("nan")
    y, dx, dweight = everything(call, [x, weight])
    assert y[3].isnan().all()
    assert dweight[1].isnan().any()
    rows, groups = [0, 1, 5, 6, 7, 8], [0, 2]
    found = y[rows], dx[rows], dweight[groups]
    assert same_bits(found, (clean[0][rows], clean[1][rows], clean[2][groups]))


def test_layouts_change_no_bit(device):
    x, weight = group_weights((8, 6), F32, device)
    ends = torch.tensor([2, 5, 8], device=device)
    expected = grouped_linear(x, weight, ends, backend="triton")
    found = grouped_linear(x.mT.contiguous().mT, weight.mT.contiguous().mT, ends, backend="triton")
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    joint = grouped_linear(x.view(2, 4, 6), weight, ends, backend="triton")
    assert torch.equal(joint, expected.view(2, 4, 12))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(ends=[1, 2, 3]), TypeError, "ends must be a tensor, got list"),
        (dict(ends=torch.ones(3)), TypeError, "ends must be int32 or int64, got torch.float32"),
        (dict(ends=torch.ones(2, dtype=I64)), ValueError, r"ends must have shape \(3,\)"),
        (dict(weight=torch.ones(3, 12, 4)), ValueError, r"weight must have shape \(G, S, 6\)"),
        (dict(weight=torch.ones(3, 12, 6, dtype=F16)), ValueError, "weight must have x's dtype"),
        (dict(x=torch.tensor(1.0)), ValueError, "x must have at least one axis"),
        (dict(x=torch.ones(3, 6, dtype=I64)), TypeError, "x must be float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    x, weight = group_weights((8, 6))
    operands = dict(x=x, weight=weight, ends=torch.tensor([2, 5, 8])) | change
    with NothingRuns(), pytest.raises(error, match=message):
        grouped_linear(**operands)
