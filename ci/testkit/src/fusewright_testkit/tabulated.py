"""The numbers of result files by what they have in common, and markdown tables of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Key(NamedTuple):
    """What the numbers in one line of a table have in common."""

    op: str
    dtype: str
    passed: str
    case: str
    unit: str


class Cell(NamedTuple):
    """One provider's median in microseconds, and its rate in the unit of the key."""

    microseconds: float
    rate: float


Lines = dict[Key, dict[str, Cell]]
# MiB of each provider, by op, dtype and case.
Memory = dict[tuple[str, str, str], dict[str, float]]


def short(x: float) -> str:
    """``x`` to three significant digits, but at most two after the point."""
    return f"{x:.{min(2, max(0, 2 - math.floor(math.log10(x))))}f}"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def headed(header: str, lines: Iterable[Sequence[str]], left: int) -> str:
    """A markdown table below ``a | b | c``, all columns but the first few to the right."""
    names = header.split(" | ")
    rule = ["---"] * left + ["---:"] * (len(names) - left)
    return markdown((names, rule, *lines))


def table(lines: Lines, rates: bool) -> str:
    """A markdown table, a column for each provider, the fastest of each line in bold."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(lines.values())))
    rows = [["op", "case", "pass", *names], ["---"] * 3 + ["---:"] * len(names)]
    for key, cells in lines.items():
        row = [f"`{key.op}` {key.dtype}", key.case, key.passed]
        fastest = min(cell.microseconds for cell in cells.values())
        for name in names:
            cell = cells.get(name)
            text = short(cell.microseconds) if cell else ""
            text += f" · {short(cell.rate)}" if cell and rates else ""
            row.append(f"**{text}**" if cell and cell.microseconds == fastest else text)
        rows.append(row)
    return markdown(rows)


def memory_table(memory: Memory) -> str:
    """A markdown table, a column for each provider, the least of each case in bold."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(memory.values())))
    rows = [["op", "case", *names], ["---"] * 2 + ["---:"] * len(names)]
    for (op, dtype, case), taken in memory.items():
        row = [f"`{op}` {dtype}", case]
        for name in names:
            text = f"{taken[name]:.1f}" if name in taken else ""
            row.append(f"**{text}**" if text and taken[name] == min(taken.values()) else text)
        rows.append(row)
    return markdown(rows)
