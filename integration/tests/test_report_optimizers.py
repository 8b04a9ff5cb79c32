"""The README says what the comparisons of optimizers say, and is told where it no longer does."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
from fusewright_models.compare_optimizers import COLUMNS, Point, write

FOLDER = Path(__file__).resolve().parents[1]
NAME = "optimizers-titan-mac-h200-torch2.11-triton3.6"


@pytest.fixture(scope="module")
def modules():
    """The scripts beside the sources, which are no part of the distribution."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        for name in ("report_optimizers", "report"):
            spec = importlib.util.spec_from_file_location(
                f"integration_{name}", FOLDER / f"{name}.py"
            )
            found.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(found[-1])
    return found


@pytest.fixture
def report(modules):
    return modules[0]


def points(optimizer: str, lr: float, scores: list[float], *, grid=(0.1, 0.2, 0.4)) -> list[Point]:
    def point(phase, rate, seed, step, score):
        return Point("titan-mac", optimizer, phase, rate, seed, step, 1.0, score, step / 10)

    tried = [point("grid", rate, 99, 6, 5.0) for rate in grid]
    starts = [point("run", lr, seed, 3, 7.0) for seed in range(len(scores))]
    return tried + starts + [point("run", lr, n, 6, score) for n, score in enumerate(scores)]


@pytest.fixture
def folder(tmp_path):
    rows = [*points("adamw", 0.2, [2.0, 3.0, 4.0]), *points("nested", 0.4, [1.0, 2.0, 4.5])]
    rows += points("muon", 0.2, [2.0, 3.0, math.nan])
    diverged = [p for p in points("m3", 0.1, [1.0] * 3) if p.phase == "grid" or p.step < 6]
    write(rows + diverged, tmp_path / f"results/{NAME}.csv")
    (tmp_path / "results/tuning.csv").write_text("kind,rows\nforward,8\n")
    (tmp_path / "results/optimizers-other.csv").write_text("kind,rows\nforward,8\n")
    (tmp_path / "README.md").write_text("above\n<!-- results:begin -->\n<!-- results:end -->\n")
    return tmp_path


def test_columns_are_those_that_are_written(report):
    assert report.COLUMNS == COLUMNS


def test_line_has_mean_deviation_and_seeds_that_are_better(report, folder):
    told, picture, table = report.parts(folder)
    assert "after 6 steps from each of 3 seeds" in told
    assert "the best of 3 each" in told
    assert picture.endswith(f"(results/{NAME}.png)")
    assert table.splitlines()[2:] == [
        # The rate is at an end of its grid.
        "| nested | 0.4 * | 3 of 3 | 2.5000 | 1.8028 | 2 of 3 | 0.6 |",
        # The mean is of what is finite.
        "| muon | 0.2 | 2 of 3 | 2.5000 | 0.7071 | 0 of 2 | 0.6 |",
        "| adamw | 0.2 | 3 of 3 | 3.0000 | 1.0000 |  | 0.6 |",
        "| m3 | 0.1 * | 0 of 3 | not finite |  |  |  |",
    ]


def test_readme_and_picture_that_are_behind_are_told(modules, folder):
    report = modules[1]
    assert report.problems(folder) == [f"{folder / 'README.md'} is behind its results"]
    readme = folder / "README.md"
    readme.write_text(report.with_made(readme.read_text(), report.made(folder)))
    assert "| nested |" in readme.read_text()
    assert report.problems(folder) == []
    picture = folder / f"results/{NAME}.png"
    picture.unlink()
    assert report.problems(folder) == [f"{picture} is missing"]
