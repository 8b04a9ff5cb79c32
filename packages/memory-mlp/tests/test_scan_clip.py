"""memory_scan with max_grad_norm: one token changes the memory by no more than the clip allows, and
a chunk after which the memory is not finite changes nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, NeuralMemory, memory_scan
from fusewright.memory_mlp.common.weights import pack, pack_weights
from fusewright.memory_mlp.scan import reference, reference_packed
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan
from fusewright_testkit.conformance import same_bits

from .compared import assert_same_but_for_rounding
from .test_neural_memory_layers import (
    deep_weights,
    each_memory,
    gates,
    output,
    rows,
)

F32, F16, F64 = torch.float32, torch.float16, torch.float64
NAN = math.nan


def recurrence(q, k, v, weights, momentum, alpha, eta, theta, written, limit, *, chunk, read):
    """Token by token, the gradients by autograd, each clipped by its norm; and those norms."""
    reads, norms, anchor = [], [], weights
    for t in range(q.shape[1]):
        anchor = weights if t % chunk == 0 else anchor
        if read == "before":
            reads.append(output(q[:, t : t + 1].transpose(1, 2), weights, "gelu"))
        loss = (
            output(k[:, t : t + 1].transpose(1, 2), anchor, "gelu")
            - v[:, t : t + 1].transpose(1, 2)
        ).square()
        gradient = torch.autograd.grad(loss.sum(), anchor, create_graph=True)
        norm = torch.cat([g.flatten(2) for g in gradient], -1).square().sum(-1).sqrt()
        norms.append(norm.detach())
        rho = torch.where(norm > limit, limit / norm, 1.0)
        step = torch.where(written[:, t], theta[:, t] * rho, 0.0)
        fades = torch.where(written[:, t], eta[:, t], 1.0)
        keeps = torch.where(written[:, t], 1.0 - alpha[:, t], 1.0)
        momentum = [
            each_memory(fades, s) * s - each_memory(step, g) * g
            for s, g in zip(momentum, gradient, strict=True)
        ]
        weights = [
            each_memory(keeps, w) * w + each_memory(written[:, t], w) * s
            for w, s in zip(weights, momentum, strict=True)
        ]
        if read == "after":
            reads.append(output(q[:, t : t + 1].transpose(1, 2), weights, "gelu"))
    return [torch.cat(reads, 2).transpose(1, 2), *weights, *momentum], torch.stack(norms, 1)


@pytest.mark.parametrize(
    ("layers", "read"), [(1, "after"), (2, "before"), (2, "after"), (3, "before")]
)
def test_values_and_gradients_are_those_of_autograds_clipped_gradients(layers, read, device):
    """With a limit amid the norms, and just below and just above the norm of one token."""
    weights, momentum = deep_weights(layers, device), deep_weights(layers, device)
    q, k, v = (rows(device, tokens=5) for _ in range(3))
    each = gates(device, *q.shape[:3])
    written = torch.ones(q.shape[:3], dtype=torch.bool, device=device)
    written[0, 2] = False
    tensors = [x.requires_grad_() for x in (q, k, v, *weights, *momentum, *each)]
    count = len(weights)
    state = tuple(tensors[3 : 3 + count]), tuple(tensors[3 + count : 3 + 2 * count])
    given = *tensors[:3], *state, *tensors[-3:], written
    options = {"chunk": 2, "read": read}
    norms = recurrence(*given, math.inf, **options)[1]
    edge = norms[1, 1, 2].item()
    counts = []
    for limit in (norms.quantile(0.5).item(), edge * (1.0 - 1e-9), edge * (1.0 + 1e-9)):
        y, *ends, skipped, _ = deep_memory_scan(
            *given, **options, activation="gelu", max_grad_norm=limit
        )
        found = [y, *ends[0], *ends[1]]
        truth, norms = recurrence(*given, limit, **options)
        counts.append((norms > limit).sum().item())
        assert 0 < counts[-1] < norms.numel()
        assert not skipped.any()
        dy = [torch.randn_like(x) for x in found]
        gradients = [torch.autograd.grad(out, tensors, dy) for out in (found, truth)]
        assert_same_but_for_rounding([*found, *gradients[0]], [*truth, *gradients[1]])
    assert counts[1] == counts[2] + 1


@pytest.mark.parametrize("read", ["after", "before"])
def test_chunks_of_products_are_the_recurrence_token_by_token(scan_op, read):
    """Values and gradients; one token's gradient is not finite, nor is one memory's second
    chunk.
    """
    tensors = scan_op.draw(2, 7, 2, 3, 5, F64, rate=0.2)
    tensors[2][0, 1, 1] = 1e308
    tensors[-1][1, 4, 0] = NAN
    written = torch.rand(2, 2, 7) < 0.8
    written[1, 0, 4] = written[0, 1, 1] = True
    q, k, v, *state, alpha, eta, theta = [x.requires_grad_() for x in tensors]
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    by_heads = (
        *(x.transpose(1, 2) for x in (q, k, v)),
        *halves,
        *(x.mT for x in (alpha, eta, theta)),
    )
    both = []
    for scan in (reference.memory_scan, reference.memory_scan_by_token):
        y, *ends, skipped, loss = scan(*by_heads, written, chunk=3, read=read, max_grad_norm=0.5)
        outputs = [x for end in ends for x in end]
        total = sum(x[0].sin().sum() for x in (y, *outputs))
        leaves = [q, k, v, *state, alpha, eta, theta]
        grads = [g[0] for g in torch.autograd.grad(total, leaves)]
        # What a chunk that is not taken reads may be NaN, to its first token in matrix products.
        both.append([y[0], y[1, 1], y[1, 0, :3], y[1, 0, 6:], *outputs, skipped, *grads, loss[0]])
    assert both[0][12].tolist() == [[0, 1], [written[1, 0, 3:6].sum().item(), 0]]
    assert_same_but_for_rounding(*both)


def clipped(op, tensors, limit=0.5, **options):
    """(y, the state's eight tensors, skipped)."""
    q, k, v, *state, alpha, eta, theta = tensors
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    options = {"chunk": 3, "max_grad_norm": limit} | op.options | options
    done = memory_scan(q, k, v, *halves, alpha, eta, theta, **options)
    return [done.y, *done.weights, *done.momentum], done.skipped


def on_each(*values):
    """All of them by the reference, the first by the kernels too, which the interpreter runs."""
    return [("triton", values[0]), *(("reference", value) for value in values)]


# Rows, tokens, heads, D, hidden units, dtype, options. A program takes 32 or 64 hidden units.
CASES = {
    "T5-chunk4-D3-hidden5-float32-silu-after": (1, 5, 1, 3, 5, F32, dict(chunk=4)),
    "T5-chunk2-D2-hidden70-float32-gelu-before": (
        *(1, 5, 1, 2, 70, F32),
        dict(chunk=2, activation="gelu", read="before"),
    ),
    "T34-chunk32-heads3-D12-hidden17-float16-relu-after": (
        *(2, 34, 3, 12, 17, F16),
        dict(chunk=32, activation="relu"),
    ),
}


def amid(op, tensors):
    """A limit that about half of the tokens' norms are above, far from any of them."""
    q, k, v, *others = (x.double() for x in tensors)
    state, (alpha, eta, theta), rest = others[:8], others[8:11], others[11:]
    packed = pack(MemoryWeights(*state[:4]), MemoryWeights(*state[4:]))
    resting = pack_weights(MemoryWeights(*rest)) if rest else None
    options = {"chunk": 64, "activation": "silu", "read": "after"} | op.options
    form = (options[name] for name in ("chunk", "activation", "read"))
    given = None, resting, None, state[1].shape[-1], *form, op.options.get("residual_norm", False)
    operands = q, k, v, packed, alpha, eta, theta, *given
    norms = 1e-9 / reference_packed.packed_clipped_scan(*operands, 1e-9)[4].flatten()
    some = norms.sort().values[len(norms) // 3 : len(norms) * 2 // 3 + 1]
    widest = (some[1:] / some[:-1]).argmax()
    limit = some[widest : widest + 2].prod().sqrt().item()

    def share_above(limit):
        factors = reference_packed.packed_clipped_scan(*operands, limit)[4]
        return (factors < 1.0).double().mean()

    # Those of later chunks depend on it: they are lower where the memory learns.
    while share_above(limit) <= 0.2:
        limit *= 0.9
    assert share_above(limit) < 0.8
    return limit


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(scan_op, name, device):
    *sizes, dtype, options = CASES[name]
    op = scan_op.having(**options)
    tensors = op.draw(*sizes, dtype, device)
    if "relu" in name:
        # Far from the kink, beside which rounding alone decides between two slopes.
        b1 = tensors[4]
        b1 += 4.0 * b1.sign()
    op.having(max_grad_norm=amid(op, tensors)).check(tensors)


@pytest.mark.parametrize(("backend", "size"), on_each(1e12, -1e30))
def test_outlier_moves_the_memory_by_no_more_than_the_clip(scan_op, size, backend, device):
    """Nor what its row's other head and other rows keep by a bit, and gradients stay finite."""
    tensors = scan_op.draw(2, 2, 2, 3, 5, F32, device, rate=0.2)
    truth, _ = clipped(scan_op, tensors, backend=backend)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.no_grad():
        leaves[2][1, 1, 0] = size
    found, skipped = clipped(scan_op, leaves, backend=backend)
    assert not skipped.any()
    gamma = reference.decays_of(*(x[1, :, 0] for x in tensors[-3:])).gamma[-1, 1]
    moved = torch.cat(
        [(x - y)[1, 0].flatten() for x, y in zip(found[1:5], truth[1:5], strict=True)]
    )
    assert 0.0 < moved.norm() <= 1.001 * 2 * 0.5 * gamma
    assert same_bits([x[0] for x in found], [x[0] for x in truth])
    assert same_bits([found[0][1, :, 1]], [truth[0][1, :, 1]])
    assert same_bits([x[1, 1] for x in found[1:]], [x[1, 1] for x in truth[1:]])
    assert torch.equal(found[0][1, :1], truth[0][1, :1])
    grads = torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(("backend", "size"), on_each(2.0**60, 2.0**80))
def test_size_of_an_outlier_changes_no_bit(scan_op, size, backend, device):
    """Of gradients neither: a clipped gradient keeps its direction. M(k) is lost in rounding."""
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device, rate=0.2)
    results = []
    for factor in (2.0**40, 2.0**40 * size):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with torch.no_grad():
            leaves[2][0, 1] *= factor
        found, skipped = clipped(scan_op, leaves, backend=backend)
        assert not skipped.any()
        grads = torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)
        results.append([*found, *grads[:2], *grads[3:]])
    assert same_bits(*results)


