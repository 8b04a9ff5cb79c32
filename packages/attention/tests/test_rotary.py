"""Rotary positions: values, what is passed as it is, strides, what is refused."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from fusewright.attention import rotary
from fusewright.attention.positions import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.bench import load
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.conformance.input import NothingRuns

from .operations import PARTS, RotaryOp

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
bench = load(pathlib.Path(__file__).parents[1])
SHAPE = (2, 5, 2, 3, 8)

each_part = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.sampled
@each_part
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_values_and_gradients(rotary_op, small_programs, parts, dtype, device):
    beside, prefix = parts
    rotary_op.check(rotary_op.draw((2, 4, 2, 2, 40), dtype, device, beside, prefix))


@pytest.mark.sampled
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 1, 2), (1, 5, 1, 3, 6), (2, 33, 2, 2, 64), (2, 3, 2, 1, 256)], ids=str
)
def test_shapes(rotary_op, beside, shape, device):
    rotary_op.check(rotary_op.draw(shape, F32, device, beside))


@each_part
def test_positions_of_each_row_of_the_batch(small_programs, parts, device):
    """Each row has the bits that it has alone, and gradients are right."""
    op, (beside, prefix) = RotaryOp(each=True), parts
    tensors = op.draw((3, 5, 2, 2, 24), F32, device, beside, prefix and (*[3] * len(prefix),))
    op.check(tensors)
    cos, sin = op.angles(tensors[0])
    rows, beside, prefix = tensors
    joint = op.kernels(*tensors)
    for row in range(3):
        own = slice(row, row + 1)
        shared = prefix is None or prefix.ndim == 4
        alone = rotary(
            *(rows[own], cos[row], sin[row]),
            beside=None if beside is None else beside[own],
            prefix=prefix if shared else prefix[own],
            backend="triton",
        )
        assert torch.equal(joint[own], alone)


@pytest.mark.parametrize(
    ("shape", "prefix"),
    [
        ((3, 0, 2, 2, 8), (4,)),
        ((3, 0, 2, 2, 8), (3, 4)),
        ((0, 4, 2, 2, 8), (4,)),
        ((0, 4, 2, 2, 8), (0, 4)),
        ((3, 0, 2, 2, 8), None),
        ((2, 4, 1, 0, 8), (3,)),
    ],
    ids=str,
)
def test_no_tokens_no_batch_no_heads(rotary_op, shape, prefix, device):
    rotary_op.check(rotary_op.draw(shape, F32, device, True, prefix))


@pytest.mark.parametrize("batches", [1, 5])
def test_gradient_of_a_shared_prefix_is_the_sum_over_the_batch(
    rotary_op, small_programs, batches, device
):
    """Rounded once, however many rows there are."""
    leaves = rotary_op.leaves((batches, 2, 2, 2, 24), F16, device)
    upstream = torch.randn_like(rotary_op.kernels(*leaves))
    *_, dprefix = everything(rotary_op.kernels, leaves, [upstream])
    expected = upstream[:, :3].float().cumsum(0)[-1].half()
    assert torch.equal(dprefix, expected)


def test_order_is_prefix_then_each_token_with_the_row_beside_it(rotary_op, device):
    rows, beside, prefix = rotary_op.draw(SHAPE, F32, device)
    joint = rotary_op.kernels(rows, beside, prefix)
    assert torch.equal(joint[:, :3], prefix.expand(2, -1, -1, -1, -1))
    assert torch.equal(joint[:, 3::2], rotary_op.kernels(rows))
    assert torch.equal(joint[:, 4::2], rotary_op.kernels(beside))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_scores_depend_on_the_distance_of_two_tokens_alone(rotary_op, backend, device):
    """The same query and the same key at every token: one score for each distance."""
    tokens, width = 9, 16
    q, k = torch.randn(2, width, device=device)

    def scores(q, k):
        rows = torch.stack([q, k]).view(2, 1, 1, 1, width).expand(-1, tokens, -1, -1, -1)
        queries, keys = rotary_op.public(rows, backend=backend).flatten(2)
        return queries @ keys.T

    def of_distances(q, k):
        between = torch.arange(tokens, device=device)
        distance = (between.unsqueeze(-1) - between).unsqueeze(-1)
        steps = torch.arange(0, width, 2, device=device, dtype=F64)
        angles = distance * rotary_op.base ** (-steps / width)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        (a, b), (c, d) = q.chunk(2), k.chunk(2)
        return (cos * (a * c + b * d) + sin * (a * d - b * c)).sum(-1)

    Yardstick(of_distances, [q, k]).check(scores)


def test_rotation_of_no_angle_changes_nothing(rotary_op, device):
    rows, *_ = rotary_op.draw((2, 1, 1, 3, 8), BF16, device)
    assert torch.equal(rotary_op.kernels(rows), rows)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_values_and_prefix_keep_every_bit(rotary_op, small_programs, backend, dtype, device):
    """Infinities and negative zeros too; and a NaN in a key stays in its row."""
    tensors = rotary_op.draw(SHAPE, dtype, device)
    for x in tensors:
        x[..., 0, 1] = -0.0
        x[..., 1, 2] = math.inf
        x[..., 2, 3] = math.nan
    rows, beside, prefix = tensors
    joint = rotary_op.public(*tensors, backend=backend)
    assert torch.equal(bits(joint[:, :3]), bits(prefix.expand(2, -1, -1, -1, -1)))
    assert torch.equal(bits(joint[:, 3::2, 1]), bits(rows[:, :, 1]))
    assert torch.equal(bits(joint[:, 4::2, 1]), bits(beside[:, :, 1]))
    keys = joint[:, 3:, 0]
    assert keys[..., 0, :].isfinite().all()
    assert (~keys[..., 1, :].isfinite()).any(-1).all()
    assert keys[..., 2, 3].isnan().all()
    assert keys[..., 2, 0].isfinite().all()


def test_strides_of_cos_and_sin_change_no_bit(rotary_op, device):
    rows, beside, prefix = rotary_op.draw(SHAPE, F32, device)
    cos, sin = rotary_op.angles(rows)
    expected = rotary_op.kernels(rows, beside, prefix)
    for angles in (torch.cat([cos, sin], -1).chunk(2, -1), (cos.T.contiguous().T, sin)):
        actual = rotary(rows, *angles, beside=beside, prefix=prefix, backend="triton")
        assert torch.equal(actual, expected)


def test_expanded_rows(rotary_op, device):
    """As one row of a batch, given to all of it."""
    rows, _, prefix = rotary_op.draw((1, 5, 2, 3, 8), F32, device, prefix=(1, 2))
    expected = rotary_op.kernels(rows, None, prefix).expand(3, -1, -1, -1, -1)
    rows, prefix = (x.expand(3, -1, -1, -1, -1) for x in (rows, prefix))
    assert torch.equal(rotary_op.kernels(rows, None, prefix), expected)


def test_each_pass_is_one_launch(rotary_op, fresh_plans, monkeypatch, device):
    from fusewright.attention._core.launches import Launch

    count = []
    launch = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda *args: [count.append(1), launch(*args)])
    tensors = [x.requires_grad_() for x in rotary_op.draw(SHAPE, F32, device)]
    joint = rotary_op.kernels(*tensors)
    assert len(count) == 1
    djoint = torch.ones_like(joint).requires_grad_()
    grads = torch.autograd.grad(joint, tensors, djoint, create_graph=True)
    assert len(count) == 2
    torch.autograd.grad(grads, djoint, tensors)
    assert len(count) == 3


def test_nothing_but_cos_and_sin_is_saved(rotary_op, device):
    tensors = [x.requires_grad_() for x in rotary_op.draw(SHAPE, F32, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        rotary_op.kernels(*tensors)
    assert same_bits(saved, rotary_op.angles(tensors[0]))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_to_bf16_leaves_fp16(rotary_op, backend, device):
    tensors = rotary_op.draw(SHAPE, F16, device)
    expected = rotary_op.public(*tensors, backend=backend)
    with torch.autocast(device, BF16):
        assert torch.equal(rotary_op.public(*tensors, backend=backend), expected)


@each_part
def test_reference_backward_is_that_of_autograd(rotary_op, parts):
    beside, prefix = parts
    tensors = rotary_op.draw(SHAPE, F64, beside=beside, prefix=prefix)
    tensors = [x if x is None else x.requires_grad_() for x in tensors]
    joint = rotary_op.reference(*tensors)
    djoint = torch.randn_like(joint)
    asked = [x is not None for x in tensors]
    present = [x for x in tensors if x is not None]
    expected = torch.autograd.grad(joint, present, djoint)
    shared = prefix is not None and len(prefix) == 1
    actual = reference.rotary_backward(djoint, *rotary_op.angles(tensors[0]), beside, shared)
    assert len(actual) == 3
    actual = [x for x, wanted in zip(actual, asked, strict=True) if wanted]
    torch.testing.assert_close(actual, list(expected))


def test_benchmark_peer_computes_the_same():
    tensors = bench.normal([(2, 5, 2, 3, 8)] * 2 + [(4, 2, 3, 8)], F32, "cpu")
    expected = bench.with_angles(reference.rotary)
    torch.testing.assert_close(bench.with_angles(bench.torch_rotary)(*tensors), expected(*tensors))
    torch.testing.assert_close(
        bench.with_angles(bench.torch_rotary)(tensors[0]), expected(tensors[0])
    )


rows, cos, sin = torch.randn(2, 5, 2, 3, 8), torch.randn(5, 4), torch.randn(5, 4)
BAD = {
    "list": ((rows.tolist(), cos, sin), {}, TypeError, "rows must be a tensor, got list"),
    "integers": ((rows.int(), cos, sin), {}, TypeError, "float64, got torch.int32"),
    "sparse": ((rows, cos.to_sparse(), sin), {}, TypeError, "cos must be a strided tensor"),
    "four axes": ((rows[0], cos, sin), {}, ValueError, r"rows must be \[batch, tokens, 1 or 2, "),
    "three kinds": (
        *((rows.repeat(1, 1, 2, 1, 1)[:, :, :3], cos, sin), {}),
        *(ValueError, r"1 or 2, heads, width\], got \(2, 5, 3, 3, 8\)"),
    ),
    "odd width": ((rows[..., :7], cos, sin), {}, ValueError, "even and up to 256, got 7"),
    "no width": ((rows[..., :0], cos, sin), {}, ValueError, "even and up to 256, got 0"),
    "width 258": ((torch.randn(1, 5, 1, 1, 258), cos, sin), {}, ValueError, "up to 256, got 258"),
    "tokens of cos": (
        (rows, cos[1:], sin),
        {},
        ValueError,
        r"cos must be \[5, 4\] or .*got \(4, 4\)",
    ),
    "width of sin": (
        (rows, cos, sin[:, 1:]),
        {},
        ValueError,
        r"sin must be .*\[2, 5, 4\], got \(5, 3",
    ),
    "batch of cos": (
        *((rows, cos.expand(3, 5, 4), sin), {}),
        *(ValueError, r"cos must be \[5, 4\] or \[2, 5, 4\], got \(3, 5, 4\)"),
    ),
    "sin of each": (
        *((rows, cos, sin.expand(2, 5, 4)), {}),
        *(ValueError, r"sin must be shaped as cos \(5, 4\), got \(2, 5, 4\)"),
    ),
    "bf16 cos": (
        *((rows.bfloat16(), cos.bfloat16(), sin), {}),
        *(ValueError, "cos must be torch.float32 with rows of torch.bfloat16, got torch.bfloat"),
    ),
    "fp32 beside fp64": (
        *((rows.double(), cos, sin), {}),
        *(ValueError, "cos must be torch.float64 with rows of torch.float64, got torch.float32"),
    ),
    "sin elsewhere": (
        *((rows, cos, sin.to("meta")), {}),
        *(ValueError, "sin must be on rows's device cpu, got meta"),
    ),
    "cos with gradient": (
        *((rows, cos.clone().requires_grad_(), sin), {}),
        *(ValueError, "cos gets no gradient, and must not require one"),
    ),
    "sin with gradient": (
        *((rows, cos, sin.clone().requires_grad_()), {}),
        *(ValueError, "sin gets no gradient, and must not require one"),
    ),
    "beside of other tokens": (
        *((rows, cos, sin), dict(beside=rows[:, 1:])),
        *(ValueError, r"beside must have rows's shape \(2, 5, 2, 3, 8\), got \(2, 4, 2, 3, 8"),
    ),
    "beside in fp16": (
        *((rows, cos, sin), dict(beside=rows.half())),
        *(ValueError, "beside must have rows's dtype torch.float32, got .*float16"),
    ),
    "prefix of other heads": (
        *((rows, cos, sin), dict(prefix=rows[0, :, :, :2])),
        *(ValueError, r"prefix must be \[P, 2, 3, 8\] or so for each of 2 rows .* \(5, 2, 2, 8\)"),
    ),
    "prefix of another batch": (
        *((rows, cos, sin), dict(prefix=rows[:1])),
        *(ValueError, r"prefix must be \[P, 2, 3, 8\] .* got \(1, 5, 2, 3, 8\)"),
    ),
    "prefix of one token": (
        *((rows, cos, sin), dict(prefix=rows[0, 0])),
        *(ValueError, r"prefix must be \[P, 2, 3, 8\] .* got \(2, 3, 8\)"),
    ),
    "backend": ((rows, cos, sin), dict(backend="cuda"), ValueError, '"auto", "triton" or "refere'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_touches_no_memory(name):
    arguments, options, error, message = BAD[name]
    with NothingRuns(), pytest.raises(error, match=message):
        rotary(*arguments, **options)


def test_transform_by_an_angle_raises(rotary_op, device):
    rows, *_ = rotary_op.draw(SHAPE, F32, device)
    cos, sin = rotary_op.angles(rows)
    with pytest.raises(ValueError, match="sin gets no gradient"):
        torch.func.grad(lambda sin: rotary(rows, cos, sin, backend="triton").sum())(sin)
