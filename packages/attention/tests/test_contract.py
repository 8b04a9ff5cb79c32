"""What holds of every op: registration, compilation, determinism, autocast, import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fusewright import attention
from fusewright_testkit import Yardstick
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SHAPE = (2, 5, 6, 2, 8)
OPS = torch.ops.fusewright_attention


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(attention.__all__) == {
        "Backend",
        "__version__",
        "available_backends",
        "rectangular_attention",
        "rectangular_attention_with_lse",
        "rotary",
        "sdpa_backend",
        "sliding_window_attention",
        "sliding_window_attention_with_lse",
    }
    assert all(hasattr(attention, name) for name in attention.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.attention import available_backends, rectangular_attention\n"
        "assert available_backends() == ('reference',)\n"
        "q = torch.randn(1, 3, 2, 8, requires_grad=True)\n"
        "rectangular_attention(q, q, q).square().sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.attention\nassert ('triton' in sys.modules) == before\n"
    )


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("single-tile", True), ("pointers", False)],
    indirect=["scheme"],
    ids=["single-tile-every-option", "pointers-plain"],
)
def test_registered_op_passes_opcheck(lse_op, scheme, options, device):
    tensors = [x.requires_grad_() for x in lse_op.draw(SHAPE, F32, device)]
    key_lengths = torch.tensor([3, 6], device=device) if options else None
    torch.library.opcheck(OPS.rectangular_attention.default, (*tensors, key_lengths, 0.3, options))


@pytest.mark.parametrize(
    ("scheme", "shape", "options"),
    [("single-tile", (1, 5, 6, 1, 8), False), ("pointers", SHAPE, True)],
    indirect=["scheme"],
    ids=["single-tile", "pointers-every-option"],
)
def test_registered_backward_op_passes_opcheck(lse_op, scheme, shape, options, device):
    q, k, v = (x.requires_grad_() for x in lse_op.draw(shape, F32, device))
    batches, queries, _, heads, _ = shape
    do, lse = torch.randn_like(q), torch.randn(batches, heads, queries, device=device)
    softmax = torch.rand(2, batches, heads, queries, device=device) + 6
    key_lengths = torch.tensor([3, 6], device=device) if options else None
    torch.library.opcheck(
        OPS.rectangular_attention_backward.default,
        (do, lse if options else None, q, k, v, key_lengths, do, None, softmax, 0.3),
    )


def test_no_other_op_is_registered():
    actual = {
        name for name in torch._C._dispatch_get_all_op_names() if "fusewright_attention" in name
    }
    names = ("rectangular_attention", "rotary", "sliding_window_attention")
    assert actual == {
        f"fusewright_attention::{name}{end}" for name in names for end in ("", "_backward")
    }


@pytest.mark.parametrize(("keys", "dtype"), [(6, BF16), (140, F32)])
def test_full_graph_compilation_gives_eager_results(op, keys, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, op.draw((1, 5, keys, 2, 8), dtype, device)).check(compiled)


def test_lengths_do_not_recompile(op, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(op.kernels, fullgraph=True, backend=counter)
    tensors = op.draw(SHAPE, F32, device)
    for lengths in ([1, 2], [6, 0], [3, 3]):
        key_lengths = torch.tensor(lengths, device=device)
        actual = op.first(compiled(*tensors, key_lengths))
        assert torch.equal(actual, op.first(op.kernels(*tensors, key_lengths)))
    assert counter.frame_count == 1


def test_same_inputs_same_bits(lse_op, scheme, device):
    tensors = [x.requires_grad_() for x in lse_op.draw((2, 20, 24, 1, 16), BF16, device)]

    def everything():
        o = lse_op.first(lse_op.kernels(*tensors))
        return [o, *torch.autograd.grad(o.square().sum(), tensors)]

    for first, second in zip(everything(), everything(), strict=True):
        assert torch.equal(first, second)


def test_gradient_mode_changes_no_bit_of_the_outputs(lse_op, scheme, device):
    tensors = [x.requires_grad_() for x in lse_op.draw((2, 20, 24, 1, 16), BF16, device)]
    with torch.no_grad():
        quiet = lse_op.first(lse_op.kernels(*tensors))
    assert torch.equal(quiet, lse_op.first(lse_op.kernels(*tensors)))


def test_both_functions_give_the_same_bits(lse_op, scheme, device):
    tensors = lse_op.draw((2, 20, 24, 1, 16), BF16, device)
    alone = attention.rectangular_attention(*tensors, backend="triton")
    o, _ = attention.rectangular_attention_with_lse(*tensors, backend="triton")
    assert torch.equal(alone, o)


def test_checkpointing_changes_no_bit_of_the_gradients(op, device):
    tensors = [x.requires_grad_() for x in op.draw(SHAPE, BF16, device)]

    def squares(call):
        return torch.autograd.grad(op.first(call(*tensors)).square().sum(), tensors)

    def checkpointed(*args):
        return checkpoint(op.kernels, *args, use_reentrant=False)

    for actual, expected in zip(squares(checkpointed), squares(op.kernels), strict=True):
        assert torch.equal(actual, expected)


def test_tasks_do_not_see_one_another(lse_op, scheme, device):
    tensors = [x.requires_grad_() for x in lse_op.draw((3, 20, 24, 1, 16), F32, device)]
    with_nan = [x.detach().clone() for x in tensors]
    for x in with_nan:
        x[1] = float("nan")
    with_nan = [x.requires_grad_() for x in with_nan]

    def everything(leaves):
        o = lse_op.first(lse_op.kernels(*leaves))
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    for actual, truth in zip(everything(with_nan), everything(tensors), strict=True):
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], truth[[0, 2]])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["alike", "mixed"])
def test_autocast_casts_as_for_a_matrix_product(op, dtype, backend, device):
    q, k, v = op.draw(SHAPE, F32, device)
    tensors = [x.requires_grad_() for x in (q, k.to(dtype), v)]
    with torch.autocast(device, torch.bfloat16):
        o = op.first(op.public(*tensors, backend=backend))
    assert o.dtype == BF16
    grads = torch.autograd.grad(o.sum(), tensors)
    assert [g.dtype for g in grads] == [F32, dtype, F32]
    expected = op.first(op.public(*(x.bfloat16() for x in tensors), backend=backend))
    assert torch.equal(o, expected)


def test_autocast_leaves_fp64_alone(op, device):
    with torch.autocast(device, torch.bfloat16):
        o = op.first(op.public(*op.draw(SHAPE, F64, device), backend="reference"))
    assert o.dtype == F64


def test_fp64_with_another_dtype_is_refused_under_autocast(op, device):
    """Autocast leaves fp64 tensors as they are, and torch's attention takes one dtype."""
    q, k, v = op.draw(SHAPE, F32, device)
    for tensors in ((q, k.double(), v), (q.double(), k, v)):
        with (
            torch.autocast(device, torch.bfloat16),
            pytest.raises(ValueError, match="k must have q's dtype"),
        ):
            op.public(*tensors)


def test_needs_no_gradient_of_what_does_not_ask(lse_op, scheme, device):
    q, k, v = lse_op.draw((2, 20, 24, 1, 16), F32, device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = lse_op.first(lse_op.kernels(*leaves))
    expected = torch.autograd.grad(o.square().sum(), leaves)
    for index in range(3):
        tensors = [q, k, v]
        tensors[index] = leaf = tensors[index].clone().requires_grad_()
        (actual,) = torch.autograd.grad(lse_op.first(lse_op.kernels(*tensors)).square().sum(), leaf)
        assert torch.equal(actual, expected[index])


def test_meta_tensors_get_shapes(op):
    o = op.first(op.public(*op.draw(SHAPE, F32, "meta")))
    assert o.shape == (2, 5, 2, 8)
    assert o.is_meta
