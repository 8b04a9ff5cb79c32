"""NeuralMemory in torch: state dicts, autocast, checkpoints, compilers, bad input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from .compared import assert_same_but_for_rounding

F32, BF16 = torch.float32, torch.bfloat16
KINDS = [
    {},
    {"layers": 3},
    {"granularity": "chunk"},
    {"granularity": "segment", "scope": "batch_pooled", "max_grad_norm": 0.5},
]


def spelled(options):
    return "-".join(f"{name}={value}" for name, value in options.items()) or "token"


def draw(memory, length=15):
    weight = memory.output.weight
    return torch.randn(2, length, memory.dim, dtype=weight.dtype, device=weight.device)


def two_calls(memory, x):
    """What a sequence in two calls gives, and its gradients."""
    first, state, _ = memory(x[:, :8])
    later, state, stats = memory(x[:, 8:], state)
    y = torch.cat((first, later), 1)
    grads = torch.autograd.grad(y.float().square().sum(), [*memory.parameters()])
    return [y.detach(), *tree_flatten(memory.detach_state(state))[0], *stats, *grads]


def assert_equal(found, truth):
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_state_dict_makes_the_same_layer(options, memory_of):
    memory, other = memory_of(**options), memory_of(**options)
    names = {"projections.joint.weight", "projections.taps", "gates.linear.weight"}
    names |= {"gates.linear.bias", "output.weight"}
    layers = range(1, memory.rules.layers + 1)
    assert set(memory.state_dict()) == names | {f"initial.{n}{i}" for n in "wb" for i in layers}
    x = draw(memory)
    other.load_state_dict(memory.state_dict())
    assert_equal(two_calls(other, x), two_calls(memory, x))
    for copied in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert_equal(two_calls(copied, x), two_calls(memory, x))


def test_state_itself_can_be_saved(memory_of, tmp_path):
    memory = memory_of()
    state = memory.detach_state(memory(draw(memory))[1])
    torch.save(tree_flatten(state)[0], tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert_equal(loaded, tree_flatten(state)[0])


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_forward_is_a_pure_function(options, memory_of):
    memory = memory_of(**options)
    before = copy.deepcopy(memory.state_dict())
    x = draw(memory)
    kept = x.clone()
    first, second = two_calls(memory, x), two_calls(memory, x)
    assert_equal(first, second)
    assert_equal(memory.state_dict().values(), before.values())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_gradient_mode_changes_no_bit_of_the_output(options, memory_of):
    memory = memory_of(dtype=F32, **options)
    x = draw(memory)
    with torch.no_grad():
        quiet = memory(x)[0]
    assert torch.equal(quiet, memory(x)[0])


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_checkpointing_changes_no_bit_of_the_gradients(options, memory_of):
    memory = memory_of(**options)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = memory
            self.detach_state = memory.detach_state

        def forward(self, x, state=None):
            return checkpoint(self.memory, x, state, use_reentrant=False)

    x = draw(memory)
    assert_equal(two_calls(Checkpointed(), x), two_calls(memory, x))


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_autocast_gives_the_dtype_of_a_linear_layer_and_fp32_states(options, memory_of, device):
    memory = memory_of(dtype=F32, **options)
    check_autocast(memory, memory, draw(memory), device)


def test_compiled_layer_autocasts_as_the_eager_one(memory_of, device):
    torch._dynamo.reset()
    memory = memory_of(dtype=F32, granularity="segment")
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    check_autocast(memory, compiled, draw(memory, 7), device)


def check_autocast(memory, call, x, device):
    with torch.autocast(device, BF16):
        y, state, stats = call(x)
        retrieved = memory.retrieve(x, state)
    assert (y.dtype, retrieved.dtype) == (BF16, BF16)
    tensors = (*state.weights, *state.momentum, *state.tail[2:5], *stats[:3])
    assert {t.dtype for t in tensors} == {F32}
    assert {state.tail.k.dtype, state.convolution.dtype} == {F32}
    end = sum(w.sum() for w in state.weights)
    grads = torch.autograd.grad(y.float().square().sum() + end, [*memory.parameters()])
    assert {g.dtype for g in grads} == {F32}
    assert all(g.any() for g in grads)


def test_gates_are_computed_in_fp32_under_autocast(memory_of, device):
    memory = memory_of(dtype=F32)
    x = draw(memory)
    with torch.autocast(device, BF16):
        found = memory.gates(x)
    assert_equal(found, memory.gates(x))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "compiler"),
    [
        *(pytest.param(kind, "aot_eager", id=spelled(kind)) for kind in KINDS[:3]),
        pytest.param({"layers": 3}, "inductor", id="layers=3-inductor", marks=pytest.mark.slow),
    ],
)
def test_full_graph_compilation_gives_eager_results(options, compiler, memory_of):
    torch._dynamo.reset()
    memory = memory_of(**options)
    x = draw(memory, 6)
    results = []
    for function in (torch.compile(memory, fullgraph=True, backend=compiler), memory):
        # The compiled call ends the chunk that runs.
        y, state, _ = function(x[:, 5:], memory(x[:, :5])[1])
        loss = y.square().sum() + sum(w.square().sum() for w in state.weights)
        grads = torch.autograd.grad(loss, [*memory.parameters()], materialize_grads=True)
        results.append([*tree_flatten((y, state))[0], *grads])
    assert_same_but_for_rounding(*results)


def test_reading_and_resetting_compile_to_one_graph(memory_of):
    torch._dynamo.reset()
    memory = memory_of(granularity="chunk")
    x = draw(memory, 8)
    state = memory(x)[1]

    def call(x, state, rows):
        state = memory.reset(state, rows)
        return memory.retrieve(x, state, before=x)

    rows = torch.tensor([True, False], device=x.device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, truth = compiled(x, state, rows), call(x, state, rows)
    assert_same_but_for_rounding([found], [truth])


class NothingIsRead(TorchDispatchMode):
    """Fail where a number of a tensor reaches the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(word in name for word in ("_local_scalar_dense", "is_nonzero", "equal"))
        assert "nonzero" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_no_number_reaches_the_host(options, memory_of):
    memory = memory_of(**options)
    x = draw(memory)
    mask = torch.ones(2, 15, dtype=torch.bool, device=x.device)
    rows = mask[:, 0]
    with NothingIsRead():
        _, state, _ = memory(x, mask=mask)
        y = memory(x, memory.reset(state, rows))[0]
        y = y + memory.retrieve(x, state)


