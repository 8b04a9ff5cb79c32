"""TransformerNP in plain torch over the same weights: what the harness compares with, and what the
tests hold the model against.

Unpruned it is the model as one writes it first: keys and values of all rows, cut to the context
rows afterwards; every row through every block, the targets cut out last. Pruned, it leaves out what
no target reads, as the model does. Networks of the mixture head are one dense product in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from fusewright.mixture_head import Scale
from torch import Tensor, nn

from ..models.checkpointing import recomputed
from ..models.transformer_np import TransformerNP
from ..models.transformer_np.layers import Attention, Block, FeedForward

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
# Of q, k and v, heads before columns: [B, T, H, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def forward(
    model: TransformerNP,
    x_context: Tensor,
    y_context: Tensor,
    x_target: Tensor,
    *,
    pruned: bool,
    attend: Attend = torch_attention,
) -> Tensor:
    """What ``model(x_context, y_context, x_target)`` returns; ``attend`` is whose attention."""
    context, config = x_context.shape[1], model.config
    h = embedding(model, x_context, y_context, x_target)
    for number, block in enumerate(cast(list[Block], model.blocks)):
        first = context if pruned and number == config.layers - 1 else 0
        mix = partial(
            attention, block.attention, context=context, first=first, pruned=pruned, attend=attend
        )
        h = recomputed(config.checkpointing, layer, block, h, mix, first)
    t = h[:, -x_target.shape[1] :]
    return head(model, t if model.final_norm is None else norm(model.final_norm, t))


def layer(block: Block, h: Tensor, mix: Callable[[Tensor], Tensor], first: int) -> Tensor:
    """A block, of rows from ``first`` on; ``mix`` is its attention."""
    if block.pre_norm:
        h = h[:, first:] + mix(norm(block.attention_norm, h))
        return h + feed_forward(block.feed_forward, norm(block.feed_forward_norm, h))
    h = norm(block.attention_norm, h[:, first:] + mix(h))
    return norm(block.feed_forward_norm, h + feed_forward(block.feed_forward, h))


def embedding(
    model: TransformerNP, x_context: Tensor, y_context: Tensor, x_target: Tensor
) -> Tensor:
    """SiLU([x ; waves of x ; y ; indicator] E1) E2, with y and indicator 0 in target rows."""
    x = torch.cat([x_context, x_target], dim=1)
    octaves = range(model.config.frequencies)
    phases = [2**n * math.pi / 4 * x[..., i] for i in range(x.shape[-1]) for n in octaves]
    waves = [wave(phase) for wave in (torch.sin, torch.cos) for phase in phases]
    if waves:
        x = torch.cat([x, torch.stack(waves, dim=-1)], dim=-1)
    marks = F.pad(y_context, (0, 1), value=1.0) if model.config.indicator else y_context
    rows = torch.cat([x, F.pad(marks, (0, 0, 0, x_target.shape[1]))], dim=-1)
    return model.embedder.output(F.silu(model.embedder.hidden(rows)))


def norm(module: nn.LayerNorm, h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], module.weight, eps=module.eps)


def attention_operands(
    module: Attention, a: Tensor, context: int, first: int, *, pruned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[B, T - first, H, D]`` of the rows from ``first`` on, k and v ``[B, M, H, D]``."""
    q = module.query(a[:, first:]).unflatten(-1, (module.heads, -1))
    keys = module.key_value(a[:, :context] if pruned else a)
    k, v = keys[:, :context].unflatten(-1, (2, module.heads, -1)).unbind(-3)
    return q, k, v


def attention(
    module: Attention, a: Tensor, *, context: int, first: int, pruned: bool, attend: Attend
) -> Tensor:
    q, k, v = attention_operands(module, a, context, first, pruned=pruned)
    return module.output(attend(q, k, v).flatten(-2))


def feed_forward(module: FeedForward, b: Tensor) -> Tensor:
    return module.output(F.silu(module.hidden(b)))


def head(model: TransformerNP, t: Tensor) -> Tensor:
    """(w, mu, s) of every component, ``[B, N, d_y, K, 3]``, never narrower than fp32."""
    weight = model.head.output
    hidden = F.silu(model.head.hidden(t)).unflatten(-1, weight.shape[:2])
    params = torch.einsum("bngs,gsp->bngp", hidden, weight)
    grid = (model.config.y_width, model.config.components)
    return params.to(torch.promote_types(params.dtype, torch.float32)).unflatten(-2, grid)


def log_likelihood(params: Tensor, y: Tensor, scale: Scale) -> Tensor:
    """logsumexp_k [ log pi_k - ((y - mu_k) / sigma_k)^2 / 2 - log sigma_k - log(2 pi) / 2 ]."""
    logits, mean, raw = params.unbind(-1)
    log_sigma = raw.clamp(-7.0, 5.0) if scale == "log_sigma" else (F.softplus(raw) + 1e-3).log()
    z = (y.unsqueeze(-1) - mean) * (-log_sigma).exp()
    component = logits.log_softmax(-1) - 0.5 * z.square() - log_sigma - HALF_LOG_2_PI
    return component.logsumexp(-1)
