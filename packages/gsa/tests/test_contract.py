"""What holds of every op: registration, compilation, determinism, import."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from fusewright import gsa
from fusewright.gsa import indexer_topk
from fusewright.gsa.indexer.reference import gated_indexer_backward
from fusewright.gsa.loss.reference import indexer_kl_loss_with_slopes
from fusewright.gsa.sparse.reference import sparse_attention_backward
from fusewright_testkit import Yardstick
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
OPS = torch.ops.fusewright_gsa
NAMES = ("gated_indexer", "indexer_kl_loss", "indexer_topk", "sparse_attention")
BACKWARD = tuple(f"{name}_backward" for name in NAMES if name != "indexer_topk")
SMALL = (1, 3, 4, 2, 3)


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(gsa.__all__) == {
        "Backend",
        "GatedSparseAttention",
        "KeyCache",
        "Law",
        "Path",
        "Selection",
        "SelectionStats",
        "__version__",
        "available_backends",
        "gated_indexer",
        "indexer_kl_loss",
        "indexer_topk",
        "sparse_attention",
        "sparse_attention_with_lse",
    }
    assert all(hasattr(gsa, name) for name in gsa.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.gsa import available_backends, indexer_topk, sparse_attention\n"
        "assert available_backends() == ('reference',)\n"
        "q, k, w = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 2)\n"
        "found = indexer_topk(q, k, w, torch.zeros(2), k_base=2, k_min=1, k_max=3)\n"
        "x = torch.randn(1, 5, 2, 4)\n"
        "assert sparse_attention(x, x, x, *found[:2]).isfinite().all()\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.gsa\nassert ('triton' in sys.modules) == before\n"
    )


def test_indexer_ops_pass_opcheck(indexer, device):
    leaves = [t.requires_grad_() for t in indexer.draw(SMALL, device=device)]
    options = (0.3, True, 1)
    torch.library.opcheck(OPS.gated_indexer.default, (*leaves, *options))
    dscores = torch.randn(SMALL[:3], device=device, requires_grad=True)
    torch.library.opcheck(OPS.gated_indexer_backward.default, (dscores, *leaves, *options))


@pytest.mark.parametrize("law", ["inverse", "entropy"])
def test_selection_passes_opcheck(indexer, law, device):
    leaves = [t.requires_grad_() for t in indexer.draw(SMALL, device=device)]
    ema = torch.tensor(0.05, device=device)
    torch.library.opcheck(OPS.indexer_topk.default, (*leaves, ema, 0.3, law, 3, 2, 4, 1, True, 2))


@pytest.mark.parametrize("path", ["tiles", "queries"])
def test_sparse_ops_pass_opcheck(sparse, path, device):
    """The forward op without what may be left out, the backward op with it."""
    leaves = [t.requires_grad_() for t in sparse.draw((1, 2, 3, 2, 3), device=device)]
    indices, count = (x.unsqueeze(1).contiguous() for x in sparse.selection(*leaves[:2]))
    torch.library.opcheck(OPS.sparse_attention.default, (*leaves, indices, None, 0.3, path))
    do = torch.randn_like(leaves[0]).requires_grad_()
    dlse = torch.randn(1, 2, 2, device=device, requires_grad=True)
    o, _, softmax, _ = OPS.sparse_attention(*leaves, indices, count, 0.3, path)
    arguments = (do, dlse, *leaves, indices, count, o.detach(), softmax, 0.3, path)
    torch.library.opcheck(OPS.sparse_attention_backward.default, arguments)


def test_loss_ops_pass_opcheck(loss, device):
    """The forward op without a selection, the backward op with one."""
    leaves = [t.requires_grad_() for t in loss.draw(SMALL, device=device)]
    attention = [x.detach() for x in loss.attention(*leaves[:2])]
    options = (0.3, 0.4, False, 0)
    torch.library.opcheck(OPS.indexer_kl_loss.default, (*leaves, *attention, None, None, *options))
    indices = torch.tensor([[[1, -1, 2]] * 3], device=device)
    constant = (*attention, indices, torch.full((1, 3), 2, device=device))
    slopes = [x.detach() for x in OPS.indexer_kl_loss(*leaves, *constant, *options)[1:]]
    upstream = torch.tensor(0.7, device=device, requires_grad=True)
    arguments = (upstream, *leaves, *constant, *slopes, *options)
    torch.library.opcheck(OPS.indexer_kl_loss_backward.default, arguments)


def test_no_other_op_is_registered():
    namespace = "fusewright_gsa"
    found = {name for name in torch._C._dispatch_get_all_op_names() if namespace in name}
    assert found == {f"{namespace}::{name}" for name in (*NAMES, *BACKWARD)}


def test_reference_gradients_are_the_derivatives(op):
    leaves = [t.double().requires_grad_() for t in op.draw((1, 3, 4, 2, 3))]
    assert torch.autograd.gradcheck(op.reference, leaves)
    assert torch.autograd.gradgradcheck(op.reference, leaves)


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


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_full_graph_compilation_gives_eager_results(op, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, op.draw((1, 3, 4, 2, 5), dtype, device)).check(compiled)


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


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def leaves_of(op, device):
    return [t.requires_grad_() for t in op.draw((1, 4, 5, 2, 7), BF16, device)]


def everything(call, leaves):
    y = call(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


def test_same_inputs_same_bits(op, device):
    leaves = leaves_of(op, device)
    assert same_bits(everything(op.kernels, leaves), everything(op.kernels, leaves))


def test_gradient_mode_changes_no_bit_of_the_outputs(op, device):
    leaves = leaves_of(op, device)
    with torch.no_grad():
        quiet = op.kernels(*leaves)
    assert torch.equal(quiet, op.kernels(*leaves))


def test_checkpointing_changes_no_bit_of_the_gradients(op, device):
    leaves = leaves_of(op, device)
    checkpointed = partial(checkpoint, op.kernels, use_reentrant=False)
    assert same_bits(everything(checkpointed, leaves), everything(op.kernels, leaves))


def test_any_choice_of_inputs_may_require_gradients(op, device):
    leaves = leaves_of(op, device)
    _, *expected = everything(op.kernels, leaves)
    for index in range(len(leaves)):
        wanted = [i == index for i in range(len(leaves))]
        chosen = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        y = op.kernels(*chosen)
        found = torch.autograd.grad(y.square().sum(), chosen[index])
        assert same_bits(found, itertools.compress(expected, wanted))
