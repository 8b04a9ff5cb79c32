"""What only a GPU can show of sinkhorn_knopp: every size, great ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fusewright import norm
from fusewright.norm import sinkhorn_knopp
from fusewright.norm.sinkhorn import reference
from fusewright_testkit import Yardstick

from .operations import SINKHORN

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("op", SINKHORN, ids=lambda op: op.domain)
@pytest.mark.parametrize("n", [*range(1, 18), 31, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_size_is_as_near_to_fp64_as_torch(op, n, dtype):
    """More matrices than programs stay on the GPU."""
    x = torch.randn(40000 // n + 3, n, n, device="cuda").to(dtype)
    Yardstick(op.reference, [x]).check(op.kernels)


@pytest.mark.parametrize("shape", [(16384, 4, 4), (1024, 64, 64)], ids=str)
def test_full_size_is_as_near_to_fp64_as_torch(shape):
    x = torch.randn(shape, device="cuda")
    Yardstick(partial(reference.sinkhorn_knopp, iterations=20, eps=1e-6), [x]).check(
        partial(sinkhorn_knopp, backend="triton")
    )


@pytest.mark.large
def test_gradients_reach_matrices_past_31_bits_of_elements():
    """The last matrices of a tensor of 2^31 elements and more get the bits that they get alone."""
    x = torch.zeros((1 << 27) + 5, 4, 4, device="cuda", dtype=BF16)
    x[-3:] = torch.randn(3, 4, 4, device="cuda")
    leaf, few = x.requires_grad_(), x[-3:].detach().clone().requires_grad_()
    call = partial(norm.sinkhorn_knopp, iterations=2, backend="triton")
    y = call(leaf)
    assert torch.equal(y[-3:], call(few))
    (dx,) = torch.autograd.grad(y, leaf, leaf.detach())
    (truth,) = torch.autograd.grad(call(few), few, few.detach())
    assert torch.equal(dx[-3:], truth)
