"""Our attention, as ``transformers`` calls attentions."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from fusewright.attention import sliding_window_attention
from torch import Tensor, nn

from ..choices import Backend


def name_of(backend: Backend) -> str:
    """What ``transformers`` knows the attention by."""
    return "fusewright" if backend == "auto" else f"fusewright_{backend}"


def register(backend: Backend) -> str:
    """Make it known; masks are those of torch's attention. Returns its name."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    name = name_of(backend)
    AttentionInterface.register(name, partial(attend, backend=backend))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    backend: Backend,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of all tokens, or of one new token to those before it; torch's, with one
    warning that says why, where more is asked for.

    Args:
        query: ``[B, H, Nq, D]``.
        key, value: ``[B, G, T, D]``.
        attention_mask: None where it is causal and nothing is padding.

    Returns:
        ``[B, Nq, H, D]``, and no weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reason = None
    if attention_mask is not None:
        reason = "a mask, of padding, packed documents or a window"
    elif dropout:
        reason = f"dropout of {dropout}"
    elif queries not in (1, keys) or (not causal and queries > 1):
        reason = f"{queries} queries of {keys} keys" if causal else "no causal attention"
    if reason is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return sliding_window_attention(q, k, v, keys, scale=scaling, backend=backend), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    warnings.warn(
        f"wanted causal attention of all tokens; got {reason}: torch's takes its place",
        stacklevel=2,
    )
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )
