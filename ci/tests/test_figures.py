"""No text of a picture is cut or covered, a colour is one provider's, rows are those of now."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import workspace
from matplotlib.figure import Figure

# By its file: the testkit as a package would import torch.
sys.path.append(str(workspace.kit().import_folder))

import figures
import report
from figures.bars import magnitudes, speed
from figures.style import COLOURS
from legible import assert_legible

PACKAGES = [package for package in workspace.packages() if report.result_files(package.folder)]
MODELS = workspace.integration()[0].folder
ROW = {"fusewright": figures.Bar(3.0, 1.0), "torch": figures.Bar(2.0, 1.5)}


def strip(labels: dict[str, str], *titles: str) -> figures.Strip:
    panels = [figures.Panel(title, dict.fromkeys(labels, ROW)) for title in titles]
    return figures.Strip("rms_norm, bf16", "16,384 rows", panels, labels)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_texts_of_committed_rows_lie_in_the_picture_and_on_no_other(package):
    for results in report.result_files(package.folder):
        figure = report.draw(results)
        assert_legible(figure)
        # As wide as every other, and in a README at most two and a half times as high as wide.
        width, height = figure.get_size_inches()
        assert width == figures.WIDTH
        assert height <= 2.5 * width


def test_text_that_is_cut_or_covered_is_noticed():
    figure = Figure()
    figure.text(0.9, 0.5, "much too long for what is left")
    with pytest.raises(AssertionError, match="too long"):
        assert_legible(figure)
    figure = Figure()
    figure.text(0.1, 0.5, "one")
    figure.text(0.1, 0.5, "another")
    with pytest.raises(AssertionError, match="another"):
        assert_legible(figure)


def test_every_provider_of_committed_rows_has_a_colour_of_its_own():
    assert len(set(COLOURS.values())) == len(COLOURS)
    names = set()
    for folder in [*(package.folder for package in PACKAGES), MODELS]:
        for path in folder.glob("results/*.csv"):
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames == report.COLUMNS:
                    names |= {row["provider"] for row in reader}
    assert len(names) > 20
    assert all(figures.colour(name) in COLOURS.values() for name in names)


def test_colour_is_the_librarys_whatever_its_version():
    assert figures.colour("fa4-4.0.0b36") == figures.colour("fa4-5.1") == COLOURS["fa4"]
    assert figures.colour("sdpa-compile (eagerly cudnn)") == COLOURS["sdpa-compile"]
    with pytest.raises(ValueError, match="wanted a provider that has a colour"):
        figures.colour("unknown-1.0")


def test_ours_is_first_with_its_speed_over_the_best_peer():
    group = {"torch": figures.Bar(2.0, 3.0), "compile": figures.Bar(3.0, 2.0), **ROW}
    group |= {"fusewright-stored": figures.Bar(2.5, 2.4)}
    panel = figures.Panel("forward, TB/s", {"rows=8": group})
    figure = figures.draw_bars("heading", [figures.Strip("op", "", [panel], {"rows=8": "8 rows"})])
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["fusewright", "fusewright-stored", "torch", "compile"]
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [3.0, 2.5, 2.0, 3.0]
    assert [text.get_text() for text in axes.texts] == ["1.50×", "0.62×"]
    assert any("Higher is better" in text.get_text() for text in figure.texts)
    assert speed("torch", group) is None
    assert speed("fusewright", {"fusewright": ROW["fusewright"]}) is None


def test_cases_of_other_magnitudes_have_panels_of_their_own():
    rates = {"large": 8.0, "small": 0.9, "middle": 1.0, "tiny": 0.1}
    groups = {case: {"fusewright": figures.Bar(rate, 1.0)} for case, rate in rates.items()}
    panel = figures.Panel("forward, TB/s", groups)
    whole = figures.Strip("op", "note", [panel], {case: case for case in rates})
    parts = magnitudes(whole)
    assert [list(part.labels) for part in parts] == [["large", "middle"], ["small"], ["tiny"]]
    assert [part.title for part in parts] == ["op", "", ""]


def test_pass_that_a_provider_lacks_says_so():
    both = strip({"a": "8 rows"}, "forward, TB/s", "backward, TB/s")
    both.panels[1].groups["a"] = {"fusewright": ROW["fusewright"]}
    forward, backward = figures.draw_bars("heading", [both]).axes
    assert [text.get_text() for text in forward.texts] == ["1.50×"]
    assert [text.get_text() for text in backward.texts] == ["not measured"]


def test_case_is_told_in_words():
    case = "params=36387456 tensors=116"
    assert figures.case_in_words(case, [case], {}) == "36 M parameters, 116 tensors"
    cases = ["B=1 T=4096 H=4", "B=1 T=4096 H=4 k=512", "B=1 T=16384 H=4"]
    words = {"k": "{} selected keys", "no k": "all keys"}
    assert figures.common_words(cases, words) == "batch 1, 4 heads"
    told = [figures.case_in_words(case, cases, words) for case in cases]
    assert told == ["4,096 tokens", "4,096 tokens, 512 selected keys", "16,384 tokens"]
    assert figures.case_in_words(cases[0], cases[:2], words) == "all keys"
    assert figures.case_in_words(cases[0], cases[:2], {}) == "no k"
    assert figures.number("1077495808") == "1.1 B"
    assert figures.number("inverse") == "inverse"


def test_picture_is_behind_when_a_row_changes(tmp_path):
    file = tmp_path / "h200.csv"
    file.write_text("a,b\n")
    assert figures.behind(file)
    figures.save(Figure(), file)
    assert not figures.behind(file)
    file.write_text("a,c\n")
    assert figures.behind(file)
    # One that was saved by other means.
    Figure().savefig(file.with_suffix(".png"))
    assert figures.behind(file)


def committed_pictures() -> list[Path]:
    parts = [*(package.folder for package in PACKAGES), MODELS]
    return [path for folder in parts for path in sorted(folder.glob("results/*.png"))]


@pytest.mark.parametrize(
    "picture", committed_pictures(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}"
)
def test_committed_picture_is_drawn_from_the_committed_rows(picture):
    assert not figures.behind(picture.with_suffix(".csv"))


def test_models_carry_the_same_text_as_a_relative_link():
    link = MODELS / "src/fusewright_models/figures"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (workspace.kit().import_folder / "figures").resolve()
