"""What autograd does before and behind the memory, beyond what the suite asks; registration."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import transforms
from fusewright_testkit.conformance import same_bits
from fusewright_testkit.transforms import hold

F32 = torch.float32
OPS = torch.ops.fusewright_memory_mlp
# Rows, tokens, D.
SIZES = 1, 3, 2
OPTIONS = 2, "l2", 0.25, None


def test_registered_op_passes_opcheck(input_op, device):
    leaves = [x.requires_grad_() for x in input_op.draw(*SIZES, F32, device)]
    present = torch.tensor([[True, False, True]], device=device)
    torch.library.opcheck(OPS.memory_input.default, (*leaves, present, *OPTIONS))


@pytest.mark.parametrize("used", ["all", "keys", "history"])
def test_registered_backward_op_passes_opcheck(input_op, used, device):
    tensors = input_op.draw(*SIZES, F32, device)
    outputs = input_op.kernels(*tensors)
    wanted = {"all": range(7), "keys": [1], "history": [6]}[used]
    upstream = [torch.randn_like(y) if place in wanted else None for place, y in enumerate(outputs)]
    leaves = [None if x is None else x.requires_grad_() for x in (*tensors, *upstream)]
    torch.library.opcheck(
        OPS.memory_input_backward.default,
        (*leaves, *OPTIONS),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_registered_ops_on_tokens_pass_opcheck(device):
    x = torch.randn(2, 3, 5, device=device, requires_grad=True)
    mask = torch.rand(2, 3, device=device) < 0.5
    kept = torch.rand(2, 3, 2, device=device) < 0.5
    for given in (mask, None):
        torch.library.opcheck(OPS.finite_tokens.default, (x, given))
        torch.library.opcheck(OPS.kept_tokens.default, (x, kept, given, 2.0))


def test_registered_ops_on_gated_tokens_pass_opcheck(gated_op, device):
    leaves = [x.requires_grad_() for x in gated_op.draw(2, 3, 5, 4, F32, device)]
    mask = torch.rand(2, 3, device=device) < 0.5
    for given in (mask, None):
        torch.library.opcheck(OPS.gated_tokens.default, (*leaves, given))
    y, present, logits = OPS.gated_tokens(*leaves, None)
    y, dlogits = (x.detach().requires_grad_() for x in (y, logits))
    for dy in (torch.randn_like(y).requires_grad_(), None):
        torch.library.opcheck(
            OPS.gated_tokens_backward.default,
            (y, present, leaves[1], dy, dlogits),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_registered_op_that_counts_tokens_passes_opcheck(device):
    written = torch.rand(2, 3, 4, device=device) < 0.5
    counters = torch.randint(9, (2, 4), device=device), torch.randint(9, (2,), device=device)
    torch.library.opcheck(OPS.count_tokens.default, (written, *counters, None, None))
    mask = torch.rand(2, 3, device=device) < 0.5
    torch.library.opcheck(OPS.count_tokens.default, (written, *counters, mask, counters[0]))


@pytest.mark.sampled
@pytest.mark.parametrize("used", [slice(0, 1), slice(4, 5), slice(6, 7)], ids=["q", "eta", "last"])
def test_part_of_the_outputs_gives_part_of_the_gradients(input_op, used, backend, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = input_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]

    def gradients(inputs, asked):
        outputs = input_op.public(*inputs, backend=backend)[used]
        return torch.autograd.grad(
            sum((y * transforms.ramp(y)).sum() for y in outputs), asked, materialize_grads=True
        )

    truth = gradients(leaves, leaves)
    mixed = [leaf if place in (0, 3) else tensors[place] for place, leaf in enumerate(leaves)]
    assert same_bits(gradients(mixed, [leaves[0], leaves[3]]), (truth[0], truth[3]))


def test_constant_theta_needs_no_gradient(input_op, backend, device):
    op = input_op.having(theta=0.1)
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, F32, device)]
    writes = op.whole(*leaves, backend=backend).writes
    assert not writes.theta.requires_grad
    assert writes.eta.requires_grad


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
def test_transform_is_right(input_op, gated_op, transform, device):
    """Of all inputs, of queries alone, and of tokens and their gates."""
    gated_op = gated_op.having(torch.tensor([[True, False, True]], device=device))
    hold(gated_op, gated_op.draw(1, 3, 4, 2, F32, device), transform)
    for op in (input_op, input_op.having(queries=True)):
        hold(op, op.draw(*SIZES, F32, device), transform)
