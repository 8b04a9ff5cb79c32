"""The page of a run: all of its parts are there, and it needs nothing beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fusewright_models.cli import app
from fusewright_models.training import RunFolder
from fusewright_models.training.reporting.report import page, write_report

from .commands import assert_refused, invoke, metrics

pytestmark = pytest.mark.usefixtures("short_samples")
MODELS = ("transformer-np", "titan-mac", "hybrid")
# Elements that have no end.
EMPTY = {"meta", "link", "img", "br", "hr", "input", "source"}
# What a browser would fetch or call.
FETCHED = {"src", "href", "xlink:href", "data", "srcset", "action", "poster", "background"}


class Page(HTMLParser):
    """Its sections with their text, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.sections, self.references, self.names = [], {}, [], []
        self.elements = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.elements.add(tag)
        if tag not in EMPTY:
            self.open.append((tag, given.get("id") if tag == "section" else None))
        self.names += [given["id"]] if "id" in given else []
        self.references += [x for name, x in attributes if name in FETCHED]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(filter(None, given.values())))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        if self.open and self.open[-1][0] == "style":
            self.references += re.findall(r"url\(([^)]*)\)|(@import)", text)
        for section in [name for _, name in self.open if name]:
            self.sections[section] = self.sections.get(section, "") + text


def assert_stands_alone(found: Page) -> None:
    assert len(set(found.names)) == len(found.names)
    inside = {f"#{name}" for name in found.names}
    for each in found.references:
        assert each in inside or each.startswith("data:image/png;base64,"), each
    assert not found.elements & {"script", "link", "iframe", "object", "embed", "base"}


@pytest.fixture(scope="module", params=MODELS)
def finished(request, tmp_path_factory, text, short_samples) -> Path:
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("report") / "run"
    flags = ["--preset", "tiny", "--steps", "4", "--log-every", "1", "--batch-size", "2"]
    data = [] if request.param == "transformer-np" else ["--dataset", text, "--seq-len", "16"]
    result = invoke(app, request.param, *flags, "--eval-every", "2", *data, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_page_has_every_part_and_needs_nothing_beside_it(finished):
    found = Page((finished / "report.html").read_text())
    assert_stands_alone(found)
    model = json.loads((finished / "config.json").read_text())["model"]
    own = "predictions" if model == "transformer-np" else "sample"
    parts = ["scores", "curves", "speed", "incidents", own, "settings"]
    assert [*found.sections] == parts

    lines = metrics(finished)
    scores = [line for line in lines if "lr" not in line]
    assert "step 0" in found.sections["scores"]
    assert "step 4" in found.sections["scores"]
    for line in (scores[0], scores[-1]):
        assert f"{line['held_out_log_likelihood']:.4f}" in found.sections["scores"]
    for label in ("minus log-likelihood, nats", "gradient norm", "learning rate", "step"):
        assert label in found.sections["curves"]
    for label in ("tokens a second, median", "peak memory, GiB", "training, s", "evaluations, s"):
        assert label in found.sections["speed"]
    assert "No skipped steps, no spikes" in found.sections["incidents"]
    for name in json.loads((finished / "config.json").read_text()):
        assert name in found.sections["settings"]
    if own == "sample":
        shown = (finished / "sample.txt").read_bytes().decode(errors="replace")
        assert found.sections["sample"].split()[4:] == shown.split()
    else:
        assert any(each.startswith("data:image/png") for each in found.references)


def test_command_writes_the_page_again(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    result = invoke(app, "report", folder)
    assert result.exit_code == 0, result.output
    assert f"the report is in {folder}/report.html" in result.output
    assert (folder / "report.html").read_bytes() == before


def run_folder(path: Path, lines: list[dict], **config) -> RunFolder:
    folder = RunFolder(path)
    folder.write_config({"model": "titan-mac", "steps": 100, "clip_norm": 0.5} | config)
    for line in lines:
        folder.append_metrics(line)
    return folder


def test_page_of_a_run_that_has_just_begun(tmp_path):
    found = Page(page(run_folder(tmp_path, [])))
    assert_stands_alone(found)
    assert "No evaluation yet." in found.sections["scores"]
    assert [*found.sections] == ["scores", "curves", "speed", "incidents", "settings"]


def test_page_tells_what_went_wrong_and_the_share_of_evaluations(tmp_path):
    line = {"loss": 1.0, "gradient_norm": 1.0, "lr": 0.1, "seconds": 2.0, "tokens_per_second": 9.0}
    lines = [line | {"step": step, "mfu": 0.4} for step in range(1, 10)]
    lines[6] |= {"skipped_steps": 1}
    lines.append({"step": 9, "held_out_log_likelihood": -1.5, "evaluation_seconds": 2.0})
    found = Page(page(run_folder(tmp_path, lines)))
    assert "step 7: 1 skipped, with losses or gradients" in found.sections["incidents"]
    assert "40.0%" in found.sections["speed"]
    assert "2.0 (10.0%)" in found.sections["speed"]


def test_what_a_run_has_read_and_written_is_text_and_no_part_of_the_page(tmp_path):
    folder = run_folder(tmp_path, [], dataset="<script src='https://example.org/x.js'></script>")
    folder.write("sample.txt", b"</pre><img src='https://example.org/y.png'>\xff")
    found = Page(page(folder))
    assert_stands_alone(found)
    assert "https://example.org/x.js" in found.sections["settings"]
    assert "</pre><img src='https://example.org/y.png'>\ufffd" in found.sections["sample"]


def test_page_shows_names_of_files_that_are_not_utf_8(tmp_path):
    folder = run_folder(tmp_path, [], dataset=os.fsdecode(b"/data/\xe9t\xe9s"))
    write_report(folder)
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "/data/?t?s" in found.sections["settings"]


def test_report_of_no_run_is_refused(tmp_path):
    assert_refused(invoke(app, "report", tmp_path), "wanted the folder of a run with", tmp_path)