def test_layer_is_made_on_the_meta_device():
    memory = NeuralMemory(12, heads=2, device="meta")
    y, state, _ = memory(torch.empty(3, 70, 12, device="meta"))
    assert y.shape == (3, 70, 12)
    assert state.tail.length == 6
    assert state.weight_norm().shape == (3, 2)


def test_repr_names_the_rules():
    text = repr(NeuralMemory(12, heads=2, granularity="chunk"))
    assert "12, heads=2, head_dim=6, hidden=24" in text
    assert "granularity='chunk'" in text


X = torch.zeros(2, 5, 12)
MASK = torch.ones(2, 5, dtype=torch.bool)


def make(**options):
    return lambda: NeuralMemory(12, **options)


def call(x, **options):
    return lambda: NeuralMemory(12, heads=2)(x, **options)


BAD = [
    (lambda: NeuralMemory(0), ValueError, "dim must be at least 1, got 0"),
    (lambda: NeuralMemory(12.0), TypeError, "dim must be a whole number, got float"),
    (make(heads=0), ValueError, "heads must be at least 1, got 0"),
    (make(heads=5), ValueError, "dim must be a multiple of heads = 5 without head_dim, got 12"),
    (make(head_dim=-1), ValueError, "head_dim must be at least 1, got -1"),
    (make(hidden=0), ValueError, "hidden must be at least 1, got 0"),
    (make(layers=0), ValueError, "layers must be at least 1, got 0"),
    (make(layers=True), TypeError, "layers must be a whole number, got bool"),
    (
        make(layers=1, backend="triton"),
        ValueError,
        'layers must be 2 or more with backend "triton", got 1',
    ),
    (
        make(layers=3, backend="triton", max_grad_norm=1.0),
        ValueError,
        'layers must be 2 with backend "triton".*max_grad_norm 1.0.*got 3',
    ),
    (
        make(layers=3, backend="triton", granularity="chunk"),
        ValueError,
        'layers must be 2 with backend "triton" and granularity "chunk".*got 3',
    ),
    (
        make(activation="tanh"),
        ValueError,
        'activation must be "silu" or "relu" or "gelu", got .tanh.',
    ),
    (make(chunk=0), ValueError, "chunk must be at least 1, got 0"),
    (make(granularity="row"), ValueError, 'granularity must be "token" or "chunk".*row'),
    (make(reduction="mean"), ValueError, 'reduction must be "sum" or "mean_feature".*mean.$'),
    (make(key_norm="l1"), ValueError, 'key_norm must be "l2" or "rms", got .l1.'),
    (make(theta="fixed"), TypeError, "theta must be a number, got str"),
    (make(theta=-0.1), ValueError, "theta must be a finite number above 0, got -0.1"),
    (make(max_step=0.0), ValueError, "max_step must be a finite number above 0, got 0.0"),
    (make(scope="batch"), ValueError, 'scope must be "sequence" or "batch_pooled", got .batch.'),
    (make(scope="batch_pooled"), ValueError, "batch_pooled.*granularity"),
    (make(convolution=-1), ValueError, "convolution must be at least 0, got -1"),
    (make(max_grad_norm="1"), TypeError, "max_grad_norm must be a number, got str"),
    (
        make(max_grad_norm=0, granularity="chunk"),
        ValueError,
        "max_grad_norm must be a finite number above 0, got 0",
    ),
    (make(outer_grad="some"), ValueError, 'outer_grad must be "full".*some'),
    (make(read="during"), ValueError, 'read must be "after" or "before", got .during.'),
    (make(backend="cuda"), ValueError, "got 'cuda'"),
    (call([1.0]), TypeError, "x must be a tensor, got list"),
    (call(X.int()), TypeError, "x must be float32.*int32"),
    (call(X[0]), ValueError, r"x must be \[B, T, 12\], got shape \(5, 12\)"),
    (call(X[..., :7]), ValueError, r"x must be \[B, T, 12\], got shape \(2, 5, 7\)"),
    (call(X.half()), ValueError, "x must have the weights' dtype torch.float32 outside autocast"),
    (call(X.to("meta")), ValueError, "x must be on the weights' device cpu, got meta"),
    (
        call(X, queries=X[:, :4]),
        ValueError,
        r"queries must be \[2, 5, 12\], got shape \(2, 4, 12\)",
    ),
    (call(X, mask=MASK.int()), TypeError, "mask must be a bool tensor, got torch.int32"),
    (call(X, mask=MASK[:1]), ValueError, r"mask must have shape \(2, 5\), got \(1, 5\)"),
    (call(X, mask=MASK.to("meta")), ValueError, "mask must be on device cpu, got meta"),
    (call(X, state=3), TypeError, "state must be a MemoryState, got int"),
    (call(X.double()), ValueError, "outside autocast, got torch.float64"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_retrieval_says_why():
    memory = NeuralMemory(12, heads=2)
    state = memory.init_state(2)
    with pytest.raises(ValueError, match=r"before must be \[2, T, 12\], got shape \(1, 5, 12\)"):
        memory.retrieve(X, state, before=X[:1])
    with pytest.raises(ValueError, match=r"state.weights\[0\] must be \(1, 2, 24, 6\)"):
        memory.retrieve(X[:1], state)
