"""The README's table says what the result files say, and is told when it no longer does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import typer
from fusewright_models.bench import depth, switches
from fusewright_testkit.report import BEGIN, COLUMNS, END
from typer.testing import CliRunner

FOLDER = Path(__file__).resolve().parents[1]
NAME = "h200-torch2.11-triton3.6"
ROWS = """\
TransformerNP,M=64 N=500 B=64,data,sdpa (cudnn),bf16,event,0.1,0.1,0.1,,,1024.0
TransformerNP,M=64 N=500 B=64,fwd,sdpa (cudnn),bf16,event,12.0,12.0,12.1,180.0,,1024.0
TransformerNP,M=64 N=500 B=64,bwd,sdpa (cudnn),bf16,event,26.0,25.9,26.1,170.0,,1024.0
TransformerNP,M=64 N=500 B=64,optimizer,sdpa (cudnn),bf16,event,0.3,0.3,0.3,,,1024.0
TransformerNP,M=64 N=500 B=64,step,sdpa (cudnn),bf16,wall,40.0,39.9,40.1,166.4,,1024.0
TransformerNP,M=64 N=500 B=64,data,fusewright,bf16,event,0.1,0.1,0.1,,,512.0
TransformerNP,M=64 N=500 B=64,fwd,fusewright,bf16,event,6.0,6.0,6.1,360.0,,512.0
TransformerNP,M=64 N=500 B=64,bwd,fusewright,bf16,event,13.0,12.9,13.1,340.0,,512.0
TransformerNP,M=64 N=500 B=64,optimizer,fusewright,bf16,event,0.3,0.3,0.3,,,512.0
TransformerNP,M=64 N=500 B=64,step,fusewright,bf16,wall,20.0,19.9,20.1,332.8,,512.0
"""


@pytest.fixture(scope="module")
def report():
    """The script beside the sources, which is no part of the distribution."""
    spec = importlib.util.spec_from_file_location("integration_report", FOLDER / "report.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # As where it is run as a script.
        patch.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """Empty marks in a README, the harness's results and a file of others."""
    (tmp_path / "results").mkdir()
    (tmp_path / f"results/{NAME}.csv").write_text(f"{','.join(COLUMNS)}\n{ROWS}")
    (tmp_path / "results/tuning.csv").write_text("kind,rows\nforward,8\n")
    (tmp_path / "README.md").write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    return tmp_path


def run(report, *arguments):
    app = typer.Typer()
    app.command()(report.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_line_has_rate_stages_and_memory_and_the_most_tokens_in_bold(report, folder):
    text = report.made(folder)
    assert text.startswith(f"**H200, torch 2.11, triton 3.6**, bf16: [{NAME}.csv](results/{NAME}")
    lines = [line for line in text.splitlines() if line.startswith("| M=64")]
    case = "| M=64 N=500 B=64 |"
    assert lines == [
        f"{case} sdpa (cudnn) | 902,400 | 40.0 | 0.1 | 12.0 | 26.0 | 0.3 | 166 | 1.0 |",
        f"{case} fusewright | **1,804,800** | 20.0 | 0.1 | 6.0 | 13.0 | 0.3 | 333 | 0.5 |",
    ]


def test_what_one_case_lacks_is_named_whatever_attention_the_others_ran(report, folder):
    assert "Not measured" not in report.made(folder)
    lines = [line.replace("M=64", "M=9") for line in ROWS.splitlines(True)]
    with (folder / f"results/{NAME}.csv").open("a") as file:
        file.writelines(line.replace("(cudnn)", "(flash)") for line in lines[:5])
    assert report.made(folder).endswith("\n\nNot measured: fusewright at M=9 N=500 B=64.")


def test_picture_has_a_panel_for_each_case_and_a_bar_for_each_provider(report, folder):
    ((path, cases),) = report.result_files(folder).items()
    (panel,) = report.draw(path, cases).axes
    assert [bar.get_height() for bar in panel.patches] == [902_400.0, 1_804_800.0]
    assert panel.get_title() == "M=64 N=500 B=64"


def test_written_readme_and_picture_are_no_longer_behind(report, folder):
    before = run(report, folder, "--check")
    assert before.exit_code == 1
    assert "README.md is behind its results" in before.output
    assert f"{NAME}.png is missing" in before.output
    assert run(report, folder).exit_code == 0
    assert (folder / f"results/{NAME}.png").read_bytes().startswith(b"\x89PNG")
    assert run(report, folder, "--check").exit_code == 0
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("902,400", "902,401"))
    assert run(report, folder, "--check").exit_code == 1


