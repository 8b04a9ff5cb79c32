"""A README's result tables say what the result files say, and are told when they no longer do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import workspace
from typer.testing import CliRunner

# By its file: the testkit as a package would import torch.
sys.path.append(str(workspace.kit().import_folder))

import report
import tabulated

ROWS = """\
rms_norm,rows=8 cols=4,fwd,fusewright,bf16,graph,0.00312,0.003,0.004,,1344.9,6.0
rms_norm,rows=8 cols=4,fwd,fusewright,bf16,event,0.00900,0.008,0.010,,466.2,6.0
rms_norm,rows=8 cols=4,fwd+bwd,fusewright,bf16,wall,0.13603,0.130,0.140,,77.1,6.0
rms_norm,rows=8 cols=4,fwd,torch,bf16,graph,0.00289,0.002,0.003,,1453.6,4.0
rms_norm,rows=8 cols=4,fwd+bwd,torch,bf16,wall,0.06710,0.066,0.068,,156.3,4.0
attend,B=4 M=100 N=10,fwd,fusewright,fp8,event,152.5,150,153,550.2,10.1,9.0
attend,B=4 M=200 N=10,fwd,fusewright,fp8,event,262.8,260,265,319.0,10.1,9.0
"""
NAME = "h200-torch2.11-triton3.6"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with empty marks in its README, a benchmark's results and a file of others."""
    (tmp_path / "results").mkdir()
    (tmp_path / f"results/{NAME}.csv").write_text(f"{','.join(report.COLUMNS)}\n{ROWS}")
    (tmp_path / "results/tuning.csv").write_text("kind,rows\nforward,8\n")
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\n{report.END}\nbelow\n")
    return tmp_path


