"""Which implementation torch's own attention would take."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from ._core.checks import check_dtype
from .common.checks import check_attention


def sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> SDPBackend:
    """The backend that ``torch.nn.functional.scaled_dot_product_attention`` takes for this
    attention without a mask, under the ``torch.nn.attention.sdpa_kernel`` context that holds now.

    Args:
        q: ``[B, Nq, H, D]``, as in :func:`rectangular_attention`; the heads come before the tokens
            only in the call of torch. Autocast does not change q: under it, pass what it casts to.
        k, v: ``[B, M, G, D]``, G a divisor of H; where it is smaller, with ``enable_gqa``.

    Returns:
        A member of ``torch.nn.attention.SDPBackend``, such as ``FLASH_ATTENTION``; ``ERROR`` where
        the context leaves none that can serve. Nothing is computed.

    Raises:
        TypeError, ValueError: as :func:`rectangular_attention`.
    """
    check_attention(q, k, v)
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    shared = k.shape[2] < q.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    try:
        return SDPBackend(torch._fused_sdp_choice(q, k, v, enable_gqa=shared))
    except RuntimeError:
        # What some releases raise, and on some devices, in place of this answer.
        return SDPBackend.ERROR
