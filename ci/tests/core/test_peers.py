"""A benchmark runs without the libraries that are not there, and says why they are not."""

from __future__ import annotations

import csv
import importlib.metadata
import re

import pytest
import torch
from fusewright_testkit import bench
from fusewright_testkit.cases import Absent, installed


def here():
    return {"rms_norm": abs}


def missing():
    import a_library_that_is_not_there  # noqa: F401


def broken():
    raise AttributeError("module 'cutlass' has no attribute 'x'\nand more lines")


def test_a_library_that_is_installed_is_named_with_its_version():
    version = importlib.metadata.version("pytest")
    assert installed(("tests", "pytest", here)) == {f"tests-{version}": {"rms_norm": abs}}


@pytest.mark.parametrize(
    ("distribution", "load", "reason"),
    [
        ("pytest", missing, "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"),
        ("pytest", broken, "AttributeError: module 'cutlass' has no attribute 'x'"),
        (
            "a-library-that-is-not-there",
            here,
            "PackageNotFoundError: .*a-library-that-is-not-there",
        ),
    ],
    ids=["missing", "broken", "no distribution"],
)
def test_one_that_is_not_has_no_functions_and_the_reason(distribution, load, reason):
    ((name, ops),) = installed(("peer", distribution, load)).items()
    assert (name, ops) == ("peer", {})
    assert isinstance(ops, Absent)
    assert re.fullmatch(reason, ops.reason)


BENCH = """\
import torch
from fusewright_testkit.cases import Absent, Case, by_pass

def cases():
    sizes = ({"T": 1}, {"T": 2, "k": 1})
    return [Case("op", each, torch.float32, list, abs, by_pass(8)) for each in sizes]

def providers():
    return {"fusewright": {"op": abs}, "theirs": {"op": divmod}, "gone": Absent("no wheel")}
"""


def test_a_run_names_what_is_absent_and_what_fails_and_goes_on(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "packages/named"
    folder.mkdir(parents=True)
    (folder / "bench.py").write_text(BENCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "environment_name", lambda: "here")
    monkeypatch.setattr(bench, "check", lambda case, name, op, console: None)

    def rows_of_case(case, name, op):
        if op is divmod:
            raise RuntimeError("not on this GPU\nand more")
        measured = dict.fromkeys(bench.COLUMNS, "1")
        yield measured | {"op": case.op, "case": case.described, "provider": name}

    monkeypatch.setattr(bench, "rows_of_case", rows_of_case)
    bench.main("named", tmp_path, op="", provider="", sizes="k=1")
    printed = capsys.readouterr().out
    assert "here: fusewright, theirs\n  gone is absent: no wheel\n" in printed
    assert "theirs did not run op: RuntimeError: not on this GPU\n" in printed
    with (tmp_path / "here.csv").open(newline="") as file:
        rows = [(row["case"], row["provider"]) for row in csv.DictReader(file)]
    assert rows == [("T=2 k=1", "fusewright")]
