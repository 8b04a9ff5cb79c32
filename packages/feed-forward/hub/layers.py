"""Gating that ``kernelize`` puts in place of that of other libraries.

A layer has no state: what it annotates is that of the module whose forward pass it takes.
"""

from __future__ import annotations

from torch import Tensor, nn

from .gating.silu_mul import silu_mul


class SiluAndMul(nn.Module):
    """Of one tensor whose last axis is gate and input, one after the other."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu_mul(gate, up)


class SwiGLUMLP(nn.Module):
    """As Llama, Mistral, Qwen2 and Qwen3 of ``transformers`` have it."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        activation = type(self.act_fn).__name__
        if activation not in ("SiLU", "SiLUActivation"):
            raise ValueError(f"the network must be gated by SiLU, got {activation}")
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))
