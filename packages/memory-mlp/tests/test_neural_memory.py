"""NeuralMemory against the recurrence written plainly, and what holds of it as a layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.memory_mlp import NeuralMemory
from fusewright_testkit import Yardstick
from torch import nn

from .compared import assert_same_but_for_rounding

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
GRANULARITIES = ("token", "chunk", "segment")


def plainly(memory, x):
    """The layer's output, one token after the other, the inner gradients by torch.func.

    Gates and memory are fp32 at least, in a layer of lower precision as well.
    """
    rules, batch = memory.rules, x.shape[0]
    q, k, v = (wide(z) for z in plain_projections(memory, x))
    gate_layer = (wide(p) for p in (memory.gates.linear.weight, memory.gates.linear.bias))
    gates = torch.sigmoid(F.linear(wide(x), *gate_layer))
    alpha, eta, *rest = gates.unflatten(-1, (-1, memory.heads)).unbind(-2)
    theta = (
        memory.gates.largest * (1.0 - eta) * rest[0]
        if rest
        else torch.full_like(eta, memory.gates.constant_theta)
    )
    pooled = rules.scope == "batch_pooled"
    lead = (1 if pooled else batch) * memory.heads

    def of_memories(z):
        """[B, N, heads, ...] to [memories, N, ...]."""
        if pooled:
            z = z.flatten(0, 1).unsqueeze(0)
        return z.transpose(1, 2).flatten(0, 1)

    initial = [
        wide(w).repeat(lead // memory.heads, *(1,) * (w.ndim - 1)) for w in memory.initial.values()
    ]
    weights = initial
    momentum = [torch.zeros_like(w) for w in weights]

    def look(tokens):
        rows = of_memories(q[:, tokens])
        read = torch.vmap(lambda row, *w: applied(row, w, rules))(rows, *weights)
        rows = read.unflatten(0, (-1, memory.heads)).transpose(1, 2)
        y.append(rows.squeeze(0).unflatten(0, (batch, -1)) if pooled else rows)

    def write(tokens, anchor):
        nonlocal weights, momentum
        slope = torch.func.grad(lambda w, k, v: inner_loss(w, k, v, rules))
        gradient = torch.vmap(slope)(anchor, of_memories(k[:, tokens]), of_memories(v[:, tokens]))
        if rules.max_grad_norm is not None:
            norm = sum(g.flatten(1).square().sum(1) for g in gradient).sqrt()
            factor = (rules.max_grad_norm / norm).clamp(max=1.0)
            gradient = [g * broadcast(factor, g) for g in gradient]
        a, e, t = (of_memories(gate[:, tokens]).mean(1) for gate in (alpha, eta, theta))
        count = of_memories(theta[:, tokens]).shape[1]
        if memory.gates.constant_theta is None and rules.reduction != "mean_all":
            t = t * min(1.0, rules.chunk / count)
        momentum = [
            broadcast(e, s) * s - broadcast(t, s) * g
            for s, g in zip(momentum, gradient, strict=True)
        ]
        rest = initial if rules.forget == "initial" else [torch.zeros_like(w) for w in weights]
        weights = [
            (1 - broadcast(a, w)) * w + broadcast(a, w) * r + s
            for w, r, s in zip(weights, rest, momentum, strict=True)
        ]

    y = []
    length = x.shape[1]
    if rules.granularity == "token":
        for t in range(length):
            if t % rules.chunk == 0:
                anchor = weights
            token = slice(t, t + 1)
            if rules.read == "before":
                look(token)
            write(token, anchor)
            if rules.read == "after":
                look(token)
    else:
        size = rules.chunk if rules.granularity == "chunk" else length
        for start in range(0, length, size):
            tokens = slice(start, start + size)
            look(tokens)
            if start + size <= length:
                write(tokens, weights)
    return F.linear(torch.cat(y, 1).flatten(2).to(x.dtype), memory.output.weight)


def wide(x):
    return x if x.dtype == F64 else x.float()


def plain_projections(memory, x):
    """q, k, v of the paper's section 4.4."""
    joint = F.linear(x, memory.projections.joint.weight)
    taps = memory.projections.taps
    if taps is not None:
        padded = F.pad(joint.mT, (taps.shape[1] - 1, 0))
        joint = F.conv1d(padded, taps.unsqueeze(1), groups=len(taps)).mT
    q, k, v = F.silu(joint).unflatten(-1, (3, memory.heads, -1)).unbind(2)
    norms = {
        "l2": lambda z: z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        "rms": lambda z: z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        None: lambda z: z,
    }
    return norms[memory.projections.key_norm](q), norms[memory.projections.key_norm](k), v


