"""What memory_scan computes: near to fp64, causal, the same however its tokens are cut or laid."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_scan
from fusewright.memory_mlp.common.weights import pack, unpack
from fusewright.memory_mlp.scan import reference, reference_packed
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

from .compared import assert_same_but_for_rounding

F32, F16, F64 = torch.float32, torch.float16, torch.float64
NAN = math.nan

# Rows, tokens, heads, D, hidden units, dtype, options.
CASES = {
    "T7-chunk4-D3-hidden5-float32-silu-after": (1, 7, 1, 3, 5, F32, dict(chunk=4)),
    "T1-chunk64-D5-hidden7-float32-gelu-before": (
        *(2, 1, 1, 5, 7, F32),
        dict(activation="gelu", read="before"),
    ),
    "T3-chunk1-D2-hidden3-float32-relu-after": (
        *(1, 3, 1, 2, 3, F32),
        dict(chunk=1, activation="relu"),
    ),
    "T40-chunk32-D20-hidden24-float16-silu-before": (
        *(1, 40, 1, 20, 24, F16),
        dict(chunk=32, read="before"),
    ),
    "T33-chunk64-heads2-D12-hidden17-float16-gelu-after": (
        *(1, 33, 2, 12, 17, F16),
        dict(activation="gelu"),
    ),
    "T17-chunk16-D1-hidden1-float32-relu-before": (
        *(1, 17, 1, 1, 1, F32),
        dict(chunk=16, activation="relu", read="before"),
    ),
}


def everything(op, leaves, **options):
    """Outputs, and the gradients of a sum in which they weigh differently."""
    outputs = op.public(*leaves, **options)
    total = sum((y.float() * (1 + place)).sin().sum() for place, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(total, leaves)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(scan_op, name, device):
    *sizes, dtype, options = CASES[name]
    scan_op.having(**options).check(scan_op.draw(*sizes, dtype, device))


@pytest.mark.parametrize("read", ["after", "before"])
def test_gates_of_exactly_zero_and_one_are_as_near_to_fp64_as_torch(scan_op, read, device):
    """A memory that is forgotten, a momentum that is dropped, one that is kept, no step at all."""
    *tensors, alpha, eta, theta = scan_op.draw(1, 6, 1, 3, 5, F32, device)
    for gate, numbers in (
        (alpha, [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
        (eta, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]),
        (theta, [0.0, 0.1, 0.0, 0.1, 0.0, 0.1]),
    ):
        gate.copy_(torch.tensor(numbers, device=device).view(1, 6, 1))
    scan_op.having(chunk=4, read=read).check([*tensors, alpha, eta, theta])


def test_gates_out_of_range_are_as_near_to_fp64_as_torch(scan_op, backend, device):
    """The recurrence holds for any number: nothing is clamped, forward or backward."""

    def recurrence(*tensors):
        y, weights, momentum, *_ = reference.memory_scan_by_token(*by_heads(tensors), chunk=2)
        return y.transpose(1, 2), *weights, *momentum

    *tensors, _, _, _ = scan_op.draw(1, 3, 1, 3, 5, F32, device)
    outside = [-0.5, 1.5, 2.0], [-1.5, 1.25, -0.5], [-0.1, 1.5, -0.2]
    gates = [torch.tensor(numbers, device=device).view(1, 3, 1) for numbers in outside]
    yardstick = Yardstick(recurrence, [*tensors, *gates])
    yardstick.check(lambda *tensors: scan_op.public(*tensors, chunk=2, backend=backend))


def masked_out(tensors, mask, strange=NAN):
    """The inputs with strange keys, values and gates where nothing is written."""
    q, k, v, *state, alpha, eta, theta = tensors
    held = ~(mask.unsqueeze(-1).expand(alpha.shape) if mask.ndim == 2 else mask)
    k, v = (x.masked_fill(held.unsqueeze(-1), strange) for x in (k, v))
    return [q, k, v, *state, *(x.masked_fill(held, strange) for x in (alpha, eta, theta))]


MASKS = {
    "by-token": [[[True, False, True, False, False]]],
    "by-head": [[[True, False, True, False, False], [False, False, False, True, True]]],
}


def mask_of(name, device):
    """``[B, T]`` or ``[B, T, heads]``."""
    mask = torch.tensor(MASKS[name], device=device).mT
    return mask.squeeze(-1) if name == "by-token" else mask


@pytest.mark.parametrize(("name", "read"), [("by-token", "after"), ("by-head", "before")])
def test_unwritten_tokens_may_be_nan_and_have_gradients_of_zero(scan_op, name, read, device):
    mask = mask_of(name, device)
    op = scan_op.having(chunk=3, read=read, write_mask=mask)
    heads = 1 if mask.ndim == 2 else mask.shape[-1]
    op.check(masked_out(scan_op.draw(1, 5, heads, 3, 5, F32, device), mask))


def test_unwritten_token_leaves_the_memory_and_is_read(scan_op, backend, device):
    """Three tokens of which the middle is not written are two, and its query reads the first's."""
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device)
    mask = torch.tensor([[True, False, True]], device=device)
    y, *end = scan_op.public(*tensors, write_mask=mask, backend=backend)
    q, k, v, *state, alpha, eta, theta = tensors
    two = [x[:, [0, 2]] for x in (q, k, v)], [x[:, [0, 2]] for x in (alpha, eta, theta)]
    _, *expected = scan_op.public(*two[0], *state, *two[1], backend=backend)
    for found, truth in zip(end, expected, strict=True):
        torch.testing.assert_close(found, truth)
    start = state[:4], state[4:]
    once = memory_scan(
        q[:, :1],
        k[:, :1],
        v[:, :1],
        *(MemoryWeights(*half) for half in start),
        *(x[:, :1] for x in (alpha, eta, theta)),
        backend=backend,
    )
    read = reference.memory_read(q[:, 1].transpose(0, 1), once.weights)
    torch.testing.assert_close(y[:, 1], read.transpose(0, 1).squeeze(0))


