"""What the ops call once triton is needed."""

from __future__ import annotations

from ._heads_launch import launch_silu_heads, launch_silu_heads_backward
from ._mixture_launch import launch_mixture, launch_mixture_backward

__all__ = [
    "launch_mixture",
    "launch_mixture_backward",
    "launch_silu_heads",
    "launch_silu_heads_backward",
]
