"""What only a GPU can show of NeuralMemory: synchronisation, graphs, the kernels beside torch."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright_testkit import Yardstick, capture, no_synchronisation
from torch.utils._pytree import tree_flatten

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
KINDS = [
    {"backend": "triton"},
    {"backend": "triton", "granularity": "chunk", "max_grad_norm": 0.5},
    {"backend": "triton", "granularity": "segment", "scope": "batch_pooled"},
    {"backend": "reference"},
    {"backend": "triton", "layers": 3},
    {"layers": 3, "max_grad_norm": 0.5},
    {"layers": 1, "granularity": "chunk"},
]


def spelled(options):
    return "-".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture(params=KINDS, ids=spelled)
def memory(request):
    return NeuralMemory(128, heads=2, hidden=128, device="cuda", **request.param)


def draw(tokens=200):
    return torch.randn(3, tokens, 128, device="cuda")


def step(memory, x, mask):
    """Two calls, a reset between them, a retrieval, documents, and the gradients of everything."""
    with torch.autocast("cuda", BF16):
        first, state, _ = memory(x[:, :100], mask=mask[:, :100])
        state = memory.reset(state, mask[:, 0])
        later, state, stats = memory(x[:, 100:], state)
        ys = [first, later, memory.retrieve(x, state)]
        if memory.rules.granularity != "segment":
            ys.append(memory(x, mask=mask, cu_seqlens=bounds_of(x))[0])
        y = torch.cat(ys, 1)
    grads = torch.autograd.grad(y.float().square().sum(), [*memory.parameters()])
    return [y.detach(), *(t.detach() for t in tree_flatten(state)[0]), *stats, *grads]


def bounds_of(x):
    """Of three documents in each row, the second of them empty in one."""
    rows = torch.arange(len(x), device="cuda").unsqueeze(1)
    first, last = 17 * rows, 64 + 40 * rows
    return torch.cat([0 * rows, first, torch.minimum(last, first + 50 * rows), 0 * rows + 200], 1)


def mask_of(x):
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device="cuda")
    mask[1, :7] = False
    return mask


def test_no_call_waits_for_the_gpu(memory):
    x = draw()
    mask = mask_of(x)
    step(memory, x, mask)
    torch.cuda.synchronize()
    with no_synchronisation():
        step(memory, x, mask)


def test_replayed_graph_gives_eager_bits_of_the_replays_values(memory):
    x = draw()
    mask = mask_of(x)
    graph, captured = capture(lambda: step(memory, x, mask))
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for found, truth in zip(captured, step(memory, x, mask), strict=True):
        assert torch.equal(found, truth)


@pytest.mark.parametrize("granularity", ["token", "chunk", "segment"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_kernels_are_as_near_to_fp64_as_plain_torch(granularity, dtype):
    options = dict(heads=2, hidden=128, granularity=granularity, device="cuda", dtype=dtype)
    plain, memory = (
        NeuralMemory(128, backend=backend, **options) for backend in ("reference", "triton")
    )
    names = [name for name, _ in memory.named_parameters()]

    def output_of(layer):
        def call(x, *parameters):
            values = dict(zip(names, parameters, strict=True))
            y, state, _ = torch.func.functional_call(layer, values, (x,))
            return y, *state.weights

        return call

    # Two chunks of 64 tokens and a rest.
    inputs = [draw(130)[:1].to(dtype), *memory.parameters()]
    Yardstick(output_of(plain), inputs).check(output_of(memory))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layers", [2, 3])
def test_documents_are_as_near_to_fp64_as_those_of_plain_torch(layers, dtype):
    """Each by itself, of less than a chunk, of one and of two and a rest."""
    options = dict(heads=2, hidden=128, layers=layers, device="cuda", dtype=dtype)
    plain, memory = (
        NeuralMemory(128, backend=backend, **options) for backend in ("reference", "triton")
    )
    names = [name for name, _ in memory.named_parameters()]
    sizes = 20, 64, 130

    def alone(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        parts = [
            torch.func.functional_call(plain, values, (part,))[0] for part in x.split(sizes, 1)
        ]
        return torch.cat(parts, 1)

    def packed(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        bounds = torch.arange(4, device="cuda")
        bounds = 20 * (bounds > 0) + 64 * (bounds > 1) + 130 * (bounds > 2)
        return torch.func.functional_call(memory, values, (x,), {"cu_seqlens": bounds})[0]

    inputs = [draw(214)[:1].to(dtype), *memory.parameters()]
    Yardstick(alone, inputs).check(packed)


def test_long_sequence_diverges_in_no_kind(memory):
    with torch.no_grad():
        y, state, _ = memory(draw(16384))
    assert y.isfinite().all()
    assert state.weight_norm().isfinite().all()
