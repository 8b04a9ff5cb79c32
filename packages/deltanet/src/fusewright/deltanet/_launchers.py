"""What the ops call once triton is needed."""

from __future__ import annotations

from ._backward import launch_rule_backward
from ._convolution import launch_short_convolution, launch_short_convolution_backward
from ._forward import launch_rule
from ._gated_norm_kernels import launch_gated_norm, launch_gated_norm_backward
from ._step_kernels import launch_step

__all__ = [
    "launch_gated_norm",
    "launch_gated_norm_backward",
    "launch_rule",
    "launch_rule_backward",
    "launch_short_convolution",
    "launch_short_convolution_backward",
    "launch_step",
]
