"""First calls are timed in processes of their own, with caches that are empty and filled."""

from __future__ import annotations

import csv
import os
import pathlib
import subprocess
import sys

import pytest
from fusewright_testkit.bench import merge
from fusewright_testkit.first_call import first_cases

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_rows_of_a_package_tell_what_its_first_calls_take(tmp_path):
    command = [sys.executable, "-m", "fusewright_testkit.first_call", "norm", "--device", "cpu"]
    command += ["--op", "rms_norm_gated", "--provider", "fusewright", "--out", str(tmp_path)]
    paths = [str(ROOT / path) for path in ("packages/norm/src", "ci/testkit/src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["provider"], row["cache"]) for row in rows] == [
        ("rms_norm_gated", "fusewright", "empty"),
        ("rms_norm_gated", "fusewright", "filled"),
        ("rms_norm_gated", "fusewright", "warmed"),
    ]
    clocks = ("import_s", "fwd_s", "bwd_s", "second_fwd_s", "second_bwd_s")
    assert all(float(row[clock]) > 0 for row in rows for clock in clocks)
    assert [bool(row["warm_up_s"]) for row in rows] == [False, False, True]


def test_first_case_of_each_op_is_timed_and_those_that_say_so(tmp_path):
    (tmp_path / "bench.py").write_text(
        "import torch\n"
        "from fusewright_testkit.cases import Case, by_pass\n"
        "def case(op, size, passes=by_pass(8), **more):\n"
        "    return Case(op, dict(B=size), torch.float32, list, print, passes, **more)\n"
        "def cases():\n"
        "    return [case('a', 1), case('a', 2), case('a', 3, first_call=True), case('b', 4),\n"
        "            case('step', 5, {'step': 8}, first_call=True)]\n"
    )
    found = [(case.op, case.described) for case in first_cases(tmp_path)]
    assert found == [("a", "B=1"), ("a", "B=3"), ("b", "B=4")]


def test_rows_stay_but_those_measured_again(tmp_path):
    path, columns = tmp_path / "first-call.csv", ("op", "fwd_s")
    for rows in ({"a": "1", "b": "2"}, {"b": "3", "c": "4"}):
        merge(path, [dict(op=op, fwd_s=s) for op, s in rows.items()], columns, identity=("op",))
    assert path.read_text().splitlines() == ["op,fwd_s", "a,1", "b,3", "c,4"]