def applied(rows, weights, rules):
    given = rows
    for layer in range(0, len(weights), 2):
        if layer:
            rows = ACTIVATIONS[rules.activation](rows)
        rows = F.linear(rows, weights[layer], weights[layer + 1])
    return given + F.layer_norm(rows, rows.shape[-1:]) if rules.residual_norm else rows


def inner_loss(weights, k, v, rules):
    squares = (applied(k, weights, rules) - v).square()
    divisor = {"sum": 1, "mean_feature": v.shape[-1], "mean_all": v.numel()}[rules.reduction]
    return squares.sum() / divisor


def broadcast(numbers, x):
    return numbers.view(-1, *(1,) * (x.ndim - 1))


class Plainly(nn.Module):
    """The plain recurrence on the layer's parameters."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def forward(self, x):
        return plainly(self.memory, x)


class Output(Plainly):
    """The layer's output alone."""

    def forward(self, x):
        return self.memory(x)[0]


def as_function(module):
    """A module that holds a layer, as a function of x and the layer's parameters."""
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, values, (x,))

    return call


PAPER = {"forget": "zero", "residual_norm": False}
OPTIONS = [
    {},
    PAPER,
    {"forget": "zero"},
    {"residual_norm": False, "read": "before"},
    {"read": "before"},
    {"chunk": 1},
    {"chunk": 128, "max_grad_norm": 0.5},
    {"chunk": 128, "max_grad_norm": 0.5, **PAPER},
    {"activation": "gelu"},
    {"activation": "relu"},
    {"layers": 1},
    {"layers": 3},
    {"layers": 3, **PAPER},
    {"layers": 4, "read": "before"},
    {"reduction": "mean_feature"},
    {"reduction": "mean_all", "layers": 3, "max_grad_norm": 0.1},
    {"key_norm": "rms"},
    {"key_norm": None, "theta": 0.02},
    {"convolution": 0},
    {"convolution": 1},
    {"granularity": "chunk"},
    {"granularity": "chunk", "forget": "zero"},
    {"granularity": "chunk", "layers": 1, "reduction": "mean_feature"},
    {"granularity": "chunk", "layers": 3, "max_grad_norm": 0.5},
    {"granularity": "chunk", "max_grad_norm": 0.5, "reduction": "mean_all"},
    {"granularity": "chunk", "scope": "batch_pooled"},
    {"granularity": "segment", "activation": "gelu"},
    {"granularity": "segment", "scope": "batch_pooled", "layers": 3},
]


def spelled(options):
    return "-".join(f"{name}={value}" for name, value in options.items()) or "default"


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS, ids=spelled)
def test_values_and_gradients_are_those_of_the_plain_recurrence(options, memory_of, device):
    memory = memory_of(**options)
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device, requires_grad=True)
    leaves = [x, *memory.parameters()]
    found, truth = memory(x)[0], plainly(memory, x)
    assert_same_but_for_rounding([found], [truth])
    dy = torch.randn_like(truth)
    gradients = [
        torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)
        for y in (found, truth)
    ]
    assert_same_but_for_rounding(*gradients)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, F32),
        ({}, BF16),
        (PAPER, BF16),
        ({"layers": 3, "backend": "triton"}, F32),
        ({"layers": 3, "granularity": "chunk"}, F16),
        ({"granularity": "chunk"}, BF16),
    ],
)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(options, dtype, memory_of, device):
    memory = memory_of(dtype=dtype, **options)
    x = torch.randn(1, 8, memory.dim, device=device).to(dtype)
    yardstick = Yardstick(as_function(Plainly(memory)), [x, *memory.parameters()])
    yardstick.check(as_function(Output(memory)))


