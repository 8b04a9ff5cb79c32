"""Commands on the pages about training, the tutorials' too, have the flags that they say, and the
code runs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from fusewright_models import TITAN_MAC, TitanMAC
from fusewright_models.bench.__main__ import app as bench
from fusewright_models.cli import app, sweep
from fusewright_testkit.pages import python_blocks

INTEGRATION = Path(__file__).resolve().parents[1]
DOCS = INTEGRATION.parent / "docs"
PAGES = [INTEGRATION / "README.md", DOCS / "models/training.md", DOCS / "performance.md"]
PAGES += sorted(DOCS.glob("tutorials/*.md"))
PROGRAMS = {"fusewright-train": app, "fusewright_models": app, "fusewright_models.bench": bench}

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not PAGES[1].exists(), reason="docs/ is not beside these tests")


def commands() -> list[str]:
    """Lines of code, put together where they go on."""
    text = "\n".join(page.read_text() for page in PAGES if page.exists()).replace("\\\n", " ")
    # torchrun's own flags come before -m.
    program = r"fusewright-train|torchrun .*-m|python -m"
    found = re.findall(rf"^(?: {{4}})?((?:{program}) .*)$", text, re.M)
    return sorted({line for line in found if "studies" not in line and "evaluation" not in line})


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_flags_that_the_pages_say(line):
    words = shlex.split(line)
    program, rest = words[0], words[1:]
    if "-m" in words:
        place = words.index("-m")
        program, rest = words[place + 1], words[place + 2 :]
    command = typer.main.get_command(PROGRAMS[program])
    named = command.commands[rest[0]]
    context = named.make_context(program, rest[1:])
    if rest[0] == "sweep":
        for _, given in sweep.combinations(context.args):
            sweep.settings_of(command.commands[rest[1]], rest[1], given)
    else:
        assert context.args == []


def test_the_pages_show_what_there_is_to_do():
    shown = {shlex.split(line)[1] for line in commands() if line.startswith("fusewright-train")}
    assert shown >= {"transformer-np", "titan-mac", "hybrid", "sweep", "export", "generate"}


def test_code_about_published_models_runs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    TitanMAC(TITAN_MAC["tiny"]).save_pretrained(tmp_path / "titan-mac")
    monkeypatch.chdir(tmp_path)
    code = python_blocks(PAGES[1].read_text())
    mine = [each for each in code if "from_pretrained" in each or "load_scorer" in each]
    assert len(mine) == 2
    for each in mine:
        exec(compile(each.replace('"cuda"', '"cpu"'), str(PAGES[1]), "exec"), {})
    assert (tmp_path / "copy/model.safetensors").is_file()
