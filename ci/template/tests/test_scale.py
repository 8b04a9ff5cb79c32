"""scale: the product, its gradients, its errors."""

from __future__ import annotations

import pytest
import torch
from fusewright.example import scale

from .operations import SCALE

SHAPES = [(), (1,), (0, 3), (7,), (33, 65), (3, 1, 1025)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spelled(value: object) -> str:
    """Test ids: ``33x65``, ``bfloat16``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=spelled)
@pytest.mark.parametrize("shape", SHAPES, ids=spelled)
def test_product_and_gradient_are_as_near_to_fp64_as_torch(shape, dtype, device):
    SCALE.check(SCALE.draw(shape, dtype, device))


def test_infinity_and_nan_pass_through(device):
    x = torch.tensor([float("inf"), -float("inf"), float("nan")], device=device)
    y = SCALE.kernels(x)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.isinf(), x.isinf())


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
