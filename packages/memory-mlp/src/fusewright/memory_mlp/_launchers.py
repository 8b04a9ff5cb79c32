"""What the ops call once triton is needed."""

from __future__ import annotations

from ._scan_backward_launch import launch_scan_backward
from ._scan_launch import launch_scan
from ._update_backward_launch import launch_memory_update_backward
from ._update_launch import launch_memory_update

__all__ = [
    "launch_memory_update",
    "launch_memory_update_backward",
    "launch_scan",
    "launch_scan_backward",
]