@pytest.mark.parametrize(("backend", "size"), on_each(2.0**50, 2.0**90))
def test_size_of_a_key_that_no_hidden_unit_sees_changes_no_bit(scan_op, size, backend, device):
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device, rate=0.2)
    tensors[3] = tensors[3].abs()
    results = []
    for factor in (2.0**20, 2.0**20 * size):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with torch.no_grad():
            leaves[1][0, 1] = -factor
        found, skipped = clipped(scan_op, leaves, activation="relu", backend=backend)
        assert not skipped.any()
        grads = torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)
        results.append([*found, *grads])
    assert same_bits(*results)


@pytest.mark.parametrize(("backend", "strange"), on_each(3e38, math.inf, NAN))
def test_token_without_a_finite_gradient_writes_nothing_and_is_counted(
    scan_op, strange, backend, device
):
    """All is as if its theta were zero, gradients of the other tokens included."""
    read = "after" if strange == math.inf else "before"
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device, rate=0.2)
    results = []
    for place, number in ((1 if strange != strange else 2, strange), (13, 0.0)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with torch.no_grad():
            leaves[place][0, 1, 0] = number
        outputs, skipped = clipped(scan_op, leaves, read=read, chunk=2, backend=backend)
        grads = torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)
        assert skipped.tolist() == [[int(place != 13)]]
        assert place == 13 or not any(g[0, 1].any() for g in (*grads[1:3], grads[13]))
        # Its own theta's gradient is that of a token that was read.
        results.append([*outputs, *grads[:13], grads[13][:, 2:]])
    assert same_bits(*results)


