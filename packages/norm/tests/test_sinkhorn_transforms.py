"""sinkhorn_knopp as a registered op: transforms, compilers, autograd, what only a GPU can show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fusewright import norm
from fusewright.norm import sinkhorn_knopp
from fusewright.norm.sinkhorn import reference
from fusewright_testkit import Yardstick, capture, no_synchronisation, transforms
from fusewright_testkit.transforms import hold
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
OPTIONS = dict(iterations=3, eps=1e-6)
SHAPE = (3, 4, 4)


class Sinkhorn:
    """The op as ``hold`` asks for it, in one domain: to what is registered a domain is a word."""

    def __init__(self, domain):
        self.reference = partial(reference.sinkhorn_knopp, **OPTIONS, domain=domain)
        self.kernels = partial(sinkhorn_knopp, **OPTIONS, domain=domain, backend="triton")


@pytest.fixture(params=["linear"])
def op(request):
    return Sinkhorn(request.param)


BOTH_DOMAINS = pytest.mark.parametrize("op", ["linear", "log"], indirect=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def slope(y, leaf):
    return torch.autograd.grad(y.cos().sum(), leaf)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, [torch.randn(SHAPE, device=device)], transform)


def test_jacobian_is_right(op, device):
    hold(op, [torch.randn(1, 2, 2, device=device)], transforms.jacobian)


@pytest.mark.parametrize("transform", [transforms.func_grad, transforms.mapped_func_grad])
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(op, [torch.randn(SHAPE, device=device)], transform, compiler)


@BOTH_DOMAINS
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_full_graph_compilation_gives_eager_results(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, [torch.randn(SHAPE, device=device).to(dtype)]).check(compiled)


def test_one_compiled_graph_serves_any_number_of_matrices(device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    call = Sinkhorn("linear").kernels
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counted)
    for matrices in (3, 5, 8):
        x = torch.randn(matrices, 4, 4, device=device)
        assert torch.equal(compiled(x), call(x))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, [torch.randn(SHAPE, device=device).to(dtype)]).check(compiled)


@BOTH_DOMAINS
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_second_derivative_is_right(op, scale, device):
    x = scale * torch.randn(SHAPE, device=device)
    slopes = transforms.slopes_to_differentiate
    Yardstick(slopes(op.reference), [x], [torch.randn_like(x)]).check(slopes(op.kernels))


@BOTH_DOMAINS
def test_third_derivative_is_right(op, device):
    def steepness(call):
        def of_leaf(x):
            value = call(x).cos().sum()
            for _ in range(2):
                (grad,) = torch.autograd.grad(value, x, create_graph=True)
                value = grad.square().sum()
            return torch.autograd.grad(value, x, create_graph=True)

        return of_leaf

    x = torch.randn(1, 3, 3, device=device)
    Yardstick(steepness(op.reference), [x], [None]).check(steepness(op.kernels))


@pytest.mark.parametrize("transform", [*transforms.FORWARD_MODES, transforms.compiled_func_jvp])
def test_forward_mode_raises(transform, device):
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(Sinkhorn("linear").kernels, torch.randn(SHAPE, device=device))


@BOTH_DOMAINS
@pytest.mark.parametrize("transform", [transforms.forward_mode, transforms.func_jvp])
def test_forward_mode_of_the_reference_is_right(op, transform):
    x = torch.randn(SHAPE, dtype=F64)

    def of_squares(x):
        return op.reference(x.square())

    # What is added to all logits changes nothing; to their roots it does.
    _, expected = torch.autograd.functional.jvp(of_squares, x, torch.ones_like(x))
    torch.testing.assert_close(transform(of_squares, x), expected)
    assert expected.abs().max() > 0.01


def test_registered_ops_pass_opcheck(device):
    x, dy = (torch.randn(SHAPE, device=device, requires_grad=True) for _ in range(2))
    ops = torch.ops.fusewright_norm
    torch.library.opcheck(ops.sinkhorn_knopp.default, (x, 3, 1e-6, "log"))
    torch.library.opcheck(ops.sinkhorn_knopp_backward.default, (dy, x, 3, 1e-6, "log"))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_changes_no_bit(dtype, backend, device):
    leaf = torch.randn(SHAPE, device=device).to(dtype).requires_grad_()
    y = sinkhorn_knopp(leaf, **OPTIONS, backend=backend)
    with torch.autocast(device, torch.bfloat16):
        found = sinkhorn_knopp(leaf, **OPTIONS, backend=backend)
    assert found.dtype == dtype
    assert torch.equal(found, y)
    assert torch.equal(slope(found, leaf), slope(y, leaf))


def test_modes_and_checkpoints_change_no_bit(op, device):
    leaf = torch.randn(SHAPE, device=device, requires_grad=True)
    y = op.kernels(leaf)
    with torch.no_grad():
        assert torch.equal(op.kernels(leaf), y)
    with torch.inference_mode():
        assert torch.equal(op.kernels(leaf), y)
    again = checkpoint(op.kernels, leaf, use_reentrant=False)
    assert torch.equal(slope(again, leaf), slope(y, leaf))


def test_only_the_logits_are_saved(op, device):
    leaf = torch.randn(SHAPE, device=device, requires_grad=True)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = op.kernels(leaf)
    assert [tensor.data_ptr() for tensor in packed] == [leaf.data_ptr()]
    # The result may be changed in place: it is not needed again.
    expected = slope(op.kernels(leaf) * 2, leaf)
    assert torch.equal(slope(y.mul_(2), leaf), expected)


def test_logits_changed_after_the_forward_pass_are_noticed(op, device):
    leaf = torch.randn(SHAPE, device=device, requires_grad=True)
    y = op.kernels(leaf)
    with torch.no_grad():
        leaf.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.filterwarnings("error")
def test_meta_tensors_get_a_shape_and_a_dtype():
    y = sinkhorn_knopp(torch.empty(SHAPE, dtype=BF16, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == (SHAPE, BF16, "meta")


def test_matrices_larger_than_the_kernels_take_are_served_by_the_reference(device):
    x = torch.randn(2, 70, 70)
    assert torch.equal(sinkhorn_knopp(x), sinkhorn_knopp(x, backend="reference"))
    if device == "cuda":
        with pytest.warns(RuntimeWarning, match="n up to 64, not 70"):
            y = sinkhorn_knopp(x.cuda())
        assert torch.equal(y, sinkhorn_knopp(x.cuda(), backend="reference"))


def everything(op, leaf):
    y = op.kernels(leaf)
    return [y, slope(y, leaf)]


@pytest.mark.gpu
@BOTH_DOMAINS
@pytest.mark.parametrize("shape", [(16384, 4, 4), (1024, 64, 64), (5000, 7, 7)], ids=str)
def test_replayed_graph_gives_eager_bits(op, shape):
    leaf = torch.randn(shape, device="cuda", requires_grad=True)
    graph, captured = capture(lambda: everything(op, leaf))
    with torch.no_grad():
        leaf.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(c, e) for c, e in zip(captured, everything(op, leaf), strict=True))


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu(op):
    leaf = torch.randn(500, 4, 4, device="cuda", requires_grad=True)
    everything(op, leaf)
    with no_synchronisation():
        everything(op, leaf)


@pytest.mark.gpu
@BOTH_DOMAINS
@pytest.mark.parametrize("n", [*range(1, 18), 31, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_size_is_as_near_to_fp64_as_torch(op, n, dtype):
    """More matrices than programs stay on the GPU."""
    x = torch.randn(40000 // n + 3, n, n, device="cuda").to(dtype)
    Yardstick(op.reference, [x]).check(op.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 4, 4), (1024, 64, 64)], ids=str)
def test_full_size_is_as_near_to_fp64_as_torch_and_the_same_bits_twice(shape):
    x = torch.randn(shape, device="cuda")
    Yardstick(partial(reference.sinkhorn_knopp, iterations=20, eps=1e-6), [x]).check(
        partial(sinkhorn_knopp, backend="triton")
    )
    op = Sinkhorn("linear")
    first, second = (everything(op, x.detach().requires_grad_()) for _ in range(2))
    assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.large
def test_gradients_reach_matrices_past_31_bits_of_elements():
    """The last matrices of a tensor of 2^31 elements and more get the bits that they get alone."""
    x = torch.zeros((1 << 27) + 5, 4, 4, device="cuda", dtype=BF16)
    x[-3:] = torch.randn(3, 4, 4, device="cuda")
    leaf, few = x.requires_grad_(), x[-3:].detach().clone().requires_grad_()
    call = partial(norm.sinkhorn_knopp, iterations=2, backend="triton")
    y = call(leaf)
    assert torch.equal(y[-3:], call(few))
    (dx,) = torch.autograd.grad(y, leaf, leaf.detach())
    (truth,) = torch.autograd.grad(call(few), few, few.detach())
    assert torch.equal(dx[-3:], truth)
