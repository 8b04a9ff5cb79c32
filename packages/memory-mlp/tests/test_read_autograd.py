"""What autograd does with memory_read, beyond what the suite asks of every operation."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_read, memory_scan
from fusewright.memory_mlp.common.weights import pack, pack_weights, unpack
from fusewright.memory_mlp.read import launch
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.conformance import same_bits

F32 = torch.float32
# Rows, tokens, heads, D, hidden units.
SIZES = 1, 2, 2, 2, 3
OPS = torch.ops.fusewright_memory_mlp
OPTIONS = 3, "silu"


def packed(tensors, halves=2):
    """The inputs as the registered op takes them."""
    q, *weights = tensors
    half = MemoryWeights(*weights)
    return q, pack_weights(half) if halves == 1 else pack(half, half)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_registered_backward_op_passes_opcheck(read_op, wanted, device):
    q, state = packed(read_op.draw(*SIZES, F32, device))
    leaves = [x.detach().requires_grad_() for x in (torch.randn_like(q), q, state)]
    torch.library.opcheck(
        OPS.memory_read_backward.default,
        (*leaves, *OPTIONS, *wanted),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("frozen", ["q", "weights"])
def test_second_derivative_is_right_where_one_of_both_is_constant(read_op, frozen, device):
    tensors = read_op.draw(1, 3, 1, 2, 3, F32, device)
    constants, leaves = (tensors[:1], tensors[1:]) if frozen == "q" else (tensors[1:], tensors[:1])

    def slopes_of(op):
        def part(*leaves):
            return op(*constants, *leaves) if frozen == "q" else op(*leaves, *constants)

        return transforms.slopes_to_differentiate(part)

    upstream = [torch.randn_like(x) for x in leaves]
    yardstick = Yardstick(slopes_of(read_op.reference), leaves, upstream)
    yardstick.check(slopes_of(read_op.kernels))


@pytest.mark.parametrize("frozen", ["q", "weights"])
def test_what_asks_for_no_gradient_costs_none_and_changes_nothing(
    read_op, frozen, device, monkeypatch
):
    tensors = read_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    (y,) = read_op.kernels(*leaves)
    truth = torch.autograd.grad(y.sum(), leaves)
    asks = [(place == 0) == (frozen == "weights") for place in range(5)]
    for leaf, ask in zip(leaves, asks, strict=True):
        leaf.requires_grad_(ask)
    read_backward, seen = launch.read_backward, []

    def spy(*arguments):
        seen.append(arguments[-2:])
        return read_backward(*arguments)

    monkeypatch.setattr(launch, "read_backward", spy)
    (y,) = read_op.kernels(*leaves)
    wanted = [x for x, ask in zip(leaves, asks, strict=True) if ask]
    found = torch.autograd.grad(y.sum(), wanted)
    assert same_bits(found, [g for g, ask in zip(truth, asks, strict=True) if ask])
    assert seen == [(frozen == "weights", frozen == "q")]


def test_gradients_of_a_scan_and_of_a_read_of_the_same_state_add_up(scan_op, backend, device):
    """To the bit as where the read has tensors of its own."""
    q, k, v, *others = scan_op.draw(1, 3, 1, 2, 3, F32, device)
    leaves = [x.requires_grad_() for x in others[:8]]
    state = MemoryWeights(*leaves[:4]), MemoryWeights(*leaves[4:])
    found = []
    for copied in (False, True):
        first = memory_scan(q, k, v, *state, *others[8:], backend=backend)
        weights = first.weights.map(torch.clone) if copied else first.weights
        y = memory_read(q, weights, backend=backend)
        second = memory_scan(q, k, v, *first[1:3], *others[8:], backend=backend)
        found.append([y, *torch.autograd.grad(y.sin().sum() + second.y.sin().sum(), leaves)])
    assert same_bits(*found)


@pytest.mark.parametrize("place", [0, 1])
def test_input_changed_after_the_forward_pass_is_noticed(read_op, place, device):
    tensors = read_op.draw(*SIZES, F32, device)
    q, state = tensors[0].requires_grad_(), packed(tensors)[1].detach().requires_grad_()
    own = state * 1.0
    y = memory_read(q, unpack(own, 3, 2)[0], backend="triton")
    with torch.no_grad():
        (q, own)[place].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
