"""The memory itself: any number of layers, and reading it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from fusewright.memory_mlp import MemoryWeights, memory_read, memory_scan, memory_update
from fusewright.memory_mlp.read.memory_read import deep_memory_read
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan
from fusewright.memory_mlp.update.memory_update import deep_memory_update
from fusewright_testkit import Yardstick

from .compared import assert_same_but_for_rounding

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
BATCH, TOKENS, HEADS, WIDTH, HIDDEN = 2, 11, 3, 4, 6
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


def memory_weights(device, dtype=F64):
    shapes = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
    return MemoryWeights(
        *(0.4 * torch.randn(BATCH, HEADS, *s, device=device, dtype=dtype) for s in shapes)
    )


def rows(device, dtype=F64, tokens=TOKENS):
    return torch.randn(BATCH, tokens, HEADS, WIDTH, device=device).to(dtype)


def gates(device, *shape):
    return [low + 0.3 * torch.rand(shape, device=device, dtype=F64) for low in (0.0, 0.7, 0.0)]


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
@pytest.mark.parametrize("read", ["after", "before"])
def test_deep_scan_of_two_layers_is_the_scan(activation, read, device):
    weights, momentum = memory_weights(device), memory_weights(device)
    q, k, v = (rows(device) for _ in range(3))
    each = gates(device, BATCH, TOKENS, HEADS)
    written = torch.rand(BATCH, TOKENS, HEADS, device=device) > 0.2
    options = {"chunk": 4, "activation": activation, "read": read}
    y, *ends, _, _ = deep_memory_scan(q, k, v, weights, momentum, *each, written, **options)
    truth = memory_scan(q, k, v, weights, momentum, *each, written, **options, backend="reference")
    assert_same_but_for_rounding(
        (y, *ends[0], *ends[1]), (truth.y, *truth.weights, *truth.momentum)
    )


@pytest.mark.parametrize("reduction", ["sum", "mean_feature", "mean_all"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1, 1e3])
def test_deep_update_of_two_layers_is_the_update(reduction, max_grad_norm, device):
    weights, momentum = memory_weights(device), memory_weights(device)
    k, v = (rows(device).transpose(1, 2) for _ in range(2))
    v[0, 1, 3, 2] = torch.inf
    each = gates(device, BATCH, HEADS)
    row_weights = torch.rand(BATCH, HEADS, TOKENS, device=device, dtype=F64)
    options = {"activation": "gelu", "reduction": reduction, "max_grad_norm": max_grad_norm}
    tensors = k, v, weights, momentum, *each, row_weights
    update = deep_memory_update(*tensors, **options)
    truth = memory_update(*tensors, **options, backend="reference")
    assert_same_but_for_rounding(
        (*update.weights, *update.momentum, *update[2:4]),
        (*truth.weights, *truth.momentum, *truth[2:4]),
    )
    assert torch.equal(update.skipped, truth.skipped)
    assert update.skipped.sum() == 1


def deep_weights(layers, device):
    """(w1, b1, .., wn, bn) of each row and head."""
    weights = []
    for fan_in, fan_out in itertools.pairwise([WIDTH, *(HIDDEN,) * (layers - 1), WIDTH]):
        weights.append(0.4 * torch.randn(BATCH, HEADS, fan_out, fan_in, device=device, dtype=F64))
        weights.append(0.4 * torch.randn(BATCH, HEADS, fan_out, device=device, dtype=F64))
    return tuple(weights)


def output(x, weights, activation):
    """M(x) for x [B, heads, N, D], by torch's own activations."""
    for layer in range(0, len(weights), 2):
        x = ACTIVATIONS[activation](x) if layer else x
        x = torch.einsum("bhoi,bhni->bhno", weights[layer], x) + weights[layer + 1].unsqueeze(-2)
    return x


def inner_gradient(k, v, weights, activation, row_weights=1.0):
    """The gradient of the sum of the squared residuals, by autograd, and that sum."""
    leaves = [w.detach().requires_grad_() for w in weights]
    loss = (row_weights * (output(k, leaves, activation) - v).square().sum(-1)).sum(-1)
    return torch.autograd.grad(loss.sum(), leaves), loss


