"""What Muon keeps from step to step: one number of the working dtype for each of a parameter."""

from __future__ import annotations

import gc

import pytest
import torch
from fusewright.optimizer import Muon
from fusewright.optimizer.matrix import stacked_optimizer

# Of three shapes: several stacks of one, one of one, and one matrix alone.
SHAPES = ((24, 16),) * 9 + ((16, 40),) * 3 + ((20, 20),)


def bytes_alive():
    """Of all tensors, each memory once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def drawn(shapes, dtype, device):
    """Parameters with gradients."""
    generator = torch.Generator().manual_seed(1)
    ps = []
    for shape in shapes:
        x, g = (torch.randn(shape, generator=generator).to(device, dtype) for _ in "xg")
        ps.append(torch.nn.Parameter(x))
        ps[-1].grad = g
    return ps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("saved", [False, True], ids=["new", "loaded"])
def test_keeps_the_momentum_and_a_few_numbers_of_each_matrix(
    monkeypatch, device, backend, dtype, saved
):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels serve no fp64")
    monkeypatch.setattr(stacked_optimizer, "STACKED", 2 * 24 * 16)
    ps = drawn(SHAPES, dtype, device)
    before = bytes_alive()
    optimizer = Muon(ps, backend=backend)
    if saved:
        torchs = torch.optim.Muon(ps)
        torchs.step()
        optimizer.load_state_dict(torchs.state_dict())
        del torchs
    for _ in range(3):
        optimizer.step()
    kept = bytes_alive() - before
    wide = torch.promote_types(dtype, torch.float32).itemsize
    momenta = sum(p.numel() for p in ps) * wide
    # Addresses of gradients and parameters, partial results, numbers.
    assert momenta <= kept <= momenta + 64 * len(ps)
