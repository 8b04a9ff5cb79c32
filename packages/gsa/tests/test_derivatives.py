"""The selection as a registered op, and derivatives written out by hand."""

from __future__ import annotations

import pytest
import torch
from fusewright.gsa import indexer_topk
from fusewright.gsa.indexer.reference import gated_indexer_backward
from fusewright.gsa.loss.reference import indexer_kl_loss_with_slopes
from fusewright.gsa.sparse.reference import sparse_attention_backward
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits
from torch.func import vmap

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
OPS = torch.ops.fusewright_gsa
SMALL = (1, 3, 4, 2, 3)


@pytest.mark.parametrize("law", ["inverse", "entropy"])
def test_selection_passes_opcheck(indexer, law, device):
    leaves = [t.requires_grad_() for t in indexer.draw(SMALL, device=device)]
    ema = torch.tensor(0.05, device=device)
    torch.library.opcheck(
        OPS.indexer_topk.default, (*leaves, None, ema, 0.3, law, 3, 2, 4, 1, 1, True, 2, "gated")
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_backward_formulas_are_those_of_autograd(op, dtype):
    """The second derivative, and the CPU's op without the interpreter, rest on them."""
    tensors = op.draw((1, 5, 6, 2, 3), dtype)
    g = torch.randn_like(op.reference(*tensors))

    def gradients(g, *tensors):
        if g.dtype == F64:
            return torch.autograd.grad(op.reference(*tensors), tensors, g, create_graph=True)
        if op.name == "gated_indexer":
            return gated_indexer_backward(g, *tensors, scale=0.3, causal=False)
        if op.name == "indexer_kl_loss":
            places = dict(scale=0.3, index_scale=0.3, causal=False)
            attention = op.attention(*tensors[:2])
            _, *slopes = indexer_kl_loss_with_slopes(*tensors, *attention, **places)
            return tuple((g * s).to(x.dtype) for x, s in zip(tensors, slopes, strict=True))
        indices, count = (x.unsqueeze(1) for x in op.selection(*tensors[:2]))
        return sparse_attention_backward(g, None, *tensors, indices, count, scale=0.3)

    inputs = [g, *tensors]
    Yardstick(gradients, inputs, [None] * len(tensors), dtype).check(gradients)


def test_selection_and_attention_compile_to_one_graph(indexer, sparse, device):
    torch._dynamo.reset()
    of_indexer = indexer.draw((1, 6, 6, 2, 5), F32, device)
    tensors = sparse.draw((1, 6, 6, 4, 8), F32, device)

    def attend(*tensors):
        counts = dict(k_base=3, k_min=2, k_max=4, sinks=1)
        indices, count, stats = indexer_topk(*of_indexer, **counts, backend="triton")
        return *sparse.kernels(*tensors, indices, count), stats.variance

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*tensors), attend(*tensors))


def test_selection_is_mapped_sample_by_sample(indexer, device):
    tensors = [torch.stack([x, 2 * x]) for x in indexer.draw((1, 2, 3, 2, 3), F32, device)]

    def select(*tensors):
        counts = dict(k_base=2, k_min=1, k_max=3, law="fixed")
        return indexer_topk(*tensors, **counts, backend="triton")[:2]

    found = vmap(select)(*tensors)
    for index in range(2):
        expected = select(*(x[index] for x in tensors))
        assert all(torch.equal(f[index], e) for f, e in zip(found, expected, strict=True))