@pytest.mark.parametrize(("backend", "name"), on_each("alpha", "eta", "theta"))
def test_chunk_that_would_poison_the_memory_leaves_it_and_is_counted(
    scan_op, name, backend, device
):
    """All that follows is as if its tokens were not written, and so are gradients, of which those
    through it are zero.
    """
    tensors = scan_op.draw(1, 3, 1, 3, 33, F32, device, rate=0.2)
    tensors[["alpha", "eta", "theta"].index(name) + 11][0, 1, 0] = math.inf
    mask = torch.tensor([[False, False, True]], device=device)
    results = []
    for options in ({}, {"write_mask": mask}):
        leaves = [x.clone().requires_grad_() for x in tensors]
        outputs, skipped = clipped(scan_op, leaves, **options, chunk=2, backend=backend)
        assert skipped.tolist() == ([[0]] if options else [[2]])
        # The memory that the chunk's own tokens read is what they have written.
        y = outputs[0]
        assert bool(options) == bool(y.isfinite().all())
        outputs[0] = y[:, 2:]
        total = sum(x.sin().sum() for x in outputs)
        grads = torch.autograd.grad(total, leaves)
        results.append([*outputs, *grads])
    assert same_bits(*results)
    assert not any(g[:, :2].any() for g in (*grads[:3], *grads[11:]))


