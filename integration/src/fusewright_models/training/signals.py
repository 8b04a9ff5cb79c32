"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from .processes import ALONE, Processes

# What a terminal, a scheduler that takes the machine back, and one that gives notice of it send.
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


class StopSignals:
    """Within it a first signal is kept, for the training to end after the step that runs; a second
    SIGINT raises KeyboardInterrupt. What is ignored stays ignored, and outside the main thread
    nothing is changed.

    Of several processes the signal that any has received is everyone's once all have asked for it,
    and a second SIGINT is as good as one: torchrun passes on the SIGINT that a terminal has sent to
    all of them already, and kills those that take too long.

    Args:
        processes: that stop together.

    Attributes:
        received: the first signal, of any process.
        own: the first one that this process was sent.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.received: signal.Signals | None = None
        self.own: signal.Signals | None = None
        self.before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether the run is to stop; all processes ask at one time."""
        number = self.processes.greatest(self.own or 0)
        if number:
            self.received = signal.Signals(number)
        return number > 0

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
        insists = self.own is not None and number == signal.SIGINT
        if insists and not self.processes.several:
            raise KeyboardInterrupt
        self.own = self.own or signal.Signals(number)
