"""Rotary positions on a GPU: the sizes of a model, graphs, synchronisation, great tensors."""

from __future__ import annotations

import pytest
import torch
from fusewright.attention import rotary
from fusewright_testkit import capture, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# A segment of a model with its prefix, queries alone, many tokens, odd ones, a width of no vectors.
CASES = {
    "segment": ((4, 512, 2, 8, 40), True, (16,)),
    "prefix-of-each": ((4, 512, 2, 8, 40), True, (4, 16)),
    "queries": ((4, 4096, 1, 8, 40), False, None),
    "keys-values": ((4, 4096, 2, 8, 64), False, None),
    "odd": ((3, 333, 2, 5, 6), True, (7,)),
    "wide": ((2, 65, 2, 3, 256), True, (1,)),
    "many-rows": ((50, 9, 2, 8, 64), True, (16,)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_as_near_to_fp64_as_torch(rotary_op, case, dtype):
    shape, beside, prefix = case
    rotary_op.check(rotary_op.draw(shape, dtype, "cuda", beside, prefix))


def test_rows_as_a_model_has_them(rotary_op):
    """Segments of longer tensors, which begin where they do."""
    rows, beside, prefix = rotary_op.draw((4, 600, 2, 8, 40), BF16, "cuda", prefix=(16,))
    for start in (0, 8, 77):
        parts = rows[:, start : start + 300], beside[:, start : start + 300], prefix
        expected = rotary_op.kernels(*(x.clone() for x in parts))
        assert torch.equal(rotary_op.kernels(*parts), expected)


@each_case
def test_graph_gives_eager_bits_and_waits_for_nothing(rotary_op, case):
    shape, beside, prefix = case
    leaves, others = (rotary_op.draw(shape, BF16, "cuda", beside, prefix) for _ in range(2))
    leaves = [x if x is None else x.requires_grad_() for x in leaves]
    graph, captured = capture(lambda: everything(rotary_op.kernels, leaves))
    with torch.no_grad():
        for x, other in zip(leaves, others, strict=True):
            if x is not None:
                x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    with no_synchronisation():
        expected = everything(rotary_op.kernels, leaves)
    assert same_bits(captured, expected)
    assert all(same_bits(everything(rotary_op.kernels, leaves), expected) for _ in range(5))


def test_values_and_prefix_keep_every_bit(rotary_op):
    for dtype in (F32, BF16, F16):
        rows, beside, prefix = rotary_op.draw((2, 100, 2, 8, 40), dtype, "cuda", prefix=(16,))
        for x in (rows, beside, prefix):
            x[..., 0, 1], x[..., 1, 2], x[..., 2, 3] = -0.0, float("inf"), float("-inf")
        joint = rotary_op.kernels(rows, beside, prefix)
        pairs = (
            (joint[:, :16], prefix.expand(2, -1, -1, -1, -1)),
            (joint[:, 16::2, 1], rows[:, :, 1]),
            (joint[:, 17::2, 1], beside[:, :, 1]),
        )
        for actual, expected in pairs:
            assert torch.equal(actual, expected)
            assert torch.equal(actual.signbit(), expected.signbit())


def test_inductor_compiles_forward_and_backward(rotary_op):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in rotary_op.draw(*CASES["segment"][:1], BF16, "cuda")]
    angles = rotary_op.angles(leaves[0])
    compiled = torch.compile(rotary, fullgraph=True)
    found, expected = (
        everything(lambda x, y, p, call=call: call(x, *angles, beside=y, prefix=p), leaves)
        for call in (compiled, rotary)
    )
    assert same_bits(found, expected)


@pytest.mark.large
def test_rows_past_31_bits_of_elements(rotary_op):
    """Of the joint sequence, within one row of the batch."""
    tokens = (1 << 31) // (2 * 2 * 8 * 256) + 64
    few = rotary_op.draw((1, 64, 2, 8, 256), BF16, "cuda", prefix=(3,))
    angles = rotary_op.angles(few[0])
    many = *(x.repeat(1, tokens // 64, 1, 1, 1) for x in few[:2]), few[2]
    actual = []
    for rows, beside, prefix in (few, many):
        repeated = (x.repeat(rows.shape[1] // 64, 1) for x in angles)
        inputs = [x.requires_grad_() for x in (rows, beside)]
        joint = rotary(rows, *repeated, beside=beside, prefix=prefix)
        last = joint.detach()[:, -128:].clone()
        grads = torch.autograd.grad(joint, inputs, joint.detach())
        actual.append([last, *(x[:, -64:].clone() for x in grads)])
        del joint, grads
    assert same_bits(*actual)
