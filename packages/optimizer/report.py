"""The README's table of the network that comes with the package, from what its meta-training wrote.

    python packages/optimizer/report.py            # --check only says whether it is behind

The other tables are ``python -m fusewright_testkit.report packages/optimizer``'s.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from fusewright_testkit.report import with_made

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results/meta-training-h200.csv"
MARKS = "<!-- meta-training:begin -->", "<!-- meta-training:end -->"
META, LEARNED, DEFAULT = "meta-training", "learned", "AdamW lr=0.001"
HEADER = ("held-out task", "untrained", "trained", "AdamW, best of {rates} rates", DEFAULT)


def table(path: Path) -> str:
    """A line for each held-out task: shares of the first loss, in the mean of all steps / in their
    last tenth.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    # What was written as the network: that of the lowest losses on the tasks that trained it.
    chosen = min((row for row in rows if row["task"] == META), key=mean_of)["update"]
    lines = []
    tasks = [name for name in dict.fromkeys(row["task"] for row in rows) if name != META]
    for task in tasks:
        mine = [row for row in rows if row["task"] == task]
        learned = {row["update"]: row for row in mine if row["optimizer"] == LEARNED}
        rates = {row["optimizer"]: row for row in mine if row["optimizer"] != LEARNED}
        best = min(rates.values(), key=mean_of)
        rate = best["optimizer"].removeprefix("AdamW ")
        shown = map(shares, (learned["0"], learned[chosen], best, rates[DEFAULT]))
        untrained, trained, searched, default = shown
        lines.append((task, untrained, trained, f"{searched} ({rate})", default))
    header = [name.format(rates=len(rates)) for name in HEADER]
    divider = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, divider, *lines))


def mean_of(row: dict[str, str]) -> float:
    return float(row["mean_loss"])


def shares(row: dict[str, str]) -> str:
    return f"{mean_of(row):.3f} / {float(row['last_loss']):.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    readme = FOLDER / "README.md"
    before = readme.read_text()
    after = with_made(before, table(RESULTS), MARKS)
    if not check:
        readme.write_text(after)
    elif before != after:
        print("the README's table is behind its result file: python packages/optimizer/report.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
