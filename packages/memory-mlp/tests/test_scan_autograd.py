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
