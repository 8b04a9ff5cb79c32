"""The README's table says what the result files say, and is told when it no longer does."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
from fusewright_models.studies import compare_optimizers, pictures, selection
from fusewright_models.studies.compare_optimizers import Point
from fusewright_models.studies.results import write
from fusewright_testkit.legible import assert_legible
from fusewright_testkit.report import BEGIN, COLUMNS, END

from .commands import invoke

FOLDER = Path(__file__).resolve().parents[1]
STUDIES = pictures.drawn_from(FOLDER / "results") | pictures.drawn_from(FOLDER.parent / "docs")
NAME = "h200-torch2.11-triton3.6"
COMPARISON = f"optimizers-titan-mac-{NAME}"
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
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """Empty marks in a page, the harness's results and a file of others."""
    folder, pages = tmp_path / "integration", tmp_path / "docs/models"
    (folder / "results").mkdir(parents=True)
    pages.mkdir(parents=True)
    (folder / f"results/{NAME}.csv").write_text(f"{','.join(COLUMNS)}\n{ROWS}")
    (folder / "results/tuning.csv").write_text("kind,rows\nforward,8\n")
    (pages / "transformer-np.md").write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    return folder


def run(report, *arguments):
    return invoke(report.main, *arguments)


def test_line_has_rate_stages_and_memory_and_the_most_tokens_in_bold(report, folder):
    text = report.made(folder)
    title, environment = text.split("\n\n")[:2]
    assert title == "# The models: measured times and studies"
    assert environment.startswith(f"**H200, torch 2.11, triton 3.6**, bf16: [{NAME}.csv]({NAME}")
    lines = [line for line in text.splitlines() if line.startswith("| M=64")]
    case = "| M=64 N=500 B=64 |"
    assert lines == [
        f"{case} sdpa (cudnn) | 902,400 | 40.0 | 0.1 | 12.0 | 26.0 | 0.3 | 166 | 1.0 |",
        f"{case} fusewright | **1,804,800** | 20.0 | 0.1 | 6.0 | 13.0 | 0.3 | 333 | 0.5 |",
    ]


def test_replayed_step_has_no_stages_and_a_column_of_the_short_table(report, folder):
    replayed = (
        "TransformerNP,M=64 N=500 B=64,step,fusewright-captured,bf16,graph,10.0,9.9,10.1,,,\n"
    )
    with (folder / f"results/{NAME}.csv").open("a") as file:
        file.write(replayed.replace(",,,", ",665.6,,512.0"))
    case = "| M=64 N=500 B=64 |"
    line = f"{case} fusewright-captured | **3,609,600** | 10.0 |  |  |  |  | 666 | 0.5 |"
    assert line in report.made(folder).splitlines()
    short = f"{case} 1,804,800 | 3,609,600 | sdpa (cudnn) 902,400 |"
    assert short in report.short(folder, "TransformerNP").splitlines()


def test_what_one_case_lacks_is_named_whatever_attention_the_others_ran(report, folder):
    assert "Not measured" not in report.made(folder)
    lines = [line.replace("M=64", "M=9") for line in ROWS.splitlines(True)]
    with (folder / f"results/{NAME}.csv").open("a") as file:
        file.writelines(line.replace("(cudnn)", "(flash)") for line in lines[:5])
    assert report.made(folder).endswith("\n\nNot measured: fusewright at M=9 N=500 B=64.\n")


def test_picture_has_a_bar_for_each_step_ours_first(report, folder):
    (rows,) = report.bench_files(folder).values()
    (panel,) = report.draw(rows, "H200").axes
    assert [bar.get_width() for bar in panel.patches] == [1_804_800.0, 902_400.0]
    assert [text.get_text() for text in panel.texts] == ["2.00×"]
    (label,) = panel.get_yticklabels()
    words = label.get_text().replace("\xa0", " ").split()
    assert " ".join(words) == "64 context points, 500 targets, batch 64"


def test_written_tables_pages_and_pictures_are_no_longer_behind(report, folder):
    before = run(report, folder, "--check")
    assert before.exit_code == 1
    assert "tables.md is behind its results" in before.output
    assert "transformer-np.md is behind its results" in before.output
    assert f"{NAME}.png is missing" in before.output
    assert run(report, folder).exit_code == 0
    assert (folder / f"results/{NAME}.png").read_bytes().startswith(b"\x89PNG")
    assert run(report, folder, "--check").exit_code == 0
    page = folder.parent / "docs/models/transformer-np.md"
    line = "| M=64 N=500 B=64 | 1,804,800 |  | sdpa (cudnn) 902,400 |"
    assert line in page.read_text().splitlines()
    for file, found in ((folder / "results/tables.md", "902,400"), (page, "1,804,800")):
        text = file.read_text()
        file.write_text(text.replace(found, "7"))
        assert run(report, folder, "--check").exit_code == 1
        file.write_text(text)


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


