"""What only a GPU can show: great sizes, the tuned tables."""

from __future__ import annotations

import pytest
import torch
from fusewright import norm
from fusewright.norm.row_norm import launch, launch_backward, reference
from fusewright_testkit import Yardstick

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "cols", sorted({c.max_cols for c in launch.FORWARD + launch_backward.BACKWARD})
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_every_width_of_the_tables_is_as_near_to_fp64_as_torch(op, cols, dtype):
    # The truth in fp64 takes gigabytes where rows are wide.
    op.check(op.draw((min(3000, (1 << 23) // cols), cols), dtype, "cuda"))


@pytest.mark.large
def test_tensor_past_31_bits_of_elements():
    rows, cols = (1 << 16) + 3, (1 << 15) + 8
    x = torch.randn(rows, cols, device="cuda", dtype=BF16)
    chosen = [0, 1, rows // 2, rows - 1]
    y = norm.rms_norm(x, eps=1e-6, backend="triton")
    assert torch.equal(y[chosen], norm.rms_norm(x[chosen], eps=1e-6, backend="triton"))
    del y
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(norm.rms_norm(leaf, eps=1e-6, backend="triton"), leaf, x.detach())
    few = x.detach()[chosen].requires_grad_()
    (truth,) = torch.autograd.grad(
        norm.rms_norm(few, eps=1e-6, backend="triton"), few, few.detach()
    )
    assert torch.equal(dx[chosen], truth)


@pytest.mark.large
@pytest.mark.parametrize(("rows", "cols"), [((1 << 16) + 3, (1 << 15) + 8), ((1 << 19) + 3, 4096)])
def test_gradients_reach_rows_past_31_bits_of_elements(rows, cols):
    """A few rows amid a great tensor, the last one among them, whose other rows get no gradient."""
    rest = torch.ones(rows, cols, device="cuda", dtype=BF16)
    chosen = torch.tensor([0, 1, rows // 2, rows - 1], device="cuda")
    x = torch.randn(4, cols, device="cuda", dtype=BF16)
    weight = torch.randn(cols, device="cuda")

    def amid_the_rest(x, weight):
        y = norm.rms_norm(rest.index_copy(0, chosen, x), weight, eps=1e-6, backend="triton")
        return y.index_select(0, chosen)

    Yardstick(lambda *t: reference.rms_norm(*t, eps=1e-6), [x, weight]).check(amid_the_rest)


@pytest.mark.large
def test_full_size_is_as_near_to_fp64_as_torch(op):
    op.check(op.draw((16384, 4096), BF16, "cuda"))
