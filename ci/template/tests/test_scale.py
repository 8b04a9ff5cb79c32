"""scale: the product, its gradients, its errors."""

from __future__ import annotations

import pytest
import torch
from fusewright.example import scale
from fusewright.example.elementwise import reference
from fusewright_testkit import Yardstick

SHAPES = [(), (1,), (0, 3), (7,), (33, 65), (3, 1, 1025)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spelled(value: object) -> str:
    """Test ids: ``33x65``, ``bfloat16``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


def triton_scale(x: torch.Tensor) -> torch.Tensor:
    return scale(x, 0.3, backend="triton")


def yardstick(x: torch.Tensor) -> Yardstick:
    return Yardstick(lambda x: reference.scale(x, 0.3), [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=spelled)
@pytest.mark.parametrize("shape", SHAPES, ids=spelled)
def test_product_and_gradient_are_as_near_to_fp64_as_torch(shape, dtype, device):
    x = torch.randn(shape, dtype=dtype, device=device)
    yardstick(x).check(triton_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=spelled)
def test_strided_input_is_read_by_its_strides(dtype, device):
    x = torch.randn(12, 10, dtype=dtype, device=device)[::2, 1::3].T
    yardstick(x).check(triton_scale)


def test_reference_has_the_gradients_of_its_formula():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.scale(x, 0.3), x)
    assert torch.autograd.gradgradcheck(lambda x: reference.scale(x, 0.3), x)


def test_second_derivative_of_the_squared_product_is_twice_the_squared_factor(device):
    x = torch.randn(5, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(triton_scale(x).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, torch.full_like(x, 2 * 0.3**2))


def test_same_inputs_same_bits(device):
    x = torch.randn(2049, device=device)
    assert torch.equal(triton_scale(x), triton_scale(x))


def test_infinity_and_nan_pass_through(device):
    x = torch.tensor([float("inf"), -float("inf"), float("nan")], device=device)
    assert torch.equal(triton_scale(x).isnan(), x.isnan())
    assert torch.equal(triton_scale(x).isinf(), x.isinf())


@pytest.mark.parametrize(
    ("x", "factor", "error", "message"),
    [
        (3.0, 2.0, TypeError, "x must be a tensor, got float"),
        (
            torch.ones(3, dtype=torch.int64),
            2.0,
            TypeError,
            "x must be float32, bfloat16, float16 or float64, got torch.int64",
        ),
        (torch.ones(3), float("nan"), ValueError, "factor must be a finite number, got nan"),
    ],
    ids=["number", "integer-tensor", "nan-factor"],
)
def test_bad_input_is_refused_by_what_was_wanted_and_what_came(x, factor, error, message):
    with pytest.raises(error, match=message):
        scale(x, factor)