def test_origin_settings_are_one_memory_for_all_rows_and_one_step_a_call(memory_of, device):
    memory = memory_of(
        heads=1,
        granularity="segment",
        scope="batch_pooled",
        reduction="mean_all",
        key_norm=None,
        theta=0.01,
        max_grad_norm=1.0,
        convolution=0,
        forget="zero",
    )
    weights = [w[0].detach().clone().requires_grad_() for w in memory.initial.values()]
    momentum = [torch.zeros_like(w) for w in weights]
    state = None
    for scale in (0.3, 30.0, 0.3):
        x = scale * torch.randn(3, 8, memory.dim, dtype=F64, device=device)
        y, state, _ = memory(x, state)
        q, k, v = (z.squeeze(2) for z in plain_projections(memory, x))
        assert_same_but_for_rounding([y], [memory.output(applied(q, weights, memory.rules))])
        loss = F.mse_loss(applied(k, weights, memory.rules), v)
        gradient = torch.autograd.grad(loss, weights)
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        # The clip is at work in the second call alone.
        assert (norm > 1.0) == (scale > 1.0)
        alpha, eta = torch.sigmoid(memory.gates.linear(x)).mean((0, 1))
        for index, (w, s, g) in enumerate(zip(weights, momentum, gradient, strict=True)):
            momentum[index] = eta * s - 0.01 * g / norm.clamp(min=1.0)
            weights[index] = ((1 - alpha) * w + momentum[index]).detach().requires_grad_()
        for found, truth in zip(
            (*state.weights, *state.momentum), (*weights, *momentum), strict=True
        ):
            assert_same_but_for_rounding([found[0, 0]], [truth])


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gates_start_where_memories_last_and_do_not_diverge(chunk, dtype, device):
    memory = NeuralMemory(12, heads=3, chunk=chunk, dtype=dtype, device=device)
    stats = memory(torch.randn(2, 7, 12, device=device, dtype=dtype))[2]
    # As near as a bias of this dtype comes.
    starts = torch.tensor([2.0**-14, 0.9, 0.025 / chunk], device=device)
    found = torch.stack(stats.means())
    assert torch.all((found.logit() - starts.logit()).abs() <= 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize(("rule", "most"), [("paper", 2), ("normed", 4)])
def test_memory_of_start_gates_stays_bounded_where_all_keys_are_alike(rule, most, chunk, device):
    """The weights of a normed one grow until its steps are small beside them."""
    options = dict(memory_length=100.0, **PAPER) if rule == "paper" else {}
    memory = NeuralMemory(32, chunk=chunk, device=device, **options)
    x = torch.randn(1, 1, 32, device=device) + 0.01 * torch.randn(2, 1024, 32, device=device)
    state = memory(x)[1]
    start = torch.stack([w.norm() for w in memory.initial.values()]).norm()
    # Every key writes the same value, which the memory soon knows.
    assert torch.all(state.weight_norm() < most * start)
    assert torch.all(state.momentum_norm() < start)


POOLS = [
    ("segment", "sequence", 2, 3072),
    ("segment", "batch_pooled", 4, 768),
    ("chunk", "batch_pooled", 64, 64),
]


@pytest.mark.parametrize("rate", [0.5, 1.0], ids=["start", "largest"])
@pytest.mark.parametrize("reduction", ["sum", "mean_feature", "mean_all"])
@pytest.mark.parametrize(("granularity", "scope", "batch", "tokens"), POOLS)
def test_memory_of_learned_theta_stays_bounded_however_many_tokens_a_step_pools(
    granularity, scope, batch, tokens, reduction, rate, device
):
    options = {"granularity": granularity, "scope": scope, "reduction": reduction}
    memory = NeuralMemory(16, chunk=8, hidden=16, device=device, **options)
    with torch.no_grad():
        # sigmoid of it is 1.
        memory.gates.linear.bias[2:] = 0.0 if rate == 0.5 else 40.0
        x = torch.randn(1, 1, 16, device=device)
        state = None
        for _ in range(30 if granularity == "segment" else 4):
            noise = 0.01 * torch.randn(batch, tokens, 16, device=device)
            state = memory(x + noise, state)[1]
    start = torch.stack([w.norm() for w in memory.initial.values()]).norm()
    # Every key writes the same value, which the memory soon knows.
    assert torch.all(state.weight_norm() < 2 * start)
    assert not state.skipped.any()


@pytest.mark.parametrize("scope", ["sequence", "batch_pooled"])
def test_learned_theta_of_a_step_follows_from_the_tokens_that_it_writes(scope, memory_of, device):
    """Those of padding are not among them."""
    memory = memory_of(granularity="segment", scope=scope)
    x = torch.randn(2, 20, memory.dim, dtype=F64, device=device)
    mask = torch.arange(20, device=device).expand(2, 20) < 5
    padded, alone = memory(x, mask=mask)[1], memory(x[:, :5])[1]
    assert_same_but_for_rounding(padded.weights, alone.weights)


def test_constant_theta_is_no_parameter_and_the_same_for_every_token(memory_of, device):
    memory = memory_of(theta=0.03)
    assert memory.gates.linear.out_features == 2 * memory.heads
    stats = memory(torch.randn(2, 7, memory.dim, dtype=F64, device=device))[2]
    torch.testing.assert_close(stats.theta, torch.full_like(stats.theta, 0.03))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_future_token_changes_no_past_output(granularity, layers, memory_of, device):
    memory = memory_of(granularity=granularity, layers=layers)
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device)
    y = memory(x)[0]
    for token in (1, 6, 8, 14):
        later = x.clone()
        later[:, token] += 1.0
        changed = memory(later)[0]
        assert torch.equal(changed[:, :token], y[:, :token])
        assert not torch.equal(changed[:, token], y[:, token])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_row_is_what_it_is_alone(granularity, memory_of, device):
    memory = memory_of(granularity=granularity)
    x = torch.randn(3, 15, memory.dim, dtype=F64, device=device)
    y, state, _ = memory(x)
    alone, own, _ = memory(x[1:2])
    assert_same_but_for_rounding([alone], [y[1:2]])
    for found, truth in zip(own.weights, state.weights, strict=True):
        assert_same_but_for_rounding([found], [truth[1:2]])


