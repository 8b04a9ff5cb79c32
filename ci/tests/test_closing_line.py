"""Many runs close in one line, and nothing that went wrong reads as a success."""

from __future__ import annotations

from pathlib import Path

import closing_line
import pytest

XML = (
    '<testsuites><testsuite name="pytest" tests="{tests}" failures="{failures}" errors="{errors}" '
    'skipped="{skipped}" time="{time}"/></testsuites>'
)


def write(folder: Path, name: str, tests=0, failures=0, errors=0, skipped=0, time=1.5) -> None:
    text = XML.format(tests=tests, failures=failures, errors=errors, skipped=skipped, time=time)
    (folder / name).write_text(text)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["closing_line.py", str(tmp_path), *arguments])
        code = closing_line.main()
        return code, capsys.readouterr().out.strip("=\n ")

    return call


def test_counts_are_summed(tmp_path, run):
    write(tmp_path, "lint.xml", tests=20)
    write(tmp_path, "tests-norm.xml", tests=107, skipped=4)
    assert run() == (0, "123 passed, 4 skipped in 3.00s")


def test_a_failure_fails(tmp_path, run):
    write(tmp_path, "tests-norm.xml", tests=3, failures=1, errors=2)
    write(tmp_path, "lint.xml", tests=1)
    assert run() == (1, "1 failed, 1 passed, 2 errors in 3.00s")


def test_a_stage_that_failed_without_a_failed_test_is_an_error(tmp_path, run):
    write(tmp_path, "lint.xml", tests=20)
    assert run("--failed", "lint") == (1, "20 passed, 1 error in 1.50s")
    assert run("--failed", "tests") == (1, "20 passed, 1 error in 1.50s")


def test_a_failed_test_is_not_counted_twice(tmp_path, run):
    write(tmp_path, "tests-norm.xml", tests=20, failures=1)
    assert run("--failed", "tests") == (1, "1 failed, 19 passed in 1.50s")


def test_nothing_at_all_fails(tmp_path, run):
    assert run() == (1, "no tests ran in 0.00s")
    write(tmp_path, "tests-norm.xml", tests=2, skipped=2)
    assert run() == (1, "2 skipped in 1.50s")
