"""Operations that torch compiles, to one graph."""

from __future__ import annotations

import pytest
import torch

from ..yardstick import Yardstick, as_tuple
from .records import everything, same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@DTYPES
@pytest.mark.sampled
def test_full_graph_compilation_gives_eager_bits(form, dtype, device):
    leaves = form.leaves(form.small, dtype, device)
    compiled = torch.compile(form.kernels, fullgraph=True, backend="aot_eager")
    assert same_bits(everything(compiled, leaves), everything(form.kernels, leaves))


def test_one_compiled_graph_serves_every_size(op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for sizes in op.growing:
        tensors = op.sample(sizes, torch.float32, device)
        assert same_bits(as_tuple(compiled(*tensors)), as_tuple(op.kernels(*tensors)))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", ["fp32", "low"])
def test_inductor_gives_right_outputs_and_gradients(op, width, device):
    dtype = torch.float32 if width == "fp32" else op.low
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.sample(op.several, dtype, device), few=True).check(compiled)