def test_start_that_rows_share_gets_the_sum_of_their_gradients(scan_op, device):
    tensors = scan_op.draw(2, 3, 1, 3, 5, F32, device)
    shared = [x[0] for x in tensors[3:11]]
    scan_op.having(chunk=2).check([*tensors[:3], *shared, *tensors[11:]])


def test_operands_of_any_strides_give_the_bits_of_contiguous_ones(scan_op, device):
    """Slices of one projection are read where they lie, columns apart are not."""
    q, k, v, *others = scan_op.draw(1, 3, 2, 4, 5, F32, device)
    leaves = [x.requires_grad_() for x in (q, k, v, *others)]
    expected = everything(scan_op, leaves, backend="triton")
    joint = torch.cat([q, k, v], 2).detach()
    q, k, v = joint.split(2, 2)
    v = v.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    turned = [x.detach().mT.contiguous().mT if x.ndim == 4 else x.detach() for x in others[:8]]
    gates = [x.detach().mT.contiguous().mT for x in others[8:]]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *turned, *gates)]
    assert same_bits(everything(scan_op, leaves, backend="triton"), expected)


@pytest.mark.parametrize("sizes", [(2, 0, 3, 4, 5), (0, 3, 2, 4, 5), (2, 3, 0, 4, 5)])
def test_without_tokens_the_memory_stays_and_without_rows_all_is_empty(
    scan_op, sizes, backend, device
):
    leaves = [x.requires_grad_() for x in scan_op.draw(*sizes, F32, device)]
    y, *end = scan_op.public(*leaves, backend=backend)
    assert y.shape == leaves[0].shape
    assert same_bits(end, leaves[3:11])
    upstream = [torch.ones_like(x) for x in (y, *end)]
    grads = torch.autograd.grad([y, *end], leaves, upstream, materialize_grads=True)
    for x, g in zip(leaves[3:11], grads[3:11], strict=True):
        assert torch.equal(g, torch.ones_like(x))
    assert all(g.shape == x.shape for g, x in zip(grads, leaves, strict=True))


def by_heads(tensors):
    """Inputs of the op as the plain functions take them: heads before tokens."""
    q, k, v, *state, alpha, eta, theta = tensors
    rows = (x.transpose(1, 2) for x in (q, k, v))
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    return *rows, *halves, *(x.mT for x in (alpha, eta, theta))


def flat(y, weights, momentum, skipped, loss):
    return [y, *weights, *momentum, *([] if skipped is None else [skipped]), loss]


@pytest.mark.sampled
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_chunks_of_products_are_the_recurrence_token_by_token(scan_op, activation, chunk, read):
    """In fp64, values and gradients; with and without a mask, gates of 0 and 1 among
    them.
    """
    for masked in (False, True):
        tensors = scan_op.draw(2, 11, 3, 3, 5, F64, rate=0.2)
        for gate in tensors[-3:-1]:
            gate[0, ::3], gate[1, 1::4] = 0.0, 1.0
        mask = torch.rand(2, 11, 3) < 0.6 if masked else None
        if masked:
            tensors = masked_out(tensors, mask)
        leaves = [x.requires_grad_() for x in tensors]
        options = dict(chunk=chunk, activation=activation, read=read)
        written = mask.mT if masked else None
        both = []
        for scan in (reference.memory_scan, reference.memory_scan_by_token):
            outputs = flat(*scan(*by_heads(leaves), written, **options))
            total = sum(y.sin().sum() for y in outputs)
            both.append([*outputs, *torch.autograd.grad(total, leaves)])
        assert_same_but_for_rounding(*both)


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("masked", [False, True], ids=["written", "masked"])
def test_backward_pass_chunk_by_chunk_is_autograds(scan_op, masked, read):
    tensors = scan_op.draw(2, 7, 2, 3, 5, F64, rate=0.2)
    mask = torch.rand(2, 7, 2) < 0.6 if masked else None
    if masked:
        tensors = masked_out(tensors, mask)
    q, k, v, *state, alpha, eta, theta = tensors
    packed = pack(MemoryWeights(*state[:4]), MemoryWeights(*state[4:]))
    assert same_bits([x for half in unpack(packed, 5, 3) for x in half], state)
    leaves = [x.requires_grad_() for x in (q, k, v, packed, alpha, eta, theta)]
    resets = torch.tensor([[True, False, True], [False, True, False]]) if masked else None
    options = mask, None, resets, 5, 3, "silu", read, False
    y, end, *_ = reference_packed.packed_scan(*leaves, *options)
    dy, dend = torch.randn_like(y), torch.randn_like(end)
    truth = torch.autograd.grad((y, end), leaves, (dy, dend))
    detached = [x.detach() for x in leaves]
    assert_same_but_for_rounding(
        reference_packed.packed_scan_backward(dy, dend, *detached, *options)[:-1], truth
    )