def run(*arguments: object):
    app = report.typer.Typer()
    app.command()(report.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines_of(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| `{word}")]


def test_line_has_time_and_rate_of_each_provider_and_the_fastest_in_bold(package):
    graph, wall, _ = lines_of(report.tables(package), "rms_norm")
    assert graph == "| `rms_norm` bf16 | rows=8 cols=4 | fwd | 3.12 · 1.34 | **2.89 · 1.45** |"
    assert wall == "| `rms_norm` bf16 | rows=8 cols=4 | fwd+bwd | 136 | **67.1** |"


def test_events_are_told_only_where_there_is_no_graph(package):
    text = report.tables(package)
    before, event, after = text.partition(report.CLOCKS["event"])
    assert "466" not in text
    assert event
    assert not lines_of(before, "attend")
    assert lines_of(after.partition(report.MEMORY)[0], "attend") == [
        "| `attend` fp8 | B=4 M=100 N=10 | fwd | **152500 · 550** |",
        "| `attend` fp8 | B=4 M=200 N=10 | fwd | **262800 · 319** |",
    ]


def test_memory_of_each_provider_is_told_once_for_a_case_and_the_least_in_bold(package):
    _, told, memory = report.tables(package).partition(report.MEMORY)
    assert told
    assert lines_of(memory, "") == [
        "| `rms_norm` bf16 | rows=8 cols=4 | 6.0 | **4.0** |",
        "| `attend` fp8 | B=4 M=100 N=10 | **9.0** |  |",
        "| `attend` fp8 | B=4 M=200 N=10 | **9.0** |  |",
    ]


def test_environment_is_read_from_the_file_name(package):
    assert f"\n\n**H200, torch 2.11, triton 3.6**: medians of [{NAME}" in report.tables(package)
    assert "\n\nH200, torch 2.11, triton 3.6, in microseconds of graph time:" in report.made(
        package
    )
    assert report.environment_of(Path("results/laptop.csv")) == "laptop"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.991, "0.99"), (3.427, "3.43"), (12.49, "12.5"), (136.03, "136"), (262800.0, "262800")],
)
def test_numbers_have_three_digits_and_two_places_at_most(number, text):
    assert tabulated.short(number) == text


def test_written_readme_and_picture_are_no_longer_behind(package):
    before = run(package, "--check")
    assert before.exit_code == 1
    assert "README.md is behind its results" in before.output
    assert "tables.md is behind its results" in before.output
    assert f"{NAME}.png is missing" in before.output
    assert run(package).exit_code == 0
    text = (package / "README.md").read_text()
    assert text == f"above\n{report.BEGIN}\n{report.made(package)}\n{report.END}\nbelow\n"
    assert (package / f"results/{NAME}.png").read_bytes().startswith(b"\x89PNG")
    assert run(package, "--check").exit_code == 0


def test_readme_has_the_largest_case_beside_the_fastest_other(package):
    text = report.made(package)
    assert lines_of(text, "rms_norm") == [
        "| `rms_norm` bf16 | rows=8 cols=4 | fwd | 3.12 | torch 2.89 | 0.93 |"
    ]
    assert lines_of(text, "attend") == ["| `attend` fp8 | B=4 M=200 N=10 | fwd | 262800 |  |  |"]
    assert "In 1 of the 1 rows that have a peer the peer is faster:" in text


def test_readme_has_every_row_that_another_wins_whatever_its_case(package):
    file = package / f"results/{NAME}.csv"
    small = "attend,B=4 M=100 N=10,fwd,torch,fp8,event,150.0,149,151,550.2,10.1,9.0\n"
    file.write_text(file.read_text() + small)
    text = report.made(package)
    assert [line.split(" | ")[1] for line in lines_of(text, "attend")] == [
        "B=4 M=100 N=10",
        "B=4 M=200 N=10",
    ]
    assert "In 2 of the 2 rows that have a peer" in text


def test_both_passes_stand_in_place_of_a_backward_pass_that_the_forward_prepares(package):
    row = "rms_norm,rows=8 cols=4,{},fusewright,bf16,graph,{},0.003,0.004,,1344.9,6.0\n"
    file = package / f"results/{NAME}.csv"
    alone = file.read_text() + row.format("bwd", 0.001)

    def passes(both: float) -> list[str]:
        file.write_text(alone + row.format("fwd+bwd", both))
        return [line.split(" | ")[2] for line in lines_of(report.made(package), "rms_norm")]

    assert passes(0.0042) == ["fwd", "bwd"]
    assert passes(0.0062) == ["fwd", "fwd+bwd"]


@pytest.mark.parametrize("name", ["README.md", "results/tables.md", f"results/{NAME}.csv"])
def test_changed_number_is_noticed_on_either_side(package, name):
    assert run(package).exit_code == 0
    file = package / name
    file.write_text(file.read_text().replace("2.89", "2.80").replace("0.00289", "0.00280"))
    assert run(package, "--check").exit_code == 1


def test_picture_has_a_panel_for_each_op_and_pass_with_a_bar_for_each_number(package):
    (results,) = report.result_files(package)
    figure = report.draw(results, copy=(4.25, "2 GiB read and written"))
    norm, attend = figure.axes
    assert [bar.get_width() for bar in norm.patches] == pytest.approx([1.3449, 1.4536])
    assert [text.get_text() for text in norm.texts] == ["0.93×"]
    assert [bar.get_width() for bar in attend.patches] == [550.2, 319.0]
    titles = [axes.get_title(loc="left") for axes in (norm, attend)]
    assert titles == ["forward, TB/s", "forward, TFLOPS"]
    assert [list(line.get_xdata()) for line in norm.lines] == [[4.25, 4.25]]
    assert not attend.lines
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["fusewright", "torch", "copy at 4.25 TB/s, 2 GiB read and written"]


def test_case_of_both_passes_alone_is_in_the_picture(package):
    row = "other,rows={} cols=4,{},fusewright,bf16,graph,{},1,1,,10.0,6.0\n".format
    times = ("8", "fwd", 3.0), ("8", "bwd", 3.0), ("8", "fwd+bwd", 6.0), ("4", "fwd+bwd", 3.0)
    with (package / f"results/{NAME}.csv").open("a") as file:
        file.writelines(row(*each) for each in times)
    (results,) = report.result_files(package)
    (strip,) = (each for each in report.strips(results.kernels(), {}) if "other" in each.title)
    assert [*strip.labels] == ["rows=8 cols=4", "rows=4 cols=4"]
    assert all(any(panel.groups.get(case) for panel in strip.panels) for case in strip.labels)
    report.draw(results)


def test_picture_has_what_the_benchmark_declares_in_its_words(package):
    (package / "bench.py").write_text(
        'import torch\nPICTURED = {"attend": "M=200"}\nWORDS = {"N": "{} targets"}\n'
    )
    (results,) = report.result_files(package)
    (axes,) = report.draw(results).axes
    assert [bar.get_width() for bar in axes.patches] == [319.0]
    (label,) = axes.get_yticklabels()
    assert label.get_text().replace("\xa0", " ") == "batch 4, 200 keys, 10 targets"
    assert "The picture has 1 of 3 cases. H200" in report.made(package)


def test_study_is_drawn_by_the_script_of_its_name(package):
    file = package / f"results/crossover-{NAME}.csv"
    file.write_text("tokens,ms\n8,0.5\n")
    assert report.studies(package) == {}
    (package / "crossover.py").write_text(
        "from matplotlib.figure import Figure\n"
        "def draw(rows):\n"
        "    figure = Figure()\n"
        "    figure.suptitle(rows[0]['ms'])\n"
        "    return figure\n"
    )
    ((_, script),) = report.studies(package).items()
    assert report.draw_study(file, script).get_suptitle() == "0.5"
    assert any("crossover" in problem for problem in report.problems(package))
    assert run(package).exit_code == 0
    assert report.problems(package) == []


def test_rate_of_a_copy_needs_its_source(package):
    assert run(package, "--copy-tbps", "4.25").exit_code == 2


def test_package_without_results_needs_no_marks_and_results_need_them(package):
    readme = package / "README.md"
    readme.write_text("no marks\n")
    with pytest.raises(ValueError, match="wanted the marks"):
        report.problems(package)
    (package / f"results/{NAME}.csv").unlink()
    assert report.problems(package) == []
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert run(package).exit_code == 0
    assert "Nothing has been measured yet." in readme.read_text()


@pytest.mark.parametrize("package", workspace.packages(), ids=lambda package: package.name)
def test_committed_tables_are_those_of_the_result_files(package):
    assert report.problems(package.folder) == []
