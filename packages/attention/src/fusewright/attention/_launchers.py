"""What the ops call once triton is needed."""

from __future__ import annotations

from ._backward import launch_backward
from ._forward import launch_forward
from ._problem import Band
from ._rotary_launch import launch_rotary, launch_rotary_backward

__all__ = [
    "Band",
    "launch_backward",
    "launch_forward",
    "launch_rotary",
    "launch_rotary_backward",
]
