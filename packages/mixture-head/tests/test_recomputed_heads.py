"""grouped_heads with its hidden layer computed again: chunks of rows, memory, the module."""

from __future__ import annotations

import pytest
import torch
from fusewright.mixture_head import GaussianMixtureHead
from fusewright.mixture_head.heads import recomputed_heads
from fusewright_testkit.conformance import everything, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = 300
# Of three heads of 40 units, 128 rows: the last of three chunks has 44.
UNITS = 3 * 40


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(recomputed_heads, "CHUNK_UNITS", 128 * UNITS)
    assert recomputed_heads.chunk_rows(UNITS) == 128


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_chunks_are_as_near_to_fp64_as_torch(
    dtype, recomputing_heads, device, draw_heads, small_chunks
):
    recomputing_heads.check(draw_heads((ROWS, 6), dtype, device, stored=40, heads=3))


def test_weights_of_chunks_in_bf16_have_gradients_rounded_once(
    recomputing_heads, device, draw_heads, small_chunks
):
    x, hidden, output = draw_heads((ROWS, 6), BF16, device, stored=40, heads=3)
    recomputing_heads.check([x, hidden, output.bfloat16()])


def test_rows_of_a_chunk_do_not_see_those_of_another(
    recomputing_heads, device, draw_heads, small_chunks
):
    leaves = [t.requires_grad_() for t in draw_heads((ROWS, 6), F32, device, stored=40, heads=3)]
    clean = everything(recomputing_heads.kernels, leaves)[:2]
    with torch.no_grad():
        leaves[0][:128] = float("nan")
    found = everything(recomputing_heads.kernels, leaves)[:2]
    for one, other in zip(clean, found, strict=True):
        assert other[:128].isnan().all()
        assert torch.equal(one[128:], other[128:])


def test_same_inputs_same_bits_in_chunks(recomputing_heads, device, draw_heads, small_chunks):
    leaves = [t.requires_grad_() for t in draw_heads((ROWS, 6), F32, device, stored=40, heads=3)]
    first, second = (everything(recomputing_heads.kernels, leaves) for _ in range(2))
    assert same_bits(first, second)


def test_weights_alone_may_need_gradients(recomputing_heads, device, draw_heads, small_chunks):
    leaves = [t.requires_grad_() for t in draw_heads((ROWS, 6), F32, device, stored=40, heads=3)]
    expected = torch.autograd.grad(recomputing_heads.kernels(*leaves).sum(), leaves)[1:]
    x, *weights = leaves
    found = torch.autograd.grad(recomputing_heads.kernels(x.detach(), *weights).sum(), weights)
    assert same_bits(found, expected)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation has made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "inference"])
def test_no_tensor_is_larger_than_the_hidden_units_of_a_chunk(gradients, device, small_chunks):
    launched = recomputed_heads._forward_triton, recomputed_heads._backward_triton
    x, hidden = torch.randn(ROWS, 6, device=device), torch.randn(UNITS, 6, device=device)
    output = torch.randn(3, 40, 3, device=device)
    with Largest() as largest:
        out = launched[0](x, hidden, output)
        if gradients:
            launched[1](out, x, hidden, output, True)
    assert largest.elements == 128 * UNITS


@pytest.mark.parametrize("recompute", [True, False])
def test_module_hands_its_option_on(recompute, backend, device):
    head = GaussianMixtureHead(6, 40, 3, recompute=recompute, backend=backend, device=device)
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head(torch.randn(ROWS, 6, device=device))
    # Stored padded, 64 units a head.
    assert (ROWS * 3 * 64 in packed) == (not recompute or backend == "reference")
    assert f"recompute={recompute}" in repr(head)
