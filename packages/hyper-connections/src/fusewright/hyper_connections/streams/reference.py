"""The family in plain torch: the specification, the yardstick of the tests, what a CPU runs.

Streams are ``[..., n, C]`` in fp32 or fp64, and everything beside them but a layer's input and
output is in their dtype. The gradients that the kernels write out stand here too, of flat streams
``[tokens, n, C]``.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

Tensor = torch.Tensor


def parts_of(streams: int) -> list[int]:
    """The rows of Phi for pre, post and res."""
    return [streams, streams, streams * streams]


def gate_logits(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """s and s_hat ``[..., n (n + 2)]``, and 1 / rms(v) ``[..., 1]``."""
    v = x.flatten(-2)
    m = F.linear(v, phi)
    scale = (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    of_parts = zip(alpha, m.split(parts_of(x.shape[-2]), -1), strict=True)
    s = torch.cat([one * part for one, part in of_parts], -1) * scale + bias
    return s, m * scale, scale


def coefficients(s: Tensor, streams: int) -> tuple[Tensor, Tensor, Tensor]:
    """pre and post ``[..., n]``, and the logits of res ``[..., n, n]``."""
    pre, post, res = s.split(parts_of(streams), -1)
    return pre.sigmoid(), 2.0 * post.sigmoid(), res.unflatten(-1, (streams, streams))


def stream_read(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """u in a dtype, post, the logits of res, s_hat, and 1 / rms(v) ``[...]``."""
    s, s_hat, scale = gate_logits(x, phi, alpha, bias, eps)
    pre, post, logits = coefficients(s, x.shape[-2])
    u = (pre.unsqueeze(-2) @ x).squeeze(-2)
    return u.to(dtype), post, logits, s_hat, scale.squeeze(-1)


def stream_write(x: Tensor, res: Tensor, post: Tensor, y: Tensor, origin: Tensor | None) -> Tensor:
    """res x + post y, less the origin."""
    new = res @ x + post.unsqueeze(-1) * y.to(x.dtype).unsqueeze(-2)
    return new if origin is None else new - origin


def stream_write_backward(
    g: Tensor, x: Tensor, res: Tensor, post: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, res, post and y."""
    dpost = (g @ y.to(g.dtype).unsqueeze(-1)).squeeze(-1)
    dy = (post.unsqueeze(-2) @ g).squeeze(-2).to(y.dtype)
    return res.mT @ g, g @ x.mT, dpost, dy


def stream_read_backward(
    du: Tensor,
    dpost: Tensor,
    dlogits: Tensor,
    dmixed: Tensor | None,
    dorigin: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    s_hat: Tensor,
    scale: Tensor,
    negated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, Phi, alpha and b."""
    n = x.shape[-2]
    du, v = du.to(x.dtype), x.flatten(-2)
    alphas = alpha.repeat_interleave(torch.tensor(parts_of(n), device=x.device))
    gate = (alphas * s_hat + bias).sigmoid()
    slope, pre = gate * (1.0 - gate), gate[:, :n]
    dpre = (x @ du.unsqueeze(-1)).squeeze(-1)
    ds = [slope[:, :n] * dpre, 2.0 * slope[:, n : 2 * n] * dpost, dlogits.flatten(-2)]
    dbias = torch.cat(ds, -1)
    ds_hat = alphas * dbias
    dm = scale.unsqueeze(-1) * ds_hat
    pull = -(ds_hat * s_hat).sum(-1) * scale.square() / v.shape[-1]
    dx = (dm @ phi + pull.unsqueeze(-1) * v).view(x.shape)
    dx = dx + pre.unsqueeze(-1) * du.unsqueeze(-2)
    if dmixed is not None:
        dx = dx + dmixed
    if dorigin is not None:
        dx = dx - dorigin if negated else dx + dorigin
    dalpha = torch.stack([part.sum() for part in (dbias * s_hat).split(parts_of(n), -1)])
    return dx, dm.mT @ v, dalpha, dbias.sum(0)