def test_committed_table_is_that_of_the_result_files(report):
    assert report.problems(FOLDER) == []


def test_steps_of_text_have_a_table_of_their_own(report, folder):
    row = "TitanMAC,dim=320 layers=6 B=4 T=4096,step,fusewright,bf16,graph,{ms},1,1,,,{mib}\n"
    with (folder / f"results/{NAME}.csv").open("a") as file:
        file.write(row.format(ms="81.92", mib="2048.0") + row.format(ms="16.384", mib=""))
    lines = [line for line in report.made(folder).splitlines() if line.startswith("| dim=320")]
    start = "| dim=320 layers=6 B=4 T=4096 | fusewright | graph |"
    assert lines == [f"{start} 200,000 | 81.9 | 2.0 |", f"{start} 1,000,000 | 16.4 |  |"]


def test_each_language_model_has_its_own_table(report, folder):
    row = "{op},dim=512 layers=12 B=4 T=4096,step,reference,bf16,wall,81.92,1,1,,,\n"
    with (folder / f"results/{NAME}.csv").open("a") as file:
        file.write(row.format(op="HybridLM") + row.format(op="TitanMAC"))
    made = report.made(folder)
    titan_mac, hybrid = made.split("HybridLM: a step is")
    for part in (titan_mac, hybrid):
        assert part.count("| dim=512 layers=12 B=4 T=4096 | reference | wall | 200,000") == 1


def test_file_of_a_language_model_alone_has_its_table_and_no_picture(report, folder):
    row = "HybridLM,dim=512 layers=12 B=4 T=4096,step,{provider},bf16,wall,81.92,1,1,,,\n"
    head = (folder / f"results/{NAME}.csv").read_text().splitlines()[0]
    alone = folder / "results/h100-torch2.11-triton3.7.csv"
    steps = [row.format(provider=provider) for provider in ("fla", "fusewright")]
    alone.write_text("".join([f"{head}\n", *steps]))
    assert run(report, folder).exit_code == 0
    assert run(report, folder, "--check").exit_code == 0
    assert not alone.with_suffix(".png").exists()
    made = report.made(folder)
    # Ours first, whatever the file's order.
    assert made.index("| fusewright | wall | 200,000") < made.index("| fla | wall | 200,000")


def test_switches_have_a_table_with_times_before(report, folder):
    case = "dim=320 layers=6 B=4 T=4096"
    lines = [f"{case},none,5552.0,16384.0,0.0010,0.0570", f"{case},all,204.8,4096.0,0.0000,0.0650"]
    head = ",".join(report.SWITCHES_COLUMNS)
    (folder / f"results/switches-{NAME}.csv").write_text("\n".join([head, *lines, ""]))
    found = [line for line in report.made(folder).splitlines() if line.startswith("| dim=320")]
    assert found == [
        f"| {case} | none | 5,552.0 | 2,951 | 1.00 | 16.0 | 0.1 % | 5.7 % |",
        f"| {case} | all | 204.8 | 80,000 | 27.11 | 4.0 | 0.0 % | 6.5 % |",
    ]


def test_switches_columns_are_those_that_the_benchmark_writes(report):
    assert report.SWITCHES_COLUMNS == switches.COLUMNS


def test_depths_have_a_table_of_their_own(report, folder):
    case = "dim=512 layers=8 B=4 T=4096"
    lines = [f"{case},exact,1400.5,300,24,1076.5", f"{case},plain,,300,0,"]
    head = ",".join(report.DEPTH_COLUMNS)
    (folder / f"results/depth-{NAME}.csv").write_text("\n".join([head, *lines, ""]))
    found = [line for line in report.made(folder).splitlines() if line.startswith("| dim=512")]
    assert found == [
        f"| {case} | exact | 1,076.5 | 24.0 | 300.0 | 1,400.5 |",
        f"| {case} | plain |  | 0.0 | 300.0 |  |",
    ]


def test_columns_of_depths_are_those_that_the_benchmark_writes(report):
    assert report.DEPTH_COLUMNS == depth.COLUMNS
