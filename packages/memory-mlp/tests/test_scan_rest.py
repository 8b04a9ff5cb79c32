"""memory_scan that forgets towards weights, and whose memory has a residual and a norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.memory_mlp import MemoryWeights, NeuralMemory, memory_read, memory_scan
from fusewright.memory_mlp.scan import reference

from .compared import assert_same_but_for_rounding
from .operations_scan import RestOp, ScanOp
from .test_scan_clip import amid
from .test_scan_values import masked_out

F32, F16, F64 = torch.float32, torch.float16, torch.float64

# Rows, tokens, heads, D, hidden units, dtype, options.
CASES = {
    "T7-chunk4-D3-hidden5-float32-silu-after": (2, 7, 2, 3, 5, F32, dict(chunk=4)),
    "T7-chunk4-D3-hidden5-float32-silu-norm-before": (
        *(2, 7, 2, 3, 5, F32),
        dict(chunk=4, residual_norm=True, read="before"),
    ),
    "T40-chunk32-D20-hidden70-float16-gelu-norm-after": (
        *(1, 40, 1, 20, 70, F16),
        dict(chunk=32, residual_norm=True, activation="gelu"),
    ),
}
CLIPPED = {
    "T9-chunk16-D6-hidden5-float32-silu-norm": (
        *(1, 9, 2, 6, 5, F32),
        dict(chunk=16, residual_norm=True),
    ),
    "T9-chunk4-D6-hidden5-float32-silu-before": (
        *(1, 9, 2, 6, 5, F32),
        dict(chunk=4, read="before"),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(name, device):
    *sizes, dtype, options = CASES[name]
    RestOp(options).check(RestOp().draw(*sizes, dtype, device))


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_outputs_and_gradients_are_as_near_to_fp64_as_torch(name, device):
    *sizes, dtype, options = CLIPPED[name]
    op = RestOp(options)
    tensors = op.draw(*sizes, dtype, device)
    op.having(max_grad_norm=amid(op, tensors)).check(tensors)


def test_norm_alone_is_as_near_to_fp64_as_torch(scan_op, device):
    op = scan_op.having(chunk=4, residual_norm=True)
    op.check(scan_op.draw(1, 6, 2, 5, 7, F32, device))


@pytest.mark.parametrize("limit", [None, 0.5], ids=["plain", "clipped"])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("residual_norm", [False, True])
def test_chunks_of_products_are_the_recurrence_token_by_token(residual_norm, read, limit):
    """In fp64, values and gradients, with tokens that are not written, gates of 0 and 1 and chunks
    that are reset.
    """
    *tensors, w1, b1, w2, b2 = RestOp().draw(2, 11, 3, 3, 5, F64, rate=0.2)
    tensors[-3][0, ::3], tensors[-2][1, 1::4] = 1.0, 0.0
    written = torch.rand(2, 11, 3) < 0.6
    tensors = [*masked_out(tensors, written), w1, b1, w2, b2]
    leaves = [x.requires_grad_() for x in tensors]
    q, k, v, *state, alpha, eta, theta = leaves[:-4]
    operands = (
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(MemoryWeights(*half) for half in (state[:4], state[4:])),
        *(x.mT for x in (alpha, eta, theta, written)),
        MemoryWeights(*leaves[-4:]),
    )
    resets = torch.tensor([[True, False, True], [False, True, False]])
    resets = resets.unsqueeze(1).expand(2, 3, 3)
    both = []
    for scan in (reference.memory_scan, reference.memory_scan_by_token):
        options = dict(chunk=4, read=read, residual_norm=residual_norm, max_grad_norm=limit)
        options["resets"] = resets
        y, *ends, _, loss = scan(*operands, **options)
        outputs = [y, *(x for end in ends for x in end)]
        total = sum((x * (1 + place)).sin().sum() for place, x in enumerate(outputs))
        both.append([*outputs, loss, *torch.autograd.grad(total, leaves)])
    assert_same_but_for_rounding(*both)


def test_forgotten_memory_is_the_rest(backend, device):
    """With alpha = 1 and no step, from any weights; with alpha = 0 they stay."""
    *tensors, w1, b1, w2, b2 = RestOp().draw(1, 6, 2, 3, 5, F32, device)
    q, k, v, *state, alpha, eta, _ = tensors
    rest = MemoryWeights(w1, b1, w2, b2)
    halves = MemoryWeights(*state[:4]), MemoryWeights(*(torch.zeros_like(x) for x in state[4:]))
    for forget, expected in ((1.0, [x.unsqueeze(0) for x in rest]), (0.0, state[:4])):
        gates = torch.full_like(alpha, forget), eta, torch.zeros_like(eta)
        done = memory_scan(q, k, v, *halves, *gates, None, rest, chunk=4, backend=backend)
        for found, truth in zip(done.weights, expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=0.0, atol=0.0)


def test_memory_at_rest_that_learns_nothing_stays_there(backend, device):
    """However much it forgets: to one rounding of each chunk."""
    *tensors, w1, b1, w2, b2 = RestOp().draw(1, 12, 2, 3, 5, F32, device)
    q, k, v, *state, alpha, eta, _ = tensors
    rest = MemoryWeights(w1, b1, w2, b2)
    nothing = MemoryWeights(*(torch.zeros_like(x) for x in state[4:]))
    start = MemoryWeights(*(x.unsqueeze(0) for x in rest))
    gates = alpha, eta, torch.zeros_like(eta)
    done = memory_scan(q, k, v, start, nothing, *gates, None, rest, chunk=4, backend=backend)
    for found, truth in zip(done.weights, start, strict=True):
        assert ((found - truth).abs() <= 3 * 2 * torch.finfo(F32).eps * truth.abs()).all()


def test_inner_gradient_is_autograds_of_the_residual_and_the_norm(backend, device):
    """The momentum after one token, from none, is -theta times the gradient of |M(k) - v|^2."""
    dtype = F64 if backend == "reference" else F32
    q, k, v, *state, alpha, eta, theta = ScanOp().draw(1, 1, 1, 4, 6, dtype, device)
    w1, b1, w2, b2 = (x[0, 0].requires_grad_() for x in state[:4])
    key, value = k[0, 0, 0], v[0, 0, 0]
    made = w2 @ F.silu(w1 @ key + b1) + b2
    loss = (key + F.layer_norm(made, made.shape) - value).square().sum()
    gradient = torch.autograd.grad(loss, (w1, b1, w2, b2))
    halves = MemoryWeights(*state[:4]), MemoryWeights(*(torch.zeros_like(x) for x in state[4:]))
    done = memory_scan(*(q, k, v, *halves, alpha, eta, theta), residual_norm=True, backend=backend)
    for found, g in zip(done.momentum, gradient, strict=True):
        torch.testing.assert_close(found[0, 0], -theta.item() * g)
    made = done.weights.w2[0, 0] @ F.silu(
        done.weights.w1[0, 0] @ q[0, 0, 0] + done.weights.b1[0, 0]
    )
    read = q[0, 0, 0] + F.layer_norm(made + done.weights.b2[0, 0], made.shape)
    torch.testing.assert_close(done.y[0, 0, 0], read)


@pytest.mark.parametrize("wrong", ["shape", "dtype", "type"])
def test_rest_that_does_not_fit_is_refused(wrong):
    *tensors, w1, b1, w2, b2 = RestOp().draw(1, 3, 2, 3, 5, F32)
    q, k, v, *state, alpha, eta, theta = tensors
    rest = {
        "shape": MemoryWeights(w1[:1], b1, w2, b2),
        "dtype": MemoryWeights(w1, b1.double(), w2, b2),
        "type": (w1, b1, w2, b2),
    }[wrong]
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    error, message = {
        "shape": (ValueError, r"rest.w1 must be \(2, 5, 3\), got \(1, 5, 3\)"),
        "dtype": (ValueError, "rest.b1 must be torch.float32 on cpu, got torch.float64 on cpu"),
        "type": (TypeError, "rest must be MemoryWeights, got tuple"),
    }[wrong]
    with pytest.raises(error, match=message):
        memory_scan(q, k, v, *halves, alpha, eta, theta, None, rest)


def test_residual_norm_that_is_no_bool_is_refused():
    q, k, v, *state, alpha, eta, theta = ScanOp().draw(1, 3, 2, 3, 5, F32)
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    for call in (
        lambda: memory_scan(q, k, v, *halves, alpha, eta, theta, residual_norm="no"),
        lambda: memory_read(q, halves[0], residual_norm="no"),
        lambda: NeuralMemory(8, residual_norm="no"),
    ):
        with pytest.raises(TypeError, match="residual_norm must be a bool, got str"):
            call()
