"""What holds of every op: registration, compilation, determinism, import."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from fusewright import mixture_head
from fusewright.mixture_head.heads import reference as heads_reference
from fusewright.mixture_head.mixture import reference
from fusewright_testkit import Yardstick
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
OPS = torch.ops.fusewright_mixture_head
NAMES = ("mixture_nll", "mixture_log_likelihood", "silu_heads")
BACKWARD = ("mixture_backward", "silu_heads_backward")
FORMS = {"log_sigma": (False, -7.0, 5.0, 1e-3), "softplus": (True, -7.0, 5.0, 1e-3)}


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    questions = {f"mixture_{name}" for name in ("cdf", "mean", "quantiles", "sample", "variance")}
    assert set(mixture_head.__all__) == questions | {
        "Backend",
        "GaussianMixtureHead",
        "Scale",
        "__version__",
        "available_backends",
        "grouped_heads",
        "mixture_log_likelihood",
        "mixture_nll",
    }
    assert all(hasattr(mixture_head, name) for name in mixture_head.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.mixture_head import GaussianMixtureHead, available_backends\n"
        "assert available_backends() == ('reference',)\n"
        "head = GaussianMixtureHead(4, 6, 3)\n"
        "head.loss(head(torch.randn(5, 4)), torch.randn(5, 1)).backward()\n"
        "assert all(p.grad.isfinite().all() for p in head.parameters())\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.mixture_head\nassert ('triton' in sys.modules) == before\n"
    )


@pytest.mark.parametrize(
    ("name", "masked", "scale"),
    [
        ("mixture_nll", False, "log_sigma"),
        ("mixture_nll", True, "softplus"),
        ("mixture_log_likelihood", True, "log_sigma"),
    ],
)
def test_mixture_ops_pass_opcheck(name, masked, scale, device, draw_mixtures):
    params, y = (t.requires_grad_() for t in draw_mixtures((6, 5), F32, device))
    mask = torch.arange(6, device=device) > 1 if masked else None
    torch.library.opcheck(getattr(OPS, name).default, (params, y, mask, *FORMS[scale]))


@pytest.mark.parametrize(("mean", "masked", "y_grad"), [(True, False, True), (False, True, False)])
def test_mixture_backward_op_passes_opcheck(mean, masked, y_grad, device, draw_mixtures):
    params, y = draw_mixtures((6, 5), F32, device)
    upstream = torch.randn(() if mean else (6,), device=device)
    factor = torch.tensor(-0.5, device=device) if mean else None
    slopes = torch.randn(5, 3, 6, device=device), torch.randn_like(y)
    leaves = [t.requires_grad_() for t in (upstream, params, y)]
    mask = torch.arange(6, device=device) > 1 if masked else None
    arguments = (leaves[0], factor, *leaves[1:], mask, *slopes, *FORMS["softplus"], y_grad)
    torch.library.opcheck(OPS.mixture_backward.default, arguments)


def test_head_ops_pass_opcheck(device):
    u, weight, dparams = (
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((6, 2, 5), (2, 5, 3), (6, 2, 3))
    )
    torch.library.opcheck(OPS.silu_heads.default, (u, weight))
    torch.library.opcheck(OPS.silu_heads_backward.default, (dparams, u, weight))


def test_no_other_op_is_registered():
    namespace = "fusewright_mixture_head"
    found = {name for name in torch._C._dispatch_get_all_op_names() if namespace in name}
    assert found == {f"{namespace}::{name}" for name in (*NAMES, *BACKWARD)}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_reference_gradients_are_the_derivatives(mixture, masked, scale, draw_mixtures):
    leaves = [t.requires_grad_() for t in draw_mixtures((3, 4), F64, y_dtype=F64)]
    mask = torch.tensor([True, False, True]) if masked else None
    call = partial(mixture.reference, mask=mask, scale=scale)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_reference_gradients_of_heads_are_the_derivatives():
    shapes = ((3, 2), (8, 2), (2, 4, 3))
    leaves = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(heads_reference.grouped_heads, leaves)
    assert torch.autograd.gradgradcheck(heads_reference.grouped_heads, leaves)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_slopes_of_the_reference_are_its_gradients(mixture, scale, dtype, draw_mixtures):
    """The CPU's op and the second derivative use the slopes written out by hand."""
    params, y = draw_mixtures((9, 4), dtype)
    factor = torch.tensor(-1.0 / 9) if mixture.name == "mixture_nll" else None
    form = dict(zip(("softplus", "low", "high", "eps"), FORMS[scale], strict=True))

    def gradients(params, y, upstream):
        if params.dtype == F64:
            return torch.autograd.grad(
                mixture.reference(params, y, scale=scale), (params, y), upstream, create_graph=True
            )
        wide = None if factor is None else factor.to(upstream.dtype)
        return reference.mixture_backward(upstream, wide, params, y, None, **form)

    upstream = torch.randn(() if factor is not None else (9,))
    Yardstick(gradients, [params, y, upstream], [None, None]).check(gradients)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_full_graph_compilation_gives_eager_results(op, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, op.draw((50, 5), dtype, device)).check(compiled)


def test_masked_rows_compile_to_one_graph(mixture, device, draw_mixtures):
    torch._dynamo.reset()
    tensors = draw_mixtures((20, 5), F32, device)
    mask = torch.arange(20, device=device) % 3 > 0
    compiled = torch.compile(mixture.kernels, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, mask), mixture.kernels(*tensors, mask))


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def leaves_of(op, device):
    return [t.requires_grad_() for t in op.draw((70, 11), BF16, device)]


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
    for wanted in itertools.product([False, True], repeat=len(leaves)):
        if any(wanted):
            chosen = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
            y = op.kernels(*chosen)
            found = torch.autograd.grad(y.square().sum(), itertools.compress(chosen, wanted))
            assert same_bits(found, itertools.compress(expected, wanted))


def test_rows_of_heads_do_not_see_one_another(heads, device):
    leaves = leaves_of(heads, device)
    with_nan = [t.detach().clone().requires_grad_() for t in leaves]
    with torch.no_grad():
        with_nan[0][2] = float("nan")
    others = [0, 1, *range(3, 70)]
    clean, found = (everything(heads.kernels, tensors)[:2] for tensors in (leaves, with_nan))
    for one, other in zip(clean, found, strict=True):
        assert other[2].isnan().all()
        assert torch.equal(one[others], other[others])


def test_hidden_layer_is_saved_once_and_its_activation_never(heads, device, draw_heads):
    leaves = [t.requires_grad_() for t in draw_heads((30, 6), F32, device, stored=40, heads=3)]
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        heads.kernels(*leaves)
    assert packed.count(30 * 3 * 40) == 1
