"""What several processes are left of the speed of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fusewright_models.bench.__main__ import app as bench
from fusewright_models.bench.scaling import MODEL_NAMES

from .commands import assert_refused, invoke, rows_of

SHAPES = {"transformer-np": "8,8,4", "titan-mac": "2,32", "hybrid": "2,32"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_ways_of_two_processes_are_beside_one(model, tmp_path):
    flags = ["--preset", "tiny", "--shape", SHAPES[model], "--device", "cpu", "--steps", "1"]
    program = [*TORCHRUN, "-m", "fusewright_models.bench", "scaling", model, *flags]
    done = subprocess.run(
        [*program, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    # Graphs want a GPU.
    ways = ["alone, eager", "ddp, eager", "fsdp, eager"]
    shared = ["context, eager"] if model == "transformer-np" else []
    assert [row["way"] for row in rows] == ways + shared
    assert [row["processes"] for row in rows] == ["1", *(["2"] * (len(rows) - 1))]
    assert float(rows[0]["efficiency"]) == 1.0
    for row in rows:
        tokens = 64 if row["way"] in shared else 64 * int(row["processes"])
        speed, count = 1e3 * tokens / float(row["ms"]), int(row["processes"])
        assert float(row["tokens_per_second"]) == pytest.approx(speed, rel=1e-2)
        alone = float(rows[0]["tokens_per_second"])
        assert float(row["efficiency"]) == pytest.approx(speed / count / alone, rel=1e-2)


def test_one_process_alone_is_refused():
    message = "scaling is of several processes: start them by torchrun"
    assert_refused(invoke(bench, "scaling", "hybrid"), message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["large"], "model must be of transformer-np, titan-mac, hybrid; got 'large'"),
        (["hybrid", "--preset", "2b"], "preset must be of tiny, .* got '2b'"),
        (["hybrid", "--shape", "2"], "a shape is B,T"),
        (["hybrid", "--way", "ddp"], "--way of hybrid must be of .* got"),
        (["titan-mac", "--way", "context, eager"], "--way of titan-mac must be of .* got"),
    ],
)
def test_unknown_subjects_are_refused_before_processes_meet(flags, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    assert_refused(invoke(bench, "scaling", *flags), message)
