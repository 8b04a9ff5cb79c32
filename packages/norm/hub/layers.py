"""Norms that ``kernelize`` puts in place of those of ``transformers``.

A layer has no state: what it annotates is that of the module whose forward pass it takes.
"""

from __future__ import annotations

from torch import Tensor, nn

from .row_norm.rms_norm import rms_norm
from .row_norm.rms_norm_gated import rms_norm_gated


class RMSNorm(nn.Module):
    """As Llama, Mistral, Qwen2 and Qwen3 have it."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """As Gemma and Qwen3.5 have it, with a weight to which one is added."""

    can_torch_compile = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps, weight_offset=1.0)


class RMSNormGated(nn.Module):
    """As Qwen3.5 and Qwen3-Next have it, with a gate of SiLU."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        # An activation of another name is an error of the function.
        return rms_norm_gated(
            hidden_states,
            gate,
            self.weight,
            eps=self.variance_epsilon,
            activation=self.activation,  # type: ignore[arg-type]
        )
