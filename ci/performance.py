"""The times of a package's operations at two commits, from the result files that each has.

Our own rows are compared, by the GPU's clock: graph time and event time. Wall time is the host's.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import NamedTuple

FILE = re.compile(r"(?P<gpu>[a-z0-9]+)-torch(?P<torch>\d[\d.]*)-triton(?P<triton>\d[\d.]*)\.csv")
CLOCKS = ("graph", "event")
# Two runs of one commit differ by less.
NOISE = 1.05


class Row(NamedTuple):
    gpu: str
    op: str
    case: str
    part: str
    provider: str
    dtype: str
    timing: str

    def __str__(self) -> str:
        return f"{self.op} {self.case} {self.part} {self.dtype} {self.timing}, {self.gpu}"


class Time(NamedTuple):
    """Milliseconds: the median, and what a fifth of the samples is below, and above."""

    ms: float
    low: float
    high: float


class Change(NamedTuple):
    row: Row
    old: Time
    new: Time

    @property
    def slower(self) -> bool:
        return self.new.ms > NOISE * self.old.ms and self.new.low > self.old.high

    @property
    def faster(self) -> bool:
        return self.old.ms > NOISE * self.new.ms and self.old.low > self.new.high

    def __str__(self) -> str:
        times = self.new.ms / self.old.ms
        return f"{self.row}: {self.old.ms:.4g} ms, now {self.new.ms:.4g}, {times:.2f} of it"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.strip(".").split(".")))


def rows(files: Mapping[str, str]) -> dict[Row, Time]:
    """Our rows of result files, given by their names; of one GPU's the newest versions' win."""
    found = {}
    known = [(match, text) for name, text in files.items() if (match := FILE.fullmatch(name))]
    known.sort(key=lambda each: (numbers(each[0]["torch"]), numbers(each[0]["triton"])))
    for match, text in known:
        for line in csv.DictReader(text.splitlines()):
            if not line["provider"].startswith("fusewright") or line["timing"] not in CLOCKS:
                continue
            what = (line[name] for name in ("op", "case", "pass", "provider", "dtype", "timing"))
            low, high = (line[name] or line["ms"] for name in ("ms_p20", "ms_p80"))
            found[Row(match["gpu"], *what)] = Time(float(line["ms"]), float(low), float(high))
    return found


def changes(old: dict[Row, Time], new: dict[Row, Time]) -> list[Change]:
    """What was measured at both commits."""
    return [Change(row, old[row], new[row]) for row in old if row in new]
