"""quick.py and on_gpu.py run tests from source, and a GPU run without GPU tests is no success."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import workspace

PLUGIN = 'def pytest_report_header():\n    return "the testkit is in"\n'
TESTS = """\
import importlib.metadata
import pytest
import fusewright.norm

def test_version_is_the_written_one():
    assert importlib.metadata.version("fusewright-norm") == "0.1.0"

@pytest.mark.gpu
def test_on_gpu():
    {on_gpu}
"""
BENCH = "import pathlib, sys\npathlib.Path(sys.argv[3]).mkdir()\nprint('benched', *sys.argv[1:])\n"


@pytest.fixture
def run(repository):
    """Runs a script of a repository that has its own copy of the scripts."""
    for script in workspace.ROOT.glob("ci/*.py"):
        shutil.copy(script, repository / "ci")
    shutil.copy(workspace.ROOT / "pyproject.toml", repository)
    kit = repository / "ci/testkit/src/fusewright_testkit"
    (kit / "entry.py").write_text(PLUGIN)
    (kit / "bench.py").write_text(BENCH)

    def call(script: str, *arguments: str, on_gpu: str = "pass") -> tuple[int, str]:
        tests = repository / "packages/norm/tests/test_norm.py"
        tests.write_text(TESTS.format(on_gpu=on_gpu))
        command = [sys.executable, str(repository / "ci" / script), *arguments]
        told = subprocess.run(command, capture_output=True, text=True)
        return told.returncode, told.stdout + told.stderr

    return call


def test_quick_runs_the_quick_tier_with_the_testkit(run):
    code, told = run("quick.py", "norm", "-k", "version", "-v")
    assert code == 0, told
    assert "the testkit is in" in told
    assert "1 passed, 1 deselected" in told


def test_quick_refuses_an_unknown_package(run):
    code, told = run("quick.py", "nrom")
    assert code == 1
    assert "wanted one of" in told


@pytest.mark.parametrize(
    ("on_gpu", "code"), [("pass", 0), ("assert False", 1), ("pytest.skip('no GPU')", 1)]
)
def test_gpu_run_needs_an_executed_and_passing_test(run, on_gpu, code):
    got, told = run("on_gpu.py", "norm", "--tests", on_gpu=on_gpu)
    assert got == code, told
    assert ("no GPU test of norm was executed" in told) == ("skip" in on_gpu)


def test_all_runs_every_part_and_fails_where_one_does(run):
    code, told = run("on_gpu.py", "all", "--tests")
    assert code == 1
    assert "== norm\n" in told
    assert "1 passed, 1 deselected" in told
    assert "no GPU test of memory-mlp was executed" in told


def test_all_benchmarks_at_once_are_refused(run):
    assert run("on_gpu.py", "all", "--tests", "--bench")[0] == 2


@pytest.mark.parametrize("name", ["all", "norm"])
def test_out_without_benchmarks_is_refused(run, tmp_path, name):
    code, told = run("on_gpu.py", name, "--tests", "--out", str(tmp_path / "new"))
    assert code == 2
    assert f"wanted --bench with --out, which is the benchmarks', got {tmp_path / 'new'}" in told
    assert "passed" not in told


def test_bench_calls_the_testkits_runner(run, tmp_path):
    code, told = run(
        "on_gpu.py", "norm", "--bench", "--out", str(tmp_path / "new"), "--", "rms_norm"
    )
    assert code == 0, told
    assert f"benched norm --out {tmp_path / 'new'} rms_norm" in told


def test_neither_tests_nor_bench_is_an_error(run):
    assert run("on_gpu.py", "norm")[0] == 2
