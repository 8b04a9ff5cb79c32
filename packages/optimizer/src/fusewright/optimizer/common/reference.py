"""What the references of several optimizers share, in plain torch."""

from __future__ import annotations

import torch

from .step import Step

Tensor = torch.Tensor


def decide(step: Step, max_grad_norm: float | None, device: torch.device) -> Tensor:
    """Write norm and skipped; return what gradients are multiplied by, in fp64."""
    factor = torch.ones((), dtype=torch.float64, device=device)
    skips = torch.zeros((), dtype=torch.bool, device=device)
    if step.grad_scale is not None:
        factor = factor / step.grad_scale.double()
    if step.found_inf is not None:
        skips = skips | (step.found_inf.reshape(()) > 0.0)
    if step.squares is not None:
        norm = step.squares.sum().sqrt() * factor.abs()
        step.norm.copy_(norm)
        if max_grad_norm is not None:
            clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            factor = factor * clip
            # inf becomes NaN.
            norm = norm * clip
        skips = skips | is_too_large(norm, step.norm_below)
    step.skipped.copy_(skips)
    step.skipped_count.add_(skips)
    return factor.reshape(())


def is_too_large(norm: Tensor, norm_below: float) -> Tensor:
    """Whether a step with gradients of this norm is skipped: for NaN too."""
    return ~(norm < norm_below)


def in_fp64(x: float | Tensor) -> float | Tensor:
    """A group's number: a tensor of one as 0-d fp64."""
    return x.double().reshape(()) if isinstance(x, Tensor) else x


def rounded(x: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x


def adamw_root(v: Tensor, t: Tensor, beta2: float | Tensor, eps: float | Tensor) -> Tensor:
    """AdamW's denominator sqrt(v / (1 - beta2^t)) + eps, for t in fp64."""
    # Near 1 the powers of a beta leave fp32 few bits.
    return v.sqrt() * (1.0 - beta2**t).rsqrt().to(v.dtype) + rounded(eps, v.dtype)
