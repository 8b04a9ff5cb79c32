"""Second layers in the epilogue of the first ones' product, which runs on GPUs of compute
capability 9.0 alone: it serves here whatever size is asked, also where a pass of its own is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from fusewright.mixture_head import grouped_heads
from fusewright.mixture_head._core.product_hopper import PRODUCT
from fusewright.mixture_head.heads import launch, launch_hopper
from fusewright_testkit.conformance import everything, same_bits

from .operations import HEADS

BF16, F16 = torch.bfloat16, torch.float16


def test_a_head_has_as_many_parts_as_its_hidden_units_touch():
    for heads, stored in itertools.product((1, 2, 3, 10, 70), (8, 24, 40, 64, 96, 128, 200, 1376)):
        most = max(
            (begin + stored - 1) // PRODUCT.block_cols - begin // PRODUCT.block_cols + 1
            for begin in range(0, heads * stored, stored)
        )
        found = launch_hopper.parts_of(heads, stored)
        # Few heads may not begin everywhere that more would.
        assert most <= found <= most + (heads < PRODUCT.block_cols)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the epilogue: a call that it does not serve fails."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    monkeypatch.setattr(launch_hopper, "FASTER", 0.0)

    def apart(*args):
        raise AssertionError("the second layers ran in a pass of their own")

    monkeypatch.setattr(launch, "silu_heads", apart)


def on_a_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(pytest.mark.usefixtures("fused")(test))


# Rows, heads, stored width, columns of x: several heads in one part, parts of two heads, columns of
# whole tiles and such that are none, one row, sums of one slice or a part of one, several rounds of
# all programs; the model.
SHAPES = [
    *((129, 3, 8, 72), (1, 1, 128, 64), (5000, 20, 24, 256), (30000, 2, 200, 8)),
    *((3000, 10, 1376, 512), (100, 3, 72, 384)),
    pytest.param(44000, 10, 1376, 512, marks=pytest.mark.large),
]
of_all_shapes = pytest.mark.parametrize(("rows", "heads", "stored", "width"), SHAPES)


@on_a_gpu
@pytest.mark.parametrize("op", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@of_all_shapes
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(
    rows, heads, stored, width, dtype, op, draw_heads
):
    op.check(draw_heads((rows, width), dtype, "cuda", stored, heads))


@on_a_gpu
@of_all_shapes
def test_the_same_bits_every_time_and_with_gradients_and_without(
    rows, heads, stored, width, draw_heads
):
    leaves = draw_heads((rows, width), BF16, "cuda", stored, heads)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    first = everything(grouped_heads, leaves)
    for _ in range(3):
        assert same_bits(everything(grouped_heads, leaves), first)
    with torch.no_grad():
        assert torch.equal(grouped_heads(*leaves), first[0])
    assert torch.equal(grouped_heads(*leaves, recompute=True), first[0])


@on_a_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_stay_in_their_rows(value, draw_heads):
    x, *weights = draw_heads((300, 512), BF16, "cuda", 1376, 10)
    clean = grouped_heads(x, *weights)
    x[65, 7] = value
    found = grouped_heads(x, *weights)
    others = torch.arange(300, device="cuda") != 65
    assert not found[65].isfinite().all()
    assert torch.equal(found[others], clean[others])


@on_a_gpu
@pytest.mark.parametrize("of_output", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_of_a_head_stay_there(value, of_output, draw_heads):
    x, hidden, output = draw_heads((300, 64), BF16, "cuda", 24, 10)
    clean = grouped_heads(x, hidden, output)
    if of_output:
        output[3, 5] = value
    else:
        hidden[3 * 24 + 5] = value
    found = grouped_heads(x, hidden, output)
    others = torch.arange(10, device="cuda") != 3
    assert not found[:, 3].isfinite().any()
    assert torch.equal(found[:, others], clean[:, others])


@on_a_gpu
def test_rows_at_odd_places_are_copied(draw_heads):
    x, *weights = draw_heads((300, 64), BF16, "cuda", 96, 3)
    amid = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert amid.data_ptr() % 16
    assert torch.equal(grouped_heads(amid, *weights), grouped_heads(x, *weights))