def each_memory(numbers, x):
    return numbers.reshape(*numbers.shape, *(1,) * (x.ndim - 2))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("read", ["after", "before"])
def test_scan_of_any_number_of_layers_is_the_recurrence_of_autograds_gradients(
    layers, read, device
):
    activation, chunk = "gelu", 4
    weights, momentum = deep_weights(layers, device), deep_weights(layers, device)
    q, k, v = (rows(device) for _ in range(3))
    alpha, eta, theta = gates(device, BATCH, TOKENS, HEADS)
    written = torch.rand(BATCH, TOKENS, HEADS, device=device) > 0.2
    y, *ends, _, _ = deep_memory_scan(
        *(q, k, v, weights, momentum, alpha, eta, theta, written),
        **dict(chunk=chunk, activation=activation, read=read),
    )
    reads, start = [], weights
    for t in range(TOKENS):
        start = weights if t % chunk == 0 else start
        q_t, k_t, v_t = (x[:, t].unsqueeze(2) for x in (q, k, v))
        if read == "before":
            reads.append(output(q_t, weights, activation))
        gradient, _ = inner_gradient(k_t, v_t, start, activation)
        new_momentum = [
            each_memory(eta[:, t], s) * s - each_memory(theta[:, t], g) * g
            for s, g in zip(momentum, gradient, strict=True)
        ]
        new_weights = [
            each_memory(1.0 - alpha[:, t], w) * w + s
            for w, s in zip(weights, new_momentum, strict=True)
        ]
        momentum, weights = (
            [torch.where(each_memory(written[:, t], x), x, y) for x, y in zip(*pair, strict=True)]
            for pair in ((new_momentum, momentum), (new_weights, weights))
        )
        if read == "after":
            reads.append(output(q_t, weights, activation))
    truth = torch.cat(reads, 2).transpose(1, 2)
    assert_same_but_for_rounding((y, *ends[0], *ends[1]), (truth, *weights, *momentum))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_update_of_any_number_of_layers_is_a_step_along_autograds_gradient(
    layers, max_grad_norm, device
):
    activation = "silu"
    weights, momentum = deep_weights(layers, device), deep_weights(layers, device)
    k, v = (rows(device).transpose(1, 2) for _ in range(2))
    alpha, eta, theta = gates(device, BATCH, HEADS)
    row_weights = torch.rand(BATCH, HEADS, TOKENS, device=device, dtype=F64)
    update = deep_memory_update(
        *(k, v, weights, momentum, alpha, eta, theta, row_weights),
        **dict(activation=activation, max_grad_norm=max_grad_norm),
    )
    gradient, loss = inner_gradient(k, v, weights, activation, row_weights)
    norm = sum(g.square().flatten(2).sum(-1) for g in gradient).sqrt()
    step = theta if max_grad_norm is None else theta * (max_grad_norm / norm).clamp(max=1.0)
    new_momentum = [
        each_memory(eta, s) * s - each_memory(step, g) * g
        for s, g in zip(momentum, gradient, strict=True)
    ]
    new_weights = [
        each_memory(1.0 - alpha, w) * w + s for w, s in zip(weights, new_momentum, strict=True)
    ]
    assert_same_but_for_rounding(
        (*update.weights, *update.momentum, update.loss, update.grad_norm),
        (*new_weights, *new_momentum, loss, norm),
    )
    assert not update.skipped.any()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_read_of_any_number_of_layers_is_the_output_of_the_memory(layers, device):
    weights, q = deep_weights(layers, device), rows(device)
    y = deep_memory_read(q, weights, activation="relu")
    truth = output(q.transpose(1, 2), weights, "relu").transpose(1, 2)
    assert_same_but_for_rounding([y], [truth])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_reading_is_as_near_to_fp64_as_torchs_linear_layers(activation, dtype, device):
    def linear_layers(q, *weights):
        def one_memory(q, w1, b1, w2, b2):
            return F.linear(ACTIVATIONS[activation](F.linear(q, w1, b1)), w2, b2)

        weights = [w.to(q.dtype).flatten(0, 1) for w in weights]
        memories = zip(q.transpose(1, 2).flatten(0, 1), *weights, strict=True)
        y = torch.stack([one_memory(*memory) for memory in memories])
        return y.unflatten(0, (BATCH, HEADS)).transpose(1, 2)

    def read(q, *weights):
        return memory_read(q, MemoryWeights(*weights), activation=activation)

    inputs = [rows(device, dtype), *memory_weights(device, F32)]
    Yardstick(linear_layers, inputs).check(read)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_queries_are_read(tokens, device):
    y = memory_read(rows(device, tokens=tokens), memory_weights(device))
    assert y.shape == (BATCH, tokens, HEADS, WIDTH)


