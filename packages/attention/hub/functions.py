"""Attention as programs call FlashAttention, such as ``transformers`` with a repository of kernels
for its ``attn_implementation``.

Causal attention, of a window of tokens or of all, over documents and caches; attention of all to
all. What else these programs may ask for is an error. Same inputs, same bits, always.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .rectangular.rectangular_attention import rectangular_attention
from .window.sliding_window_attention import sliding_window_attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v for each head.

    Args:
        q: ``[B, Nq, H, D]``, where ``causal`` the last Nq of T tokens.
        k, v: ``[B, T, G, D]`` and ``[B, T, G, Dv]``, G a divisor of H.
        dropout_p, softcap: none.
        softmax_scale: None takes 1 / sqrt(D).
        causal: whether a token sees those before it alone.
        window_size: where ``causal``, how many tokens before it a token sees, -1 for all; the
            second number counts for nothing. (-1, -1) where not.
        s_aux: ``[H]``, one score more in the softmax of each row of a head.

    Returns:
        ``[B, Nq, H, Dv]``, in q's dtype. Differentiable in q, k, v and s_aux.

    Raises:
        ValueError: dropout, a cap of the scores, or a window of what is not causal is asked for.
        TypeError, ValueError, RuntimeError: as ``sliding_window_attention``.
    """
    check_options(dropout_p, causal, window_size, softcap)
    if not causal:
        return rectangular_attention(q, k, v, scale=softmax_scale, sinks=s_aux)
    window = window_size[0] + 1 or k.shape[1]
    return sliding_window_attention(q, k, v, window, scale=softmax_scale, sinks=s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Causal attention of documents that lie one after the other, or of the last token of each.

    Args:
        q: ``[T, H, D]``, or ``[N, H, D]`` for the last token of each of N documents.
        k, v: ``[T, G, D]`` and ``[T, G, Dv]``, G a divisor of H.
        cu_seqlens_k: ``[N + 1]``, int32 or int64: document d lies from ``cu_seqlens_k[d]`` to
            ``cu_seqlens_k[d + 1]``.
        cu_seqlens_q: the same numbers, or 0 to N.
        max_seqlen_q: 1 where q has the last tokens.
        max_seqlen_k: the longest document; read where q has the last tokens.
        dropout_p, softmax_scale, causal, window_size, softcap, s_aux: as in `flash_attn_func`, but
            causal, as it has to be.

    Returns:
        ``[T, H, Dv]`` or ``[N, H, Dv]``, in q's dtype.

    Raises:
        ValueError: as `flash_attn_func`; or it is not causal, or q holds other tokens.
        TypeError, ValueError, RuntimeError: as ``sliding_window_attention``.
    """
    check_options(dropout_p, causal, window_size, softcap)
    documents = len(cu_seqlens_k) - 1
    if not causal:
        raise ValueError("attention of documents must be causal")
    window = window_size[0] + 1 or len(k)
    attention = partial(sliding_window_attention, window=window, scale=softmax_scale, sinks=s_aux)
    if len(q) == len(k):
        return attention(q[None], k[None], v[None], cu_seqlens=cu_seqlens_k)[0]
    if len(q) != documents or max_seqlen_q != 1:
        raise ValueError(
            f"q must hold the {len(k)} tokens of k, or the last one of each of {documents} "
            f"documents, got {len(q)}"
        )
    # Rows that are padded on the left, so that the last token of each is the row's last.
    longest = int(max_seqlen_k)
    lengths, ends = cu_seqlens_k.diff(), cu_seqlens_k[1:]
    rows = ends[:, None] - torch.arange(longest, 0, -1, device=k.device)
    k, v = (x[rows.clamp(min=0)] for x in (k, v))
    bounds = torch.stack([longest - lengths, torch.full_like(lengths, longest)], 1)
    return attention(q[:, None], k, v, cu_seqlens=bounds)[:, 0]


def check_options(
    dropout_p: float, causal: bool, window_size: tuple[int, int], softcap: float
) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if softcap:
        raise ValueError(f"softcap must be 0, got {softcap}")
    if not causal and tuple(window_size) != (-1, -1):
        raise ValueError(f"attention to a window must be causal, got {tuple(window_size)}")
