"""Numbers, offsets and strides at the ends of their ranges."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright_testkit import Yardstick

from .operations import tf32

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def with_gradients(op, tensors, upstream, **options):
    """o and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = op.first(op.public(*leaves, **options))
    return o, *torch.autograd.grad(o, leaves, upstream)


def test_fp16_gradients_stay_in_range(op, scheme, device):
    """Where eager torch's do; ds before the sum of a row divides it would not."""
    q, k, v = op.draw((1, 20, 120, 1, 64), F16, device)
    upstream = 1000 * torch.randn(1, 20, 1, 64, device=device).to(F16)

    def first(call):
        return lambda *t: op.first(call(*t, scale=0.125))

    Yardstick(first(op.reference), [q, k, 4 * v], [upstream]).check(first(op.kernels))


def test_scores_of_minus_infinity_hide_no_others(lse_op, scheme, device):
    """Whatever tile they fill, and however low the others are."""
    q, k, v = lse_op.draw((1, 20, 40, 1, 16), F32, device)
    q[..., 0] = 1.0
    k[:, :24, :, 0] = -800.0
    k[:, 24:, :, 0] = -math.inf

    def without_them(q, k, v):
        return lse_op.reference(q, k[:, :24], v[:, :24])

    Yardstick(without_them, [q, k, v], [None, None]).check(lse_op.kernels)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nan_reaches_no_key_past_the_length(op, scheme, backend, device):
    tensors = op.draw((2, 20, 24, 1, 16), F32, device)
    tensors[0][1, 2] = math.nan
    lengths = torch.tensor([23, 3], device=device)
    upstream = torch.ones_like(tensors[0])
    _, _, dk, dv = with_gradients(op, tensors, upstream, key_lengths=lengths, backend=backend)
    for grad in (dk, dv):
        assert grad[1, :3].isnan().all()
        assert grad[1, 3:].eq(0).all()
        assert grad[0].isfinite().all()


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("where", ["query", "upstream gradient"])
def test_task_without_keys_gives_zeros_for_nan(op, scheme, where, backend, device):
    tensors = op.draw((2, 20, 24, 1, 16), F32, device)
    upstream = torch.ones_like(tensors[0])
    (tensors[0] if where == "query" else upstream)[0] = math.nan
    lengths = torch.tensor([0, 7], device=device)
    actual = with_gradients(op, tensors, upstream, key_lengths=lengths, backend=backend)
    for value in actual:
        assert value[0].eq(0).all()
        assert value[1].isfinite().all()


def test_one_key_gives_its_value(op, scheme, device):
    q, k, v = op.draw((1, 20, 24, 1, 16), F32, device)
    lengths = torch.tensor([1], device=device)
    o = op.first(op.kernels(q, k, v, lengths))
    assert torch.equal(o, v[:, :1].expand_as(o))


@pytest.mark.parametrize("keys", [40, 140])
def test_tf32_only_where_torch_takes_it(op, keys, device):
    tensors = op.draw((1, 20, keys, 1, 64), F32, device)
    exact = op.first(op.kernels(*tensors))
    with tf32():
        op.check(tensors)
        assert not torch.equal(op.first(op.kernels(*tensors)), exact)
    assert torch.equal(op.first(op.kernels(*tensors)), exact)


@pytest.mark.parametrize("keys", [40, 140])
def test_tf32_keeps_the_gpus_own_nan(op, keys, device):
    """All ones, which rounding would carry over into a zero."""
    q, k, v = op.draw((1, 20, keys, 1, 64), F32, device)
    k[0, 3, 0, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)
    with tf32():
        assert op.first(op.kernels(q, k, v)).isnan().all()


def untouched(numbers: int, device: str) -> torch.Tensor:
    """Memory that the system need not provide before something is written to it."""
    return torch.empty(0, device=device, dtype=F16).resize_(numbers)


def test_tokens_far_apart_are_copied(op, device):
    """Offsets inside a tile are 32-bit numbers."""
    stride = 2**23 + 8
    far = untouched(19 * stride + 16, device)
    far = far.as_strided((1, 20, 1, 16), (20 * stride, stride, 16, 1))
    near = torch.randn(1, 20, 1, 16, device=device).to(F16)
    far.copy_(near)
    actual = op.first(op.kernels(far, far, far))
    assert torch.equal(actual, op.first(op.kernels(near, near, near)))


def test_heads_far_apart(lse_op, scheme, device):
    """Further than a 32-bit number counts."""
    stride = 2**30 + 64
    far = untouched(2 * stride + 20 * 16, device)
    far = far.as_strided((1, 20, 3, 16), (3 * stride, 16, stride, 1))
    near = torch.randn(1, 20, 3, 16, device=device).to(F16)
    far.copy_(near)
    upstream = torch.ones_like(near)
    actual = with_gradients(lse_op, [far, far, far], upstream, backend="triton")
    expected = with_gradients(lse_op, [near, near, near], upstream, backend="triton")
    assert all(torch.equal(f, e) for f, e in zip(actual, expected, strict=True))


def test_tokens_of_too_many_numbers_are_refused(op, device):
    q = torch.empty(1, 1, 2**20, 16, device=device, dtype=F16)
    with pytest.raises(ValueError, match=r"2\*\*23 numbers a token, got 16777216"):
        op.kernels(q, q, q)
