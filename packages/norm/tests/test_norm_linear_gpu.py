"""The kernel of a norm and a linear layer, which runs on GPUs of compute capability 9.0 alone: it
serves here whatever size is asked, also where a norm and a product are faster.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.norm import layer_norm_linear, rms_norm_linear
from fusewright.norm.norm_linear import launch, launch_hopper, reference
from fusewright_testkit import Yardstick

from .operations import NORM_LINEAR, NormLinearOp

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(params=NORM_LINEAR)
def op(request: pytest.FixtureRequest) -> NormLinearOp:
    return NORM_LINEAR[request.param]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the kernel: a call that it does not serve fails."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    monkeypatch.setattr(launch_hopper, "is_faster", lambda *sizes: True)

    def plain(*args, **options):
        raise AssertionError("a norm of its own ran in the forward pass")

    monkeypatch.setattr(launch, "norm_forward", plain)


# Widths of both lines of the table and below them, of no whole slice; columns of y of no whole
# tile; rows of no whole block, of one row, of several rounds of all programs; leading axes.
SHAPES = [
    *((3000, 512, 1536), (1, 512, 1536), (129, 504, 136), (40000, 512, 264)),
    *((64, 256, 8), (2000, 248, 2048), (7, 8, 16), (2, 3, 50, 72, 40)),
]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_are_as_near_to_fp64_as_torch(op, shape, dtype):
    tensors = op.draw(shape, dtype, "cuda")
    with torch.no_grad():
        grads = [None]
        Yardstick(op.reference, tensors, grads).check(op.kernels)


@pytest.mark.parametrize("form", [0.0, 1.0])
def test_what_is_absent_is_not_read(op, form):
    """Without the norm's vectors and the bias, and with vectors in fp32 and an offset."""
    x, *vectors, weight, bias = op.draw((300, 512, 256), BF16, "cuda")
    center = op.vectors == 2
    options = dict(eps=1e-6) if center else dict(eps=1e-6, weight_offset=form)
    if form:
        vectors, bias = [v.float() for v in vectors], None
    else:
        vectors = [None] * op.vectors
    function = layer_norm_linear if center else rms_norm_linear
    formula = getattr(reference, op.function)
    Yardstick(lambda *t: formula(*t, **options), [x, *vectors, weight, bias], [None]).check(
        lambda *t: function(*t, **options, backend="triton")
    )


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("mean", [3.0, 30.0, 250.0])
def test_rows_far_from_zero_keep_their_spread(mean, dtype):
    """Of weights of one sign, so that sums over a row of weight do not cancel."""
    op = NORM_LINEAR["layer_norm_linear"]
    x, norm_weight, norm_bias, weight, bias = op.draw((1000, 512, 512), dtype, "cuda")
    tensors = [x + mean, norm_weight, norm_bias, weight.abs(), bias]
    Yardstick(op.reference, tensors, [None]).check(op.kernels)


def test_saved_statistics_are_those_of_the_rows(op):
    tensors = op.arguments(op.draw((777, 512, 256), BF16, "cuda"))
    center = op.vectors == 2
    if not center:
        tensors.insert(2, None)
    _, mean, rstd = launch.norm_linear_forward(*tensors, 1e-6, 0.0, center)
    x = tensors[0].double()
    if center:
        truth = x.mean(-1)
        assert (mean - truth).abs().max() <= 4 * torch.finfo(torch.float32).eps * x.abs().max()
        x = x - truth[:, None]
    else:
        assert mean is None
    truth = torch.rsqrt(x.square().mean(-1) + 1e-6)
    assert ((rstd - truth) / truth).abs().max() <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_special_values_give_what_a_norm_and_a_product_give(op, value):
    tensors = op.draw((300, 512, 256), BF16, "cuda")
    tensors[0][65, 7] = value
    tensors[0][200] *= 1e30
    with torch.no_grad():
        found, truth = op.kernels(*tensors), op.reference(*tensors)
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())


@pytest.mark.parametrize("rows", [1, 1000, 20000])
def test_rows_do_not_depend_on_how_many_there_are(op, rows):
    """Nor on the part of the columns that a program has."""
    x, *others = op.draw((20000, 512, 1536), BF16, "cuda")
    assert torch.equal(op.kernels(x[:rows].clone(), *others), op.kernels(x, *others)[:rows])


def test_rows_at_odd_places_are_copied(op):
    x, *others = op.draw((300, 256, 128), BF16, "cuda")
    expected = op.kernels(x, *others)
    amid = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    gaps = torch.cat([x, x[:, :3]], 1)[:, :256]
    assert torch.equal(op.kernels(amid, *others), expected)
    assert torch.equal(op.kernels(gaps, *others), expected)
    strided = torch.cat([x, x], 1)[:, 256:]
    assert torch.equal(op.kernels(strided, *others), expected)