def test_file_of_a_language_model_alone_has_its_table_and_picture(report, folder):
    row = "HybridLM,dim=512 layers=12 B=4 T=4096,step,{provider},bf16,wall,81.92,1,1,,,\n"
    head = (folder / f"results/{NAME}.csv").read_text().splitlines()[0]
    alone = folder / "results/h100-torch2.11-triton3.7.csv"
    steps = [row.format(provider=provider) for provider in ("fla", "fusewright")]
    alone.write_text("".join([f"{head}\n", *steps]))
    assert run(report, folder).exit_code == 0
    assert run(report, folder, "--check").exit_code == 0
    assert alone.with_suffix(".png").exists()
    made = report.made(folder)
    assert (
        "![H100, torch 2.11, triton 3.7: tokens per second](h100-torch2.11-triton3.7.png)" in made
    )
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


def test_matrix_has_a_table_by_case_that_says_what_was_not_measured(report, folder):
    case, other = "M=64 N=500 B=64", "M=1000 N=100 B=32"
    lines = [
        f"{case},sdpa,none,wall,cudnn,40.0,39.0,41.0,166.0,0.168,9216.0,",
        f"{other},fusewright,none,wall,fusewright,20.0,19.0,21.0,100.0,0.101,1024.0,",
        f"{case},fusewright,block,graph,fusewright,16.0,15.0,17.0,415.4,0.420,4096.0,",
        f"{case},fa4,none,wall,,,,,,,,absent: flash-attn-4 is not installed",
    ]
    head = ",".join(report.MATRIX_COLUMNS)
    (folder / f"results/matrix-{NAME}.csv").write_text("\n".join([head, *lines, ""]))
    made = report.made(folder)
    found = [line for line in made.splitlines() if "| none |" in line or "| block |" in line]
    assert found == [
        f"| {case} | sdpa (cudnn) | none | wall | 902,400 | 40.0 | 166 | 0.168 | 9.0 | 1.00 |",
        f"| {case} | fusewright | block | graph | 2,256,000 | 16.0 | 415 | 0.420 | 4.0 | 2.50 |",
        f"| {case} | fa4 | none | wall | absent: flash-attn-4 is not installed |  |  |  |  |  |",
        f"| {other} | fusewright | none | wall | 1,760,000 | 20.0 | 100 | 0.101 | 1.0 |  |",
    ]


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


def test_continued_texts_have_a_table_of_their_own(report, folder):
    case = "dim=512 layers=12 B=1 T=512 tokens=32 temperature=1"
    lines = [
        f"HybridLM,{case},fusewright,45000.4,81.5,,1024.0",
        f"HybridLM,{case},fusewright-speculative,44000,120.4,0.7512,1536.0",
    ]
    head = ",".join(report.GENERATE_COLUMNS)
    (folder / f"results/generate-{NAME}.csv").write_text("\n".join([head, *lines, ""]))
    found = [line for line in report.made(folder).splitlines() if line.startswith("| HybridLM")]
    assert found == [
        f"| HybridLM | {case} | fusewright | 45,000 | 82 |  | 1.0 |",
        f"| HybridLM | {case} | fusewright-speculative | 44,000 | 120 | 75.1% | 1.5 |",
    ]


def points(optimizer: str, lr: float, scores: list[float], *, grid=(0.1, 0.2, 0.4)) -> list[Point]:
    def point(phase, rate, seed, step, score):
        return Point("titan-mac", optimizer, phase, rate, seed, step, 1.0, score, step / 10)

    tried = [point("grid", rate, 99, 6, 5.0) for rate in grid]
    starts = [point("run", lr, seed, 3, 7.0) for seed in range(len(scores))]
    return tried + starts + [point("run", lr, n, 6, score) for n, score in enumerate(scores)]


@pytest.fixture
def compared(tmp_path):
    """The folder of a comparison of optimizers, and of files of others."""
    rows = [*points("adamw", 0.2, [2.0, 3.0, 4.0]), *points("nested", 0.4, [1.0, 2.0, 4.5])]
    rows += points("muon", 0.2, [2.0, 3.0, math.nan])
    diverged = [p for p in points("m3", 0.1, [1.0] * 3) if p.phase == "grid" or p.step < 6]
    write(rows + diverged, tmp_path / f"results/{COMPARISON}.csv", compare_optimizers.draw)
    (tmp_path / "results/tuning.csv").write_text("kind,rows\nforward,8\n")
    (tmp_path / "results/optimizers-other.csv").write_text("kind,rows\nforward,8\n")
    return tmp_path


