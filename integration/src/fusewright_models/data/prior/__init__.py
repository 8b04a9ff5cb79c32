"""Functions of many kinds, for a network that is to predict tables that it has not seen."""

from __future__ import annotations

from .tasks import INPUTS, PriorTasks

__all__ = ["INPUTS", "PriorTasks"]
