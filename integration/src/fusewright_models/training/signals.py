"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# What a terminal, a scheduler that takes the machine back, and one that gives notice of it send.
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


class StopSignals:
    """Within it a first signal is kept, for the training to end after the step that runs; a second
    SIGINT raises KeyboardInterrupt. What is ignored stays ignored, and outside the main thread
    nothing is changed.

    Attributes:
        received: the first signal.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether the run is to stop."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            # Not every system has the last.
            asked = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
            for number in asked:
                # A handler that is None was set by no Python, and could not be put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
