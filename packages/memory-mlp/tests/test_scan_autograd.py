"""What autograd does with memory_scan, beyond what the suite asks of every operation."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit.conformance import same_bits

F32, BF16 = torch.float32, torch.bfloat16
# Rows, tokens, heads, D, hidden units: one chunk of one head.
SIZES = 1, 2, 1, 2, 3


@pytest.mark.parametrize("used", [slice(0, 1), slice(5, 6)], ids=["y", "momentum"])
def test_part_of_the_outputs_gives_part_of_the_gradients(scan_op, used, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = scan_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = scan_op.kernels(*leaves)[used]
    truth = torch.autograd.grad(sum(y.sum() for y in outputs), leaves)
    mixed = [
        leaf if place in (1, 3) else x
        for place, (leaf, x) in enumerate(zip(leaves, tensors, strict=True))
    ]
    outputs = scan_op.kernels(*mixed)[used]
    found = torch.autograd.grad(sum(y.sum() for y in outputs), (leaves[1], leaves[3]))
    assert same_bits(found, (truth[1], truth[3]))


def test_gates_of_another_dtype_get_gradients_in_it(scan_op, backend, device):
    *tensors, alpha, eta, theta = scan_op.draw(*SIZES, F32, device)
    gates = [x.to(BF16).requires_grad_() for x in (alpha, eta, theta)]
    outputs = scan_op.public(*tensors, *gates, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), gates)
    assert [g.dtype for g in grads] == [BF16] * 3


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_size_of_a_key_that_no_hidden_unit_sees_changes_no_bit(
    scan_op, activation, backend, device
):
    """Its products with what is not zero are finite, their squares are not."""
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device, rate=0.2)
    tensors[3] = tensors[3].abs()
    results = []
    for size in (2.0**20, 2.0**70, 2.0**120):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with torch.no_grad():
            leaves[1][0, 1] = -size
        found = scan_op.public(*leaves, activation=activation, backend=backend)
        grads = torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)
        results.append([*found, *grads])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
