"""The numbers by which streams are read, written and mixed, to look at them.

    s = alpha (Phi v) / rms(v) + b                  n numbers, n more, and n x n
    pre = sigma(s_pre)    post = 2 sigma(s_post)    logits of res = s_res

with v the n streams of a token, one after the other. ``stream_read`` has the axes and the paper.
Plain torch, in fp32 (in fp64 for fp64 streams), under autocast too; autograd saves what it needs.
"""

from __future__ import annotations

import torch

from .._core.checks import checked_number
from .._core.precision import wide, without_autocast
from . import reference
from .checks import check_gates

Tensor = torch.Tensor


def stream_coefficients(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """How each token's streams are read and written to, and the logits of how they are mixed.

    Args:
        x, phi, alpha, bias, eps: as in ``stream_read``.

    Returns:
        pre and post, ``[..., n]``, and the logits of res, ``[..., n, n]``, in fp32 (in fp64 for
        fp64 streams). Differentiable in all, twice.

    Raises:
        TypeError: a tensor is not floating or not strided, or eps is no number.
        ValueError: shapes or devices do not agree, or eps is negative or not finite.
    """
    check_gates(x, phi, alpha, bias)
    eps = checked_number("eps", eps, lowest=0.0)
    x = wide(x)
    phi, alpha, bias = (parameter.to(x.dtype) for parameter in (phi, alpha, bias))
    with without_autocast(x.device):
        s, *_ = reference.gate_logits(x, phi, alpha, bias, eps)
        return reference.coefficients(s, x.shape[-2])
