"""What the documentation says of speed is what the result files say, every loss among it."""

from __future__ import annotations

import csv

import docs_performance
import pytest
import workspace

NAME = "h200-torch2.11-triton3.6"
COLUMNS = ",".join(docs_performance.report.COLUMNS)
ROWS = """\
rms_norm,rows=8 cols=4,fwd,fusewright,bf16,graph,0.00200,0.002,0.002,,1344.9,6.0
rms_norm,rows=8 cols=4,fwd,torch,bf16,graph,0.00600,0.006,0.006,,1453.6,4.0
rms_norm,rows=8 cols=4,fwd,compile,bf16,graph,0.00300,0.003,0.003,,1453.6,4.0
rms_norm,rows=8 cols=4,bwd,fusewright,bf16,graph,0.00400,0.004,0.004,,1344.9,6.0
rms_norm,rows=8 cols=4,bwd,torch,bf16,graph,0.00200,0.002,0.002,,1453.6,4.0
rms_norm,rows=8 cols=4,fwd,fusewright,bf16,wall,0.05000,0.050,0.050,,77.1,6.0
rms_norm,rows=8 cols=4,fwd,torch,bf16,wall,0.04000,0.040,0.040,,77.1,6.0
attend,B=4,fwd,fusewright,bf16,graph,0.01000,0.010,0.010,,77.1,6.0
"""
STEPS = """\
TitanMAC,dim=8,step,fusewright,bf16,wall,40.0,40,40,,,9.0
TitanMAC,dim=8,step,fusewright-captured,bf16,graph,10.0,10,10,,,9.0
TitanMAC,dim=8,step,titans,bf16,wall,20.0,20,20,,,9.0
TitanMAC,dim=8,fwd,titans,bf16,wall,1.0,1,1,,,9.0
TitanMAC,dim=9,step,fusewright,bf16,wall,40.0,40,40,,,9.0
TitanMAC,dim=8,step,fusewright-compile,bf16,wall,16.0,16,16,,,9.0
"""


@pytest.fixture
def norm(repository):
    """A package with results; the models of the same repository have some too."""
    found = workspace.find("norm", repository)
    for folder, rows in ((found.folder, ROWS), (repository / "integration", STEPS)):
        (folder / "results").mkdir()
        (folder / f"results/{NAME}.csv").write_text(f"{COLUMNS}\n{rows}")
    return found


def lines(text: str) -> list[list[str]]:
    """Cells of the tables' lines, headers and rules left out."""
    told = [line.strip() for line in text.splitlines() if line.strip().startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in told]
    return [each for n, each in enumerate(cells) if not (is_rule(each) or is_rule(cells, n + 1))]


def is_rule(cells: list, place: int | None = None) -> bool:
    if place is not None:
        return place < len(cells) and is_rule(cells[place])
    return all(set(cell) <= set("-:") for cell in cells)


def test_front_page_says_how_many_rows_are_ahead_and_how_fast(norm):
    (line,) = lines(docs_performance.front([norm], norm.folder.parents[1] / "integration"))
    link = "[norm](packages/norm/index.md)"
    numbers = ["1 of 2", "1.00", "0.50 to 1.50"]
    assert line == [link, "about fusewright-norm", *(x.replace(" ", "\u00a0") for x in numbers)]


def test_every_row_that_a_peer_wins_is_told_and_no_other(norm):
    found = lines(docs_performance.lost([norm], norm.folder))
    assert found == [
        ["`rms_norm` bf16", "rows=8 cols=4", "bwd", "4.00", "torch 2.00", "0.50"],
        ["`rms_norm` bf16", "rows=8 cols=4", "fwd", "50.0", "torch 40.0", "0.80"],
    ]


def test_steps_stand_beside_the_same_clock_or_an_eager_peer(norm):
    found = lines(docs_performance.steps([], norm.folder.parents[1] / "integration"))
    start = ["TitanMAC", "dim=8"]
    assert found == [
        [*start, "fusewright", "eager", "40.0", "titans", "20.0", "0.50"],
        [*start, "fusewright-captured", "replayed", "10.0", "titans, eager", "20.0", "2.00"],
        [*start, "fusewright-compile", "eager", "16.0", "titans", "20.0", "1.25"],
        ["TitanMAC", "dim=9", "fusewright", "eager", "40.0", "", "", ""],
    ]


def test_marks_are_replaced_where_they_name_a_table(norm):
    text = "above\n<!-- made: glance -->\nbelow\n"
    made = docs_performance.with_made(text, [norm], norm.folder)
    assert made.startswith("above\n| package |")
    assert made.endswith("|\nbelow\n")
    unmade = "a\n<!-- in the repository -->\nno table\n<!-- end of it -->\nb\n"
    assert docs_performance.with_made(unmade, [norm], norm.folder) == "a\nb\n"
    with pytest.raises(ValueError, match="wanted a mark of front, glance, lost, steps, matrix"):
        docs_performance.with_made("<!-- made: guess -->", [norm], norm.folder)


def test_committed_rows_that_a_peer_wins_are_all_on_the_page():
    """Counted from the files themselves."""
    packages, wanted = workspace.packages(), 0
    for path in (path for p in packages for path in p.folder.glob("results/h200-*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        times: dict[tuple, dict[str, float]] = {}
        for row in rows:
            key = tuple(row[name] for name in ("op", "case", "pass", "dtype", "timing"))
            times.setdefault(key, {})[row["provider"]] = float(row["ms"])
        for key, cells in times.items():
            others = [ms for name, ms in cells.items() if not name.startswith("fusewright")]
            # Of the GPU's two clocks the graph's counts where there is one.
            told = key[-1] != "event" or (*key[:-1], "graph") not in times
            wanted += told and bool(others) and min(others) < cells.get("fusewright", 0.0)
    found = lines(docs_performance.lost(packages, workspace.ROOT / "integration"))
    assert len(found) == wanted > 0