def test_pooled_rows_depend_on_one_another(memory_of, device):
    memory = memory_of(granularity="chunk", scope="batch_pooled")
    x = torch.randn(3, 15, memory.dim, dtype=F64, device=device)
    y, state, _ = memory(x)
    assert all(w.shape[0] == 1 for w in state.weights)
    assert not torch.allclose(memory(x[1:2])[0], y[1:2])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_parameter_gets_a_gradient_at_its_start(granularity, layers, device):
    memory = NeuralMemory(
        12, heads=2, layers=layers, chunk=4, granularity=granularity, device=device
    )
    x = torch.randn(2, 20, 12, device=device)
    y, state, _ = memory(x[:, :10])
    # A call that is one step is read by the next.
    (y.square().sum() + memory(x[:, 10:], state)[0].square().sum()).backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_full_outer_gradient_reaches_an_earlier_call(memory_of, device):
    assert gradient_through_state(memory_of(outer_grad="full"), device).any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cut", [6, 8], ids=["chunk-ends", "chunk-runs"])
def test_detached_state_cuts_calls_and_no_more(granularity, cut, memory_of, device):
    memory = memory_of(outer_grad="detach_state", granularity=granularity)
    assert not gradient_through_state(memory, device, cut).any()
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device)
    found = gradients(memory, x)
    memory.outer_grad = "full"
    for one, other in zip(found, gradients(memory, x), strict=True):
        assert torch.equal(one, other)


def gradients(memory, x):
    """Those of the parameters, from one call."""
    y = memory(x)[0]
    return torch.autograd.grad(y.square().sum(), [*memory.parameters()], materialize_grads=True)


def gradient_through_state(memory, device, cut=8):
    """The gradient of an earlier call's x by a later call's output."""
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device, requires_grad=True)
    state = memory(x[:, :cut])[1]
    later = memory(x[:, cut:].detach(), state)[0]
    return torch.autograd.grad(later.square().sum(), x, materialize_grads=True)[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layers", [2, 3])
def test_no_outer_gradient_trains_queries_and_output_alone(granularity, layers, memory_of, device):
    memory = memory_of(outer_grad="none", granularity=granularity, layers=layers)
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device)
    y, state, _ = memory(x)
    (y.square().sum() + memory.retrieve(x, state).square().sum()).backward()
    width = memory.heads * memory.head_dim
    for weight in (memory.projections.joint.weight, memory.projections.taps):
        assert weight.grad[:width].any(-1).all()
        assert not weight.grad[width:].any()
    assert memory.output.weight.grad.any()
    assert all(p.grad is None for p in memory.gates.parameters())
    assert all(p.grad is None for p in memory.initial.values())


def test_no_outer_gradient_changes_no_value(memory_of, device):
    memory = memory_of()
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device)
    y = memory(x)[0]
    memory.outer_grad = "none"
    assert torch.equal(memory(x)[0], y)
