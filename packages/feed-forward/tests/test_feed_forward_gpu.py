"""SiLU in the epilogue of a product, which runs on GPUs of compute capability 9.0 alone: it serves
here whatever size is asked, also where a pass of its own is faster.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.feed_forward.perceptron import launch, launch_hopper

from .operations import FEED_FORWARD

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
OP = FEED_FORWARD


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the epilogue: a call that it does not serve fails."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    monkeypatch.setattr(launch_hopper, "FASTER", launch_hopper.Faster(0.0, 0.0))

    def separate_pass(*args):
        raise AssertionError("SiLU ran in a pass of its own")

    for name in ("silu", "silu_backward"):
        monkeypatch.setattr(launch, name, separate_pass)


# Columns of whole tiles and such that are none, sums of one slice, of a part of one and of so few
# that two tiles' have room, rows of no whole tile, of one row, of several rounds of all programs;
# more panels than programs; leading axes.
SHAPES = [
    *((8192, 512, 1376, 512), (1, 512, 1376, 512), (129, 8, 256, 24), (1000, 72, 8, 8)),
    *((40000, 64, 264, 136), (2, 3, 50, 72, 40, 24), (5000, 256, 296, 256), (50, 512, 20000, 8)),
    pytest.param((44000, 512, 1376, 512), marks=pytest.mark.large),
]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(shape, dtype):
    OP.check(OP.draw(shape, dtype, "cuda"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_every_time_and_with_gradients_and_without(shape):
    x, *weights = (t.requires_grad_() for t in OP.draw(shape, BF16, "cuda"))

    def found():
        y = OP.kernels(x, *weights)
        return y, *torch.autograd.grad(y.square().sum(), [x, *weights])

    first = found()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found(), first, strict=True))
    with torch.no_grad():
        assert torch.equal(OP.kernels(x, *weights), first[0])


def test_hidden_layer_that_is_kept_is_the_activation_of_what_is_kept_before_it():
    x, hidden_weight, _ = OP.draw((3000, 512, 1376, 8), BF16, "cuda")
    u, h = launch_hopper.product_silu(x, hidden_weight, keeps=True)
    truth = torch.nn.functional.silu(u.float())
    assert (h.float() - truth).abs().max() <= torch.finfo(BF16).eps * truth.abs().max()
    _, alone = launch_hopper.product_silu(x, hidden_weight, keeps=False)
    assert torch.equal(alone, h)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_special_values_stay_in_their_rows_and_are_where_torch_has_them(value):
    x, *weights = OP.draw((300, 512, 1376, 64), BF16, "cuda")
    clean = OP.kernels(x, *weights)
    x[65, 7] = value
    found, truth = OP.kernels(x, *weights), OP.reference(x, *weights)
    assert torch.equal(found.isnan(), truth.isnan())
    others = torch.arange(300, device="cuda") != 65
    assert torch.equal(found[others], clean[others])


def test_rows_at_odd_places_are_copied():
    x, *weights = OP.draw((300, 64, 96, 64), BF16, "cuda")
    amid = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert amid.data_ptr() % 16
    assert torch.equal(OP.kernels(amid, *weights), OP.kernels(x, *weights))
