"""What the ops call once triton is needed."""

from __future__ import annotations

from ._input_launch import launch_memory_input, launch_memory_input_backward
from ._read_launch import launch_read, launch_read_backward
from ._scan_backward_launch import launch_scan_backward
from ._scan_launch import launch_scan
from ._token_launch import (
    launch_count_tokens,
    launch_finite_tokens,
    launch_gated_tokens,
    launch_gated_tokens_backward,
    launch_kept_tokens,
)
from ._update_backward_launch import launch_memory_update_backward
from ._update_launch import launch_memory_update

__all__ = [
    "launch_count_tokens",
    "launch_finite_tokens",
    "launch_gated_tokens",
    "launch_gated_tokens_backward",
    "launch_kept_tokens",
    "launch_memory_input",
    "launch_memory_input_backward",
    "launch_memory_update",
    "launch_memory_update_backward",
    "launch_read",
    "launch_read_backward",
    "launch_scan",
    "launch_scan_backward",
]