def test_line_has_mean_deviation_and_seeds_that_are_better(report, compared):
    ((told, picture, table),) = report.study_parts(compared).values()
    assert "after 6 steps from each of 3 seeds" in told
    assert "the best of 3 each" in told
    assert picture.endswith(f"({COMPARISON}.png)")
    assert table.splitlines()[2:] == [
        # The rate is at an end of its grid.
        "| nested | 0.4 * | 3 of 3 | 2.5000 | 1.8028 | 2 of 3 | 0.6 |",
        # The mean is of what is finite.
        "| muon | 0.2 | 2 of 3 | 2.5000 | 0.7071 | 0 of 2 | 0.6 |",
        "| adamw | 0.2 | 3 of 3 | 3.0000 | 1.0000 |  | 0.6 |",
        "| m3 | 0.1 * | 0 of 3 | not finite |  |  |  |",
    ]


def test_tables_and_picture_of_a_comparison_that_are_behind_are_told(report, compared):
    tables = compared / "results/tables.md"
    assert report.problems(compared) == [f"{tables} is behind its results"]
    assert run(report, compared).exit_code == 0
    assert "| nested |" in tables.read_text()
    assert report.problems(compared) == []
    picture = compared / f"results/{COMPARISON}.png"
    picture.unlink()
    assert report.problems(compared) == [f"{picture} is missing or behind its results"]


def point(step: int, layer: str, kl: float, selected: float) -> selection.Point:
    phase = "alone" if step <= 5 else "sparse"
    return selection.Point(
        *(step, 2.0 * step, phase, layer, 2.0, kl, 1.0, 60.0),
        *(selected, 0.25, 0.125, 0.05),
    )


def test_tables_say_what_indexers_select(report, tmp_path):
    rows = [point(0, "4", 0.1, 0.2), point(0, "8", 0.1, 0.2), point(0, "last", 0.1, 0.2)]
    rows += [point(5, "4", 0.8, 0.4), point(5, "8", 0.6, 0.4), point(5, "last", 0.6, 0.4)]
    rows += [point(7, "4", 0.3, 0.4), point(7, "8", 0.2, 0.4), point(7, "last", 0.6, 0.4)]
    rows += [point(9, "4", 0.5, 0.5), point(9, "8", 0.3, 0.7), point(9, "last", 9.0, 0.1)]
    file = tmp_path / "results/selection-GPU.csv"
    write(rows, file, selection.draw, number=".5g")
    ((told, picture, table),) = report.study_parts(tmp_path).values()
    assert "after 9 steps in 18 s" in told
    assert "hold 0.600 of the dense" in told
    assert "2.4 times as much as a window of as many and 4.8 times" in told
    assert "the token after next, 0.4 and 0.8 times." in told
    assert "learn from step 5 on; then their divergence from the attention is 0.700 nats" in told
    assert "at the end 0.400, 0.40 of that" in told
    assert "at most 0.400, at step 9, and at least 0.250, at step 7." in told
    assert picture == "![What HybridLM's indexers select](selection-GPU.png)"
    row = "| 8 | 60 | 0.700 | 0.250 | 0.125 | 0.050 | 0.300 | 1.000 | 0.60 | 0.30 |"
    assert row in table.splitlines()
    # A run that was over before the indexers began.
    write(rows[:6], file, selection.draw)
    assert (
        "at most 0.700, at step 5, and at least 0.700, at step 5."
        in report.study_parts(tmp_path)[file][0]
    )
    (tmp_path / "results/other.csv").write_text("a,b\n1,2\n")
    assert [*report.study_parts(tmp_path)] == [file]


def test_texts_of_committed_steps_are_neither_cut_nor_covered(report):
    found = report.bench_files(FOLDER)
    assert found
    for rows in found.values():
        assert_legible(report.draw(rows, "H200, torch 2.11, triton 3.6"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_texts_of_committed_studies_are_neither_cut_nor_covered(file):
    rows, draw = STUDIES[file]
    assert_legible(draw(rows))


def test_studies_are_drawn_again_to_the_bit(compared):
    file = compared / f"results/{COMPARISON}.csv"
    picture = file.with_suffix(".png")
    before = picture.read_bytes()
    picture.unlink()
    pictures.redraw(compared / "results")
    assert picture.read_bytes() == before
