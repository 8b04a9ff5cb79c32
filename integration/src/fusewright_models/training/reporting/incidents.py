"""What goes wrong without ending a run, told once each time: steps that were skipped, spikes of the
loss or of the gradients, and steps that take too long.

All but a step that does not end is found in the lines of metrics alone: a run that is resumed finds
it where one that was not does, and a report finds it again.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..run_folder import is_of_training

# Log points that one is compared with, and how many of them there have to be.
COMPARED, FEWEST = 16, 8
# A loss so many standard deviations above their mean is a spike.
DEVIATIONS = 6.0
# A gradient norm so many times their median is one, too.
TIMES_NORM = 10.0
# Steps so many times as long as their median, which is so many seconds longer, have waited.
TIMES_LONG, LONGER = 5.0, 10.0
# A step that has not ended after so many seconds is told of while it lasts.
PATIENCE = 300.0


class Incidents:
    """Looks at lines of metrics as they come.

    Args:
        clip_norm: of the training.
    """

    def __init__(self, clip_norm: float) -> None:
        self.done = f"gradients were cut to a norm of {clip_norm:g} as ever, and nothing else done"
        self.losses, self.norms, self.paces = (deque[float](maxlen=COMPARED) for _ in range(3))
        # What has been told of and is not over.
        self.lasting: set[str] = set()
        self.step = 0

    def look(self, line: dict[str, Any]) -> list[str]:
        """What is to be told of a line, in sentences; nothing of one that is no training's."""
        if not is_of_training(line):
            return []
        first, self.step = self.step + 1, line["step"]
        steps = f"step {first}" if first == self.step else f"steps {first} to {self.step}"
        found = {kind: f"{steps}: {text}" for kind, text in self._found(line, first)}
        told = [text for kind, text in found.items() if kind not in self.lasting]
        self.lasting = {*found}
        return told

    def _found(self, line: dict[str, Any], first: int) -> Iterable[tuple[str, str]]:
        if skipped := line.get("skipped_steps"):
            yield (
                "skipped",
                f"{skipped} skipped, with losses or gradients that are not finite; parameters and "
                "moments are as if they had not been taken",
            )
        # Of skipped steps alone there are neither.
        if "loss" in line:
            loss, norm = line["loss"], line["gradient_norm"]
            usual = self._median(self.losses)
            if usual is not None and loss > self._highest_loss():
                yield "loss", f"loss {loss:.4g}, after {usual:.4g}; {self.done}"
            else:
                self.losses.append(loss)
            usual = self._median(self.norms)
            if usual is not None and norm > TIMES_NORM * usual:
                yield "norm", f"gradient norm {norm:.3g}, after {usual:.3g}; {self.done}"
            else:
                self.norms.append(norm)
        seconds, count = line["seconds"], line["step"] - first + 1
        pace, usual = seconds / count, self._median(self.paces)
        long = usual is not None and pace > TIMES_LONG * usual and seconds > count * usual + LONGER
        if usual is not None and long:
            yield (
                "pace",
                f"{seconds:.0f} s, after {count * usual:.1f} s for as many before; data or device "
                "were waited for, and nothing done",
            )
        else:
            self.paces.append(pace)

    def _highest_loss(self) -> float:
        return statistics.mean(self.losses) + DEVIATIONS * statistics.pstdev(self.losses)

    @staticmethod
    def _median(values: deque[float]) -> float | None:
        return statistics.median(values) if len(values) >= FEWEST else None


class Watch:
    """Within it a thread tells, once each time, that a step does not end.

    Args:
        say: is told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.ended, self.came = threading.Event(), threading.Event()
        self.step = 0

    def comes(self, step: int) -> None:
        """A step or what follows it has ended."""
        self.step = step
        self.came.set()

    def __enter__(self) -> Watch:
        self.ended.clear()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.came.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.ended.is_set():
            if not self.came.wait(PATIENCE):
                self.say(
                    f"nothing has ended for {PATIENCE:g} s since step {self.step}: data, device or "
                    "other processes are waited for, and nothing is done"
                )
                self.came.wait()
            self.came.clear()
