"""What the ops call once triton is needed."""

from __future__ import annotations

from ._silu_mul_launch import (
    launch_silu_mul,
    launch_silu_mul_backward,
    launch_silu_mul_halves,
    launch_silu_mul_halves_backward,
)

__all__ = [
    "launch_silu_mul",
    "launch_silu_mul_backward",
    "launch_silu_mul_halves",
    "launch_silu_mul_halves_backward",
]