def test_backward_pass_in_parts_gives_the_bits_of_the_whole(scan_op, parts_of_a_chunk, device):
    options = dict(chunk=4, backend="triton")
    leaves = [x.requires_grad_() for x in scan_op.draw(2, 10, 2, 3, 5, F32, device)]
    expected = everything(scan_op, leaves, **options)
    parts_of_a_chunk()
    assert same_bits(everything(scan_op, leaves, **options), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("token", [2, 4])
@pytest.mark.parametrize("read", ["after", "before"])
def test_future_token_changes_no_past_output(scan_op, read, token, backend, device):
    """To the bit; nor with "before" does its own key, value or gate."""
    options = dict(chunk=4, read=read, backend=backend)
    q, k, v, *state, alpha, eta, theta = tensors = scan_op.draw(1, 6, 1, 3, 5, F32, device)
    y, *_ = scan_op.public(*tensors, **options)
    for x in (k, v, alpha, eta, theta):
        x[:, token] += 0.25
    changed, *_ = scan_op.public(q, k, v, *state, alpha, eta, theta, **options)
    last = token + (read == "before")
    assert torch.equal(changed[:, :last], y[:, :last])
    assert (changed[:, last:] != y[:, last:]).flatten(2).any(-1).all()


@pytest.mark.parametrize("read", ["after", "before"])
def test_tokens_cut_at_a_chunks_end_give_the_bits_of_the_whole(scan_op, read, backend, device):
    op = scan_op.having(chunk=2, read=read)
    q, k, v, *state, alpha, eta, theta = tensors = scan_op.draw(1, 5, 1, 3, 5, F32, device)
    y, *end = op.public(*tensors, backend=backend)
    ys = []
    for part in (slice(0, 2), slice(2, 5)):
        rows = (x[:, part] for x in (q, k, v))
        gates = (x[:, part] for x in (alpha, eta, theta))
        found, *state = op.public(*rows, *state, *gates, backend=backend)
        ys.append(found)
    assert same_bits([torch.cat(ys, 1), *state], [y, *end])


# What is poisoned, by its place among the inputs.
STRANGE = {"key": [1], "gates": [11, 12, 13]}


@pytest.mark.sampled
@pytest.mark.parametrize("name", STRANGE)
def test_strange_token_stays_in_its_row_and_head(scan_op, name, backend, device):
    """Outputs and gradients of the others keep their bits."""
    leaves = [x.requires_grad_() for x in scan_op.draw(2, 2, 2, 3, 5, F32, device)]
    expected = everything(scan_op, leaves, backend=backend)
    poisoned = [x.detach().clone() for x in leaves]
    for place in STRANGE[name]:
        poisoned[place][1, 0, 0] = NAN
    found = everything(scan_op, [x.requires_grad_() for x in poisoned], backend=backend)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        # y, the tokens' inputs and their gradients have heads on the third axis, memories on the
        # second.
        tokens = place in (0, 9, 10, 11, 20, 21, 22)
        both = [z.transpose(1, 2) if tokens else z for z in (x, truth)]
        assert torch.equal(both[0][0], both[1][0])
        assert torch.equal(both[0][1, 1], both[1][1, 1])
        assert not both[0][1, 0].isfinite().all() or place > 8


@pytest.mark.parametrize(("tokens", "chunk"), [(3, 2), (6, 2), (6, 4)])
def test_what_is_kept_beside_the_inputs_is_a_state_for_every_chunk(scan_op, tokens, chunk, device):
    leaves = [x.requires_grad_() for x in scan_op.draw(1, tokens, 2, 3, 5, F32, device)]
    inputs = {x.data_ptr() for x in leaves}
    kept: list[int] = []

    def seen(x):
        kept.append(0 if x.data_ptr() in inputs else x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        scan_op.public(*leaves, chunk=chunk, backend="triton")
    # And one more: the start, packed.
    states = 1 + math.ceil(tokens / chunk)
    assert sum(kept) == states * sum(x.numel() for x in leaves[3:11])
