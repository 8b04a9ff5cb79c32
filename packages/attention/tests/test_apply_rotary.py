"""apply_rotary: values, pairs of columns, columns that stay, positions of each row, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.attention import apply_rotary, rotary
from fusewright_testkit.conformance import everything, same_bits

from .operations import ApplyRotaryOp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

FORMS = [
    ApplyRotaryOp(interleaved, rest, each)
    for interleaved in (False, True)
    for rest in (0, 6)
    for each in (False, True)
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
each_backend = pytest.mark.parametrize("backend", ["triton", "reference"])


@pytest.mark.sampled
@each_form
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(2, 7, 3, 40), (1, 1, 1, 8), (3, 65, 2, 96)], ids=str)
def test_values_and_gradients(form, shape, dtype, device):
    form.check(form.draw(shape, dtype, device))


@pytest.mark.parametrize("shape", [(2, 5, 1, 2), (1, 33, 2, 256), (2, 3, 130, 6)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_shapes(interleaved, shape, device):
    form = ApplyRotaryOp(interleaved)
    form.check(form.draw(shape, F32, device))


@each_form
@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)], ids=str)
def test_no_batch_no_tokens_no_heads(form, shape, device):
    form.check(form.draw(shape, F32, device))


@each_backend
def test_halves_are_rotated_as_rotary_rotates_rows(backend, device):
    form = ApplyRotaryOp()
    (x,) = form.draw((2, 9, 3, 24), BF16, device)
    cos, sin = form.angles(x)
    expected = rotary(x.unsqueeze(2), cos, sin, backend=backend).squeeze(2)
    assert torch.equal(apply_rotary(x, cos, sin, backend=backend), expected)


@each_backend
def test_interleaved_columns_are_halves_in_another_order(backend, device):
    form = ApplyRotaryOp(rest=4, each=True)
    (x,) = form.draw((2, 9, 3, 24), F32, device)
    cos, sin = form.angles(x)
    order = torch.arange(20, device=device).view(2, 10).T.flatten()
    order = torch.cat([order, torch.arange(20, 24, device=device)])
    interleaved = apply_rotary(x[..., order], cos, sin, interleaved=True, backend=backend)
    assert torch.equal(interleaved, apply_rotary(x, cos, sin, backend=backend)[..., order])


@each_backend
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_each_row_are_those_of_its_angles(interleaved, backend, device):
    form = ApplyRotaryOp(interleaved, each=True)
    (x,) = form.draw((3, 5, 2, 8), F32, device)
    cos, sin = form.angles(x)
    whole = apply_rotary(x, cos, sin, interleaved=interleaved, backend=backend)
    for row in range(3):
        one = apply_rotary(
            x[row : row + 1], cos[row], sin[row], interleaved=interleaved, backend=backend
        )
        assert torch.equal(whole[row : row + 1], one)


@each_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_columns_behind_the_rotated_ones_keep_every_bit(interleaved, dtype, backend, device):
    form = ApplyRotaryOp(interleaved, rest=4)
    (x,) = form.draw((2, 5, 3, 12), dtype, device)
    x[..., -4:] = torch.tensor([-0.0, math.inf, math.nan, 1.0])
    out = form.public(x, backend=backend)
    bits = {2: torch.int16, 4: torch.int32}[x.itemsize]
    assert torch.equal(out[..., -4:].view(bits), x[..., -4:].view(bits))
    assert out[..., :-4].isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_strides_change_no_bit(interleaved, device):
    """Those of a projection to queries, keys and values, and of angles that are computed once."""
    form = ApplyRotaryOp(interleaved, each=True)
    joint = torch.randn(2, 9, 3, 4, 16, device=device)
    cos, sin = form.angles(joint[:, :, 0])
    both = torch.cat([cos, sin], -1)
    for x in (joint[:, :, 1], joint[:, :, 2].transpose(1, 2).contiguous().transpose(1, 2)):
        expected = everything(form.kernels, [x.contiguous().requires_grad_()])
        assert same_bits(everything(form.kernels, [x.detach().requires_grad_()]), expected)
    x = joint[:, :, 0]
    shared = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    options = dict(interleaved=interleaved, backend="triton")
    assert torch.equal(
        apply_rotary(x, *both.chunk(2, -1), **options), apply_rotary(x, cos, sin, **options)
    )
    assert torch.equal(
        apply_rotary(x, *shared, **options), apply_rotary(x, cos[0], sin[0], **options)
    )


def test_a_rotation_back_is_the_gradient(device):
    """Of any linear function of what was rotated, whose lengths stay."""
    form = ApplyRotaryOp(True, rest=2)
    (x,) = form.leaves((2, 7, 3, 18), F32, device)
    upstream = torch.randn_like(x)
    out = form.kernels(x)
    (dx,) = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(form.kernels(dx), upstream)


x, angles = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
REFUSED = {
    "three axes": ((x[0], angles, angles), {}, ValueError, "x must be .batch, tokens, heads"),
    "wide heads": ((torch.randn(1, 5, 1, 258), angles, angles), {}, ValueError, "2 up to 256"),
    "whole numbers": ((x.long(), angles, angles), {}, TypeError, "x must be"),
    "bf16 angles": ((x, angles.bfloat16(), angles), {}, ValueError, "cos must be torch.float32"),
    "other tokens": ((x, angles[:4], angles), {}, ValueError, "R / 2. with an even R up to 8"),
    "more columns": ((x, torch.randn(5, 5), angles), {}, ValueError, r"got \(5, 5\)"),
    "no columns": ((x, angles[:, :0], angles), {}, ValueError, r"got \(5, 0\)"),
    "one number": ((x, angles[0, 0], angles), {}, ValueError, r"got \(\)"),
    "one row of the batch": ((x, angles[None], angles), {}, ValueError, r"got \(1, 5, 4\)"),
    "two shapes": ((x, angles, angles.expand(2, -1, -1)), {}, ValueError, "shaped as cos"),
    "learned angles": ((x, angles.clone().requires_grad_(), angles), {}, ValueError, "no gradient"),
    "pairing by name": ((x, angles, angles), {"interleaved": "gpt-j"}, TypeError, "be a bool"),
}


@pytest.mark.parametrize(("tensors", "options", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rotated_is_refused(tensors, options, error, text):
    with pytest.raises(error, match=text):
        apply_rotary(*tensors, **options)
