"""What bad input is answered with, before anything is touched, and which backend serves."""

from __future__ import annotations

import pytest
import torch
from fusewright.feed_forward import FeedForward, SwiGLU, feed_forward, silu_mul
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright_testkit.conformance.input import NothingRuns

F64, BF16 = torch.float64, torch.bfloat16
X, A, C = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(4, 5)
BAD = [
    (lambda: silu_mul([1.0], X), TypeError, "gate must be a tensor, got list"),
    (lambda: silu_mul(X, 1.0), TypeError, "up must be a tensor, got float"),
    (lambda: silu_mul(X.int(), X.int()), TypeError, "gate must be float32.*int32"),
    (lambda: silu_mul(X, X.to(torch.complex64)), TypeError, "up must be.*complex64"),
    (lambda: silu_mul(X.to_sparse(), X), TypeError, "gate.*strided tensor, got layout"),
    (lambda: silu_mul(X, X[:2]), ValueError, r"up must have gate's shape \(3, 8\), got \(2, 8\)"),
    (lambda: silu_mul(X, X[:, :1]), ValueError, r"shape \(3, 8\), got \(3, 1\)"),
    (lambda: silu_mul(X, X.half()), ValueError, "gate's dtype torch.float32, got torch.float16"),
    (lambda: silu_mul(X, X.to("meta")), ValueError, "gate's device cpu, got meta"),
    (lambda: silu_mul(X, X, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: silu_mul(X.to(F64), X.to(F64), backend="triton"), RuntimeError, "not torch.float64"),
    (lambda: silu_mul_halves(X[:, 1:]), ValueError, r"two halves.*got \[3, 7\]"),
    (lambda: silu_mul_halves(X[0, 0]), ValueError, r"two halves.*got \[\]"),
    (lambda: SwiGLU(0, 5), ValueError, "dim must be at least 1, got 0"),
    (lambda: SwiGLU(8, -1), ValueError, "hidden_width must be at least 1, got -1"),
    (lambda: SwiGLU(8, 5.0), TypeError, "hidden_width must be a whole number, got float"),
    (lambda: SwiGLU(True, 5), TypeError, "dim must be a whole number, got bool"),
    (lambda: SwiGLU(8, 5, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: SwiGLU(7, 5)(X), ValueError, r"x must be \[..., 7\], got shape \(3, 8\)"),
    (lambda: SwiGLU(8, 5)(torch.zeros(())), ValueError, r"got shape \(\)"),
    (lambda: SwiGLU(8, 5)([1.0]), TypeError, "x must be a tensor, got list"),
    (lambda: SwiGLU(8, 5)(X.int()), TypeError, "x must be.*int32"),
    (lambda: SwiGLU(8, 5)(X.half()), ValueError, "dtype torch.float32 outside autocast, got.*16"),
    (lambda: SwiGLU(8, 5)(X.to("meta")), ValueError, "weight's device cpu, got meta"),
    (lambda: feed_forward([1.0], A, C), TypeError, "x must be a tensor, got list"),
    (lambda: feed_forward(X, A.int(), C), TypeError, "hidden_weight must be float32.*int32"),
    (lambda: feed_forward(X, A, C.to_sparse()), TypeError, "output_weight.*got layout"),
    (lambda: feed_forward(X[0, 0], A, C), ValueError, "x must have at least one axis"),
    (lambda: feed_forward(X, A.mT, C), ValueError, r"hidden_weight.*\(F, 8\).*got \(8, 5\)"),
    (lambda: feed_forward(X, A[0], C), ValueError, r"hidden_weight.*\(F, 8\).*got \(8,\)"),
    (lambda: feed_forward(X, A, C.mT), ValueError, r"output_weight.*\(M, 5\).*got \(5, 4\)"),
    (lambda: feed_forward(X, A.to("meta"), C), ValueError, "x's device cpu, got meta"),
    (lambda: feed_forward(X, A, C.half()), ValueError, "x's dtype torch.float32, got.*float16"),
    (lambda: feed_forward(X, A, C, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: FeedForward(0, 5), ValueError, "dim must be at least 1, got 0"),
    (lambda: FeedForward(8, 5.0), TypeError, "hidden_width must be a whole number, got float"),
    (lambda: FeedForward(8, 5, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: FeedForward(7, 5)(X), ValueError, r"hidden_weight.*\(F, 8\).*got \(32, 7\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", [FeedForward, SwiGLU])
def test_input_that_a_layer_refuses_touches_no_memory(kind, backend, device):
    wrong = torch.zeros(3, 9, device=device)
    layer = kind(8, 5, backend=backend, device=device)
    with NothingRuns(), pytest.raises(ValueError, match=r"(, 9\)|\(3, 9\))"):
        layer(wrong)


@pytest.mark.parametrize("kind", [FeedForward, SwiGLU])
def test_layer_that_the_kernels_cannot_serve_says_so(kind, device):
    layer = kind(8, 5, backend="triton", device=device, dtype=F64)
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        layer(torch.zeros(3, 8, device=device, dtype=F64))