def test_weights_may_be_expanded(device):
    weights, q = memory_weights(device), rows(device)
    first = weights.map(lambda w: w[:1].expand_as(w))
    truth = memory_read(q, first.map(torch.Tensor.contiguous))
    assert torch.equal(memory_read(q, first), truth)


def test_reading_gives_autocasts_dtype(device):
    q = rows(device, F32).requires_grad_()
    with torch.autocast(device, BF16):
        y = memory_read(q, memory_weights(device, F32))
    assert y.dtype == BF16
    assert torch.autograd.grad(y.float().sum(), q)[0].dtype == F32


W = MemoryWeights(
    torch.zeros(2, 3, 6, 4), torch.zeros(2, 3, 6), torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4)
)
Q = torch.zeros(2, 5, 3, 4)
BAD = [
    (lambda: memory_read([1.0], W), TypeError, "q must be a tensor, got list"),
    (lambda: memory_read(Q.int(), W), TypeError, "q must be float32.*int32"),
    (lambda: memory_read(Q[0], W), ValueError, r"q must be \[B, T, heads, D\].*got \(5, 3, 4\)"),
    (lambda: memory_read(Q, tuple(W)), TypeError, "weights must be MemoryWeights, got tuple"),
    (lambda: memory_read(Q, W._replace(b1=1)), TypeError, "weights.b1 must be a tensor, got int"),
    (lambda: memory_read(Q[:1], W), ValueError, r"weights.w1 must be \(1, 3, 6, 4\), got \(2, 3"),
    (
        lambda: memory_read(Q, W._replace(w2=W.w1)),
        ValueError,
        r"weights.w2 must be \(2, 3, 4, 6\), got \(2, 3, 6, 4\)",
    ),
    (
        lambda: memory_read(Q, W.map(lambda w: w.to("meta"))),
        ValueError,
        "weights.w1 must be on q's device cpu, got meta",
    ),
    (lambda: memory_read(Q, W, activation="tanh"), ValueError, "activation must be .* or .*'tanh'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_read_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("layers", [1, 3])
def test_skipped_step_and_step_without_gradient_have_finite_gradients(layers, device):
    """The first of three memories overflows, the second has learned all there is."""
    k, v = (torch.randn(3, 4, 5, dtype=F64, device=device) for _ in range(2))
    widths = [5] * (layers + 1)
    weights = []
    for fan_in, fan_out in itertools.pairwise(widths):
        weights += [torch.randn(3, fan_out, fan_in, dtype=F64, device=device)]
        weights += [torch.zeros(3, fan_out, dtype=F64, device=device)]
    k[0] *= 1e300
    weights[-2][1] = 0.0
    v[1] = 0.0
    gate = torch.full((3,), 0.5, dtype=F64, device=device)
    leaves = [x.requires_grad_() for x in (k, v, *weights, gate)]
    momentum = tuple(torch.ones_like(w) for w in weights)
    update = deep_memory_update(
        *(k, v, tuple(weights), momentum, gate, gate, gate), max_grad_norm=1.0
    )
    assert update.skipped.tolist() == [True, False, False]
    total = sum(x.sum() for x in (*update.weights, *update.momentum)) + update.loss[1:].sum()
    dk, dv, *dweights, dgate = torch.autograd.grad(total, leaves)
    for gradient in (dk, dv, *dweights, dgate):
        assert gradient.isfinite().all()
    assert not any(gradient[0].any() for gradient in (dk, dv, dgate))
    for gradient in dweights:
        assert gradient[0].eq(1.0).all()
