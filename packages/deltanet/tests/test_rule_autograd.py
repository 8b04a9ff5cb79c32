"""What the gradients of gated_delta_rule are asked for, and what is kept for them."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.deltanet.rule import reference
from fusewright_testkit.conformance import same_bits

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows, tokens, heads, K, V.
SIZES = 1, 2, 1, 2, 3


def test_reference_passes_gradcheck_over_two_chunks(rule_op):
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 65, 1, 1, 1, F64)]
    assert torch.autograd.gradcheck(rule_op.reference, leaves)


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2)], ids=["o", "state"])
def test_part_of_the_outputs_gives_part_of_the_gradients(rule_op, used, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = rule_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    y = rule_op.kernels(*leaves)[used][0]
    truth = torch.autograd.grad(y.sum(), leaves, materialize_grads=True)
    mixed = [
        leaf if place in (1, 3) else x
        for place, (leaf, x) in enumerate(zip(leaves, tensors, strict=True))
    ]
    y = rule_op.kernels(*mixed)[used][0]
    found = torch.autograd.grad(y.sum(), (leaves[1], leaves[3]))
    assert same_bits(found, (truth[1], truth[3]))


def test_gates_of_another_dtype_get_gradients_in_it(rule_op, backend, device):
    q, k, v, g, beta, state = rule_op.draw(*SIZES, F32, device)
    gates = [x.to(BF16).requires_grad_() for x in (g, beta)]
    outputs = rule_op.public(q, k, v, *gates, state, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), gates)
    assert [g.dtype for g in grads] == [BF16] * 2


def test_input_changed_after_the_forward_pass_is_noticed(rule_op, device):
    """Of narrower heads the kernels keep copies, which stay as they were."""
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 2, 1, 16, 16, F32, device)]
    o, _ = rule_op.kernels(*leaves)
    with torch.no_grad():
        leaves[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(("dtype", "decays"), [(F32, 2 * 64), (F16, 64)])
@pytest.mark.parametrize(("tokens", "chunks"), [(3, 1), (64, 1), (65, 2)])
def test_what_is_kept_beside_the_inputs_is_linear_in_the_chunks(
    rule_op, tokens, chunks, dtype, decays, device
):
    """fp32 has decays in two parts."""
    leaves = [x.requires_grad_() for x in rule_op.draw(1, tokens, 2, 16, 32, dtype, device)]
    inputs = {x.data_ptr() for x in leaves}
    kept: list[int] = []

    def seen(x):
        kept.append(0 if x.data_ptr() in inputs else x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        rule_op.kernels(*leaves)
    assert sum(kept) == chunks * 2 * (64 * 64 + 16 * 32 + decays)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_kernels_reference_and_fake_save_the_same_decays(rule_op, dtype, device):
    tensors = rule_op.draw(1, 65, 2, 16, 16, dtype, device)
    tensors[3][:, 5::7] = -math.inf
    arguments = *tensors, None, 0.25
    op = torch.ops.fusewright_deltanet.gated_delta_rule.default
    torch.library.opcheck(op, arguments, test_utils="test_faketensor")
    *saved, decays = op(*arguments)
    *others, by_reference = reference.chunked_rule(*arguments)
    torch.testing.assert_close(decays, by_reference)
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in others]


def test_o_of_narrow_heads_is_contiguous(rule_op, backend, device):
    o, _ = rule_op.public(*rule_op.draw(1, 3, (1, 2), 2, 3, F32, device), backend=backend)
    assert o.is_contiguous()


def test_meta_tensors_get_the_shapes_of_shared_heads(rule_op):
    tensors = [x.to("meta") for x in rule_op.draw(2, 5, (3, 6), 4, 7)]
    o, state = rule_op.public(*tensors)
    assert o.shape == (2, 5, 6, 7)
    assert state.shape == (2, 6, 4, 7)
    assert o.is_meta
