"""The README's table of the trained network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]
ROWS = """update,task,optimizer,mean_loss,last_loss
0,bags,AdamW lr=0.001,0.5,0.4
0,bags,AdamW lr=0.01,0.3,0.2
0,bags,learned,1.0,0.9
300,bags,learned,0.25,0.15
300,meta-training,learned,0.2,0.2
600,bags,learned,0.1,0.1
600,meta-training,learned,0.3,0.3
"""


@pytest.fixture
def report():
    spec = importlib.util.spec_from_file_location("optimizer_report", FOLDER / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_line_is_of_the_network_with_the_lowest_losses_in_training(report, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    header, _, line = report.table(path).splitlines()
    assert "best of 2 rates" in header
    assert line == (
        "| bags | 1.000 / 0.900 | 0.250 / 0.150 | 0.300 / 0.200 (lr=0.01) | 0.500 / 0.400 |"
    )


def test_committed_table_is_that_of_the_result_file(report):
    text = (FOLDER / "README.md").read_text()
    assert text == report.with_made(text, report.table(report.RESULTS), report.MARKS)


def test_readme_without_marks_is_refused(report):
    with pytest.raises(ValueError, match="marks"):
        report.with_made("nothing", "table", report.MARKS)
