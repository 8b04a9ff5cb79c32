"""What only a GPU can show before and behind the memory, beyond what the suite asks: sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright.memory_mlp.inputs import reference
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright_testkit.conformance import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, D: as many as a layer has, and a rest.
FIRST = 4, 515, 64


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("history_dtype", [BF16, F32])
def test_full_size_is_as_near_to_fp64_as_torch(input_op, dtype, history_dtype):
    op = input_op.having(heads=5)
    op.check(op.draw(*FIRST, dtype, "cuda", history_dtype=history_dtype))


@pytest.mark.parametrize("width", [1, 8, 40, 64, 100, 128])
@pytest.mark.parametrize("taps", [0, 1, 2, 4, 8])
def test_every_width_and_window_is_as_near_to_fp64_as_torch(input_op, width, taps):
    op = input_op.having(taps=taps, key_norm="rms", theta=None if taps else 0.1)
    op.check(op.draw(2, 70, width, BF16, "cuda"))


@pytest.mark.parametrize("taps", [0, 4])
def test_queries_alone_are_as_near_to_fp64_as_torch(input_op, taps):
    op = input_op.having(heads=5, taps=taps, queries=True)
    op.check(op.draw(*FIRST, BF16, "cuda"))


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_is_in_torch(input_op, strange):
    present = torch.rand(2, 100, device="cuda") < 0.8
    op = input_op.having(present=present)
    tensors = op.draw(2, 100, 16, BF16, "cuda")
    for token, column in ((3, 40), (50, 90), (99, 5)):
        tensors[0][1, token, column] = strange
    tensors[3][0, 7, 2] = float("nan")
    op.check(tensors)
    found, truth = (op.whole(*tensors, backend=b).writes.written for b in ("triton", "reference"))
    assert torch.equal(found, truth)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("width", [1, 320, 700, 8192])
def test_tokens_are_the_references(dtype, width):
    x = torch.randn(3, 200, width, device="cuda").to(dtype)
    x[1, 5, 0], x[2, 199, -1] = float("nan"), float("inf")
    mask = torch.rand(3, 200, device="cuda") < 0.7
    kept = torch.rand(3, 200, 5, device="cuda") < 0.9
    results = []
    for backend in ("triton", "reference"):
        leaf = x.clone().requires_grad_()
        y, present = token_ops.finite_tokens(leaf[:, 7:], mask[:, 7:], backend=backend)
        out = token_ops.kept_tokens(y, kept[:, 7:], mask[:, 7:], 3.0, backend=backend)
        grad = torch.autograd.grad(out, leaf, torch.ones_like(out))[0]
        results.append((y.detach(), present, out.detach(), grad))
    assert same_bits(*results)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("sizes", [(320, 15), (512, 24), (700, 7), (1, 1)], ids=str)
def test_gated_tokens_are_as_near_to_fp64_as_torch(gated_op, dtype, sizes):
    mask = torch.rand(3, 515, device="cuda") < 0.9
    op = gated_op.having(mask)
    tensors = op.draw(3, 515, *sizes, dtype, "cuda")
    tensors[0][1, 7, 0] = float("nan")
    op.check(tensors)


def test_widest_gated_tokens_are_as_near_to_fp64_as_torch(gated_op):
    gated_op.check(gated_op.draw(1, 70, 8192, 24, BF16, "cuda"))


@pytest.mark.parametrize("shape", [(4, 512, 5), (3, 5000, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_counted_tokens_are_the_references(shape, masked):
    batch, _, heads = shape
    written = torch.rand(shape, device="cuda") < 0.8
    mask = torch.rand(shape[:2], device="cuda") < 0.8 if masked else None
    skipped, lost = torch.randint(1 << 40, (2, batch, heads), device="cuda")
    position = torch.randint(1 << 40, (batch,), device="cuda")
    operands = written, skipped, position, mask, lost if masked else None
    found = torch.ops.fusewright_memory_mlp.count_tokens(*operands)
    assert same_bits(found, reference.counted_tokens(*operands))


class Names(TorchDispatchMode):
    """The names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_layer_takes_the_kernels_without_being_told():
    memory = NeuralMemory(128, heads=2, device="cuda")
    x = torch.randn(2, 100, 128, device="cuda")
    with Names() as found:
        memory(x)
    assert {"memory_input", "gated_tokens", "kept_tokens", "count_tokens"} <= found.names
    assert not {"silu", "sigmoid", "convolution", "where.self", "addmm"} & found.names