def test_token_that_overflows_changes_no_earlier_output(scan_op, backend, device):
    tensors = scan_op.draw(1, 3, 1, 3, 5, F32, device)
    y = clipped(scan_op, tensors, backend=backend)[0][0]
    tensors[2][0, 2] = 3e38
    assert torch.equal(clipped(scan_op, tensors, backend=backend)[0][0][:, :2], y[:, :2])


def test_limit_that_no_token_reaches_changes_nothing(scan_op, device):
    tensors = scan_op.draw(1, 5, 2, 3, 5, F64, device)
    found, skipped = clipped(scan_op, tensors, 1e30, backend="reference")
    assert not skipped.any()
    assert_same_but_for_rounding(found, scan_op.public(*tensors, chunk=3, backend="reference"))


def test_tokens_cut_at_a_chunks_end_give_the_bits_and_the_count_of_the_whole(
    scan_op, backend, device
):
    q, k, v, *state, alpha, eta, theta = tensors = scan_op.draw(2, 6, 1, 3, 5, F32, device)
    v[0, 1], theta[1, 4] = 3e38, math.inf
    whole, count = clipped(scan_op, tensors, backend=backend)
    ys, counts = [], []
    for part in (slice(0, 3), slice(3, 6)):
        own = (x[:, part] for x in (q, k, v)), (x[:, part] for x in (alpha, eta, theta))
        (y, *state), lost = clipped(scan_op, [*own[0], *state, *own[1]], backend=backend)
        ys.append(y)
        counts.append(lost)
    found = [torch.cat(ys, 1), *state]
    assert all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, whole, strict=True)
    )
    assert sum(counts).tolist() == count.tolist() == [[1], [3]]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("reduction", ["sum", "mean_feature"])
def test_layer_forgets_an_outlier_and_goes_on(layers, reduction, device):
    """A token a million million times as large as the others is all that a row without the clip
    remembers.
    """
    torch.manual_seed(3)
    sizes = {"heads": 2, "chunk": 4, "layers": layers, "reduction": reduction, "device": device}
    x = torch.randn(2, 16, 12, device=device)
    outlier = x.clone()
    outlier[0, 5] *= 1e12
    norms = {}
    for limit in (None, 1.0):
        torch.manual_seed(4)
        memory = NeuralMemory(12, **sizes, max_grad_norm=limit)
        truth = memory(x)[1].weight_norm()
        y, state, stats = memory(outlier)
        # The convolution's taps reach three tokens beyond it.
        assert torch.equal(memory(x)[0][1], y[1])
        assert not stats.skipped.any()
        norms[limit] = (state.weight_norm() / truth)[0]
        first, state, _ = memory(outlier[:, :7])
        later, state, _ = memory(outlier[:, 7:], state)
        if limit is not None:
            torch.testing.assert_close(torch.cat((first, later), 1), y)
    assert not norms[None].max() < 1e6
    assert norms[1.0].max() < 2.0


def test_layer_counts_what_its_memory_lost(memory_of, device):
    """Once the chunk is complete, wherever calls cut it."""
    memory = memory_of(max_grad_norm=0.5, convolution=0, dtype=F32)
    x = torch.randn(2, 15, memory.dim, device=device)
    with torch.no_grad():
        memory.projections.joint.weight[-1, 0] = 2.5e37
    x[:, :, 0] = 0.0
    x[0, 3, 0] = x[0, 13, 0] = 10.0
    whole, parts = memory(x)[1:], memory.init_state(2)
    counts = []
    for part in x.split(5, 1):
        _, parts, stats = memory(part, parts)
        counts.append(stats.skipped[0, 1].item())
    assert whole[0].skipped.tolist() == parts.skipped.tolist() == [[0, 1], [0, 0]]
    assert counts == [0, 1, 0]
    assert all(w.isfinite().all() for w in (*parts.weights, *parts.momentum))
