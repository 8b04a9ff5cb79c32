"""What bad input is answered with, before anything is touched, and which backend serves."""

from __future__ import annotations

import pytest
import torch
from fusewright.mixture_head import (
    GaussianMixtureHead,
    grouped_heads,
    mixture_cdf,
    mixture_mean,
    mixture_nll,
    mixture_quantiles,
    mixture_sample,
    mixture_variance,
)

F32, F64 = torch.float32, torch.float64
P, Y = torch.zeros(3, 4, 3), torch.zeros(3)
X, HIDDEN, OUTPUT = torch.zeros(3, 8), torch.zeros(10, 8), torch.zeros(2, 5, 3)
META = torch.zeros(3, device="meta")


def levels_of(levels):
    return mixture_quantiles(P, levels)


BAD = [
    (lambda: mixture_nll(P[..., :2], Y), ValueError, r"\[\.\.\., K, 3\].*got shape \(3, 4, 2\)"),
    (lambda: mixture_nll(P[:, :0], Y), ValueError, r"at least one.*got shape \(3, 0, 3\)"),
    (lambda: mixture_mean(torch.zeros(3)), ValueError, r"params must be.*got shape \(3,\)"),
    (lambda: mixture_nll(P, Y[:2]), ValueError, r"y must have shape \(3,\).*got \(2,\)"),
    (lambda: mixture_nll(P, Y, Y), TypeError, "mask must be a boolean.*float32"),
    (lambda: mixture_nll(P, Y, [True]), TypeError, "mask must be a boolean.*list"),
    (lambda: mixture_nll(P, Y, Y[:2] > 0), ValueError, r"y's shape \(3,\), got \(2,\)"),
    (lambda: mixture_nll(P, Y, P[..., 0] > 0), ValueError, r"y's shape \(3,\), got \(3, 4\)"),
    (lambda: mixture_nll(P, Y, META > 0), ValueError, "mask must be on y's device cpu, got meta"),
    (lambda: mixture_nll(P, Y, scale="sigma"), ValueError, "\"softplus\", got 'sigma'"),
    (lambda: mixture_nll(P, Y, log_sigma_range=1.0), ValueError, "two numbers, got 1.0"),
    (lambda: mixture_nll(P, Y, log_sigma_range=(2, 1)), ValueError, r"fall, got \(2.0, 1.0\)"),
    (lambda: mixture_nll(P, Y, log_sigma_range=(-30, 1)), ValueError, "from -20 to 20, got -30"),
    (lambda: mixture_nll(P, Y, log_sigma_range="ab"), TypeError, "must be a number, got str"),
    (lambda: mixture_nll(P, Y, eps=0.0), ValueError, "eps must be from 1e-06.*got 0.0"),
    (lambda: mixture_nll(P, Y, eps=float("nan")), ValueError, "eps must be.*got nan"),
    (lambda: mixture_nll(P, Y, eps=True), TypeError, "eps must be a number, got bool"),
    (lambda: mixture_cdf(P, Y.long()), TypeError, "y must be.*int64"),
    (lambda: mixture_cdf(P, META), ValueError, "device cpu, got meta"),
    (lambda: mixture_cdf(P, 0.0), TypeError, "y must be a tensor, got float"),
    (lambda: mixture_cdf(P, torch.zeros(5)), ValueError, r"shape \(3,\), got \(5,\)"),
    (lambda: mixture_cdf(P, torch.zeros(2, 1, 4)), ValueError, r"\(3,\), got \(2, 1, 4\)"),
    (lambda: mixture_mean([1.0]), TypeError, "params must be a tensor, got list"),
    (lambda: mixture_variance([1.0]), TypeError, "params must be a tensor, got list"),
    (lambda: mixture_sample([1.0]), TypeError, "params must be a tensor, got list"),
    (lambda: mixture_quantiles([1.0], [0.5]), TypeError, "params must be a tensor, got list"),
    (lambda: levels_of(0.5), TypeError, "levels must be a tensor or numbers, got float"),
    (lambda: levels_of([True]), TypeError, "levels must be a number, got bool"),
    (lambda: levels_of(["a"]), TypeError, "levels must be a number, got str"),
    (lambda: levels_of(P), ValueError, r"one axis, got shape \(3, 4, 3\)"),
    (lambda: levels_of(META), ValueError, "levels must be on.*cpu, got meta"),
    (lambda: levels_of(Y.long()), TypeError, "levels must be.*int64"),
    (lambda: grouped_heads(X[0, 0], HIDDEN, OUTPUT), ValueError, "one axis, got a scalar"),
    (lambda: grouped_heads(X, HIDDEN[:9], OUTPUT), ValueError, r"\(10, 8\).*got \(9, 8\)"),
    (lambda: grouped_heads(X, HIDDEN, OUTPUT[0]), ValueError, r"\[heads, S, 3\], got shape"),
    (lambda: grouped_heads(X, HIDDEN.half(), OUTPUT), ValueError, "x's dtype.*got torch.float16"),
    (lambda: grouped_heads(X, HIDDEN, OUTPUT, recompute=1), TypeError, "True or False, got int"),
    (lambda: GaussianMixtureHead(4, 6, 3, recompute="no"), TypeError, "or False, got str"),
    (lambda: GaussianMixtureHead(4, 0, 3), ValueError, "hidden_width must be at least 1, got 0"),
    (
        lambda: GaussianMixtureHead(4, 6, 3.0),
        TypeError,
        "components must be a whole.*got float",
    ),
    (lambda: GaussianMixtureHead(4, 6, True), TypeError, "components must be.*got bool"),
    (lambda: GaussianMixtureHead(4, 6, 3, stored_width=5), ValueError, "hidden_width, 6, got 5"),
    (lambda: GaussianMixtureHead(4, 6, 3, scale="sigma"), ValueError, "got 'sigma'"),
    (lambda: GaussianMixtureHead(4, 6, 3, backend="cuda"), ValueError, "got 'cuda'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()
