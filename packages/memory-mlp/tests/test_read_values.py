"""What memory_read computes: near to fp64, the same however queries and weights are laid."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_read
from fusewright.memory_mlp.common.operands import WIDEST, WIDEST_HIDDEN
from fusewright.memory_mlp.common.weights import pack, pack_weights, unpack
from fusewright_testkit.conformance import same_bits

F32, F16 = torch.float32, torch.float16

# Rows, tokens, heads, D, hidden units, dtype, activation.
CASES = {
    "T70-heads2-D5-hidden7-float32-silu": (2, 70, 2, 5, 7, F32, "silu"),
    "T1-heads3-D1-hidden1-float32-gelu": (2, 1, 3, 1, 1, F32, "gelu"),
    "T65-heads1-D20-hidden40-float32-relu": (1, 65, 1, 20, 40, F32, "relu"),
    "T130-heads1-D40-hidden150-float16-silu": (1, 130, 1, 40, 150, F16, "silu"),
    "T33-heads2-D64-hidden33-float16-gelu": (1, 33, 2, 64, 33, F16, "gelu"),
}


def everything(op, leaves, **options):
    """y and the gradients."""
    (y,) = op.public(*leaves, **options)
    return [y, *torch.autograd.grad(y.float().sin().sum(), leaves)]


def leaves_of(tensors):
    return [x.detach().requires_grad_() for x in tensors]


def a_state(weights):
    """Weights as a scan hands them on: views of one tensor that gradients pass through."""
    half = MemoryWeights(*weights)
    whole = pack(half, half.map(torch.ones_like)).detach().requires_grad_()
    return whole, unpack(whole * 1.0, *half.w1.shape[-2:])[0]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(read_op, name, device):
    *sizes, dtype, activation = CASES[name]
    read_op.having(activation=activation).check(read_op.draw(*sizes, dtype, device))


@pytest.mark.parametrize("dtype", [F32, F16])
def test_tokens_that_programs_share_are_as_near_to_fp64_as_torch(
    read_op, many_read_programs, dtype, device
):
    read_op.check(read_op.draw(1, 70, 2, 5, 20, dtype, device))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_state_is_read_where_it_lies_and_gets_its_gradient_packed(read_op, shared, device, request):
    """The momentum's is zero; all bits are those of weights that are tensors of their own."""
    if shared:
        request.getfixturevalue("many_read_programs")
    q, *own = leaves_of(read_op.draw(2, 35, 2, 5, 7, F32, device))
    y, dq, *dweights = everything(read_op, [q, *own], backend="triton")
    whole, weights = a_state(own)
    assert pack_weights(weights).data_ptr() == weights.w1.data_ptr()
    found = memory_read(q, weights, backend="triton")
    grads = torch.autograd.grad(found.sin().sum(), [q, whole])
    by_weights, by_momentum = unpack(grads[1], 7, 5)
    assert same_bits([found, grads[0], *by_weights], [y, dq, *dweights])
    assert not any(g.any() for g in by_momentum)


def test_memory_that_rows_share_gets_the_sum_of_their_gradients(read_op, device):
    q, *weights = read_op.draw(2, 5, 3, 4, 6, F32, device)
    shared = leaves_of([w[:1] for w in weights])
    copies = leaves_of([w[:1].expand_as(w).contiguous() for w in weights])
    y, *grads = everything(read_op, [q.requires_grad_(), *copies], backend="triton")
    read = memory_read(
        q,
        MemoryWeights(*(w.expand_as(c) for w, c in zip(shared, copies, strict=True))),
        backend="triton",
    )
    found = torch.autograd.grad(read.sin().sum(), [q, *shared])
    assert same_bits([read, found[0]], [y, grads[0]])
    assert same_bits(found[1:], [g.sum(0, keepdim=True) for g in grads[1:]])


def test_weights_of_another_dtype_get_gradients_in_it(read_op, backend, device):
    q, *weights = leaves_of(read_op.draw(2, 5, 3, 4, 6, F32, device))
    narrow = leaves_of([w.half() if place % 2 else w.double() for place, w in enumerate(weights)])
    y, *grads = everything(read_op, [q, *narrow], backend=backend)
    assert y.dtype == F32
    assert [g.dtype for g in grads[1:]] == [w.dtype for w in narrow]
    exact = leaves_of([w.float() for w in narrow])
    expected = everything(read_op, [q, *exact], backend=backend)
    assert same_bits([y, grads[0]], expected[:2])


def test_strange_query_stays_in_its_row_head_and_token(read_op, backend, device):
    """Outputs and gradients of the others keep their bits."""
    q, *weights = read_op.draw(2, 3, 2, 4, 5, F32, device)
    expected = everything(read_op, leaves_of([q, *weights]), backend=backend)
    q[1, 1, 0, 2] = torch.nan
    found = everything(read_op, leaves_of([q, *weights]), backend=backend)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        if place < 2:
            assert x[1, 1, 0].isnan().all()
            kept = torch.arange(3, device=device) != 1
            assert torch.equal(x[1, kept, 0], truth[1, kept, 0])
            x, truth = x.transpose(1, 2), truth.transpose(1, 2)
        assert torch.equal(x[0], truth[0])
        assert torch.equal(x[1, 1], truth[1, 1])


def test_strange_memory_stays_in_its_row_and_head(read_op, backend, device):
    q, *weights = read_op.draw(2, 3, 2, 4, 5, F32, device)
    expected = everything(read_op, leaves_of([q, *weights]), backend=backend)
    weights[0][1, 0, 2, 1] = torch.inf
    found = everything(read_op, leaves_of([q, *weights]), backend=backend)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        x, truth = (z.transpose(1, 2) if place < 2 else z for z in (x, truth))
        assert torch.equal(x[0], truth[0])
        assert torch.equal(x[1, 1], truth[1, 1])
        assert not x[1, 0].isfinite().all() or place > 1


@pytest.mark.parametrize(("width", "hidden"), [(WIDEST + 1, 4), (4, WIDEST_HIDDEN + 1), (4, 0)])
def test_triton_says_which_memories_it_serves(read_op, width, hidden, device):
    tensors = read_op.draw(1, 1, 1, width, max(hidden, 1), device=device)
    tensors[1:4] = tensors[1][:, :, :hidden], tensors[2][..., :hidden], tensors[3][..., :hidden]
    with pytest.raises(RuntimeError, match=f"hidden units, not {width} and {hidden}"):
        read_op.public(*tensors, backend="triton")
    assert read_op.public(*tensors, backend="reference")[0].shape == (1, 1, 1, width)


def test_pooled_layer_reads_heads_that_are_wider_than_the_kernels_serve(memory_of, device):
    options = dict(heads=1, head_dim=WIDEST + 1, granularity="chunk", dtype=F32)
    memory = memory_of(backend="triton", **options)
    x = torch.randn(1, 7, memory.dim, device=device)
    assert memory(x)[0].isfinite().all()
