"""Grouped heads in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

The second layer is computed in fp32 (in fp64 for fp64 inputs), under autocast too. Gradients are
autograd's. The backward pass stands here for the derivatives of the op, first and second.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .._core.precision import wide, without_autocast

Tensor = torch.Tensor


def grouped_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """SiLU(x A^T) C: x ``[..., d]``, weights ``[G * S, d]`` and ``[G, S, 3]`` to ``[..., G, 3]``.

    The dense product has the dtype of x, or that of autocast; the second layer is fp32.
    """
    u = F.linear(x, hidden_weight).unflatten(-1, output_weight.shape[:2])
    return silu_heads(u, output_weight).contiguous()


def silu_heads(u: Tensor, weight: Tensor) -> Tensor:
    """SiLU(u) C: u ``[..., G, S]`` and weight ``[G, S, 3]`` to ``[..., G, 3]``, head by head."""
    with without_autocast(u.device):
        return torch.einsum("...gs,gsp->...gp", F.silu(wide(u)), wide(weight).to(wide(u).dtype))


def silu_heads_backward(dparams: Tensor, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(du, dweight) of silu_heads."""
    with without_autocast(u.device):
        u_wide = wide(u)
        dparams = dparams.to(u_wide.dtype)
        gate = u_wide.sigmoid()
        dhidden = torch.einsum("...gp,gsp->...gs", dparams, weight.to(u_wide.dtype))
        du = dhidden * gate * (1.0 + u_wide * (1.0 - gate))
        dweight = torch.einsum("...gs,...gp->gsp", u_wide * gate, dparams)
    return du.to(u.dtype), dweight.to(weight.dtype)


def grouped_heads_backward(
    dparams: Tensor, x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dhidden_weight, doutput_weight) of grouped_heads, from its inputs."""
    with without_autocast(x.device):
        u = F.linear(x, hidden_weight).unflatten(-1, output_weight.shape[:2])
        du, doutput = silu_heads_backward(dparams, u, output_weight)
        rows = du.reshape(math.prod(x.shape[:-1]), len(hidden_weight))
        dhidden = rows.mT @ x.reshape(len(rows), x.shape[-1])
        return (rows @ hidden_weight).view(x.shape), dhidden, doutput
