"""Runs of two processes over gloo are those of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.training import PARALLELS, Processes, TrainingConfig, captures
from fusewright_models.training.captured import make_stepper

from .commands import FILES, MEASURED, assert_refused, invoke, metrics
from .together import Command, compute_in_fp64, run_together, stop_at

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
# Sums of as many terms as a gradient has, in another order; the mean of selected keys is fp32.
BOUND, FP32_BOUND = 2**20 * torch.finfo(torch.float64).eps, 2 * torch.finfo(torch.float32).eps
# A process that waits for another in vain is given up.
SECONDS = 120
SIZES = ["--preset", "tiny", "--device", "cpu", "--log-every", "1", "--eval-every", "2"]
RUNS = {
    "transformer-np": ["--steps", "4", "--ragged", "--pad"],
    "titan-mac": ["--steps", "4", "--gradient-accumulation-steps", "2"],
    "hybrid": ["--steps", "4", "--indexer-warmup", "1"],
}


@pytest.fixture
def alone(monkeypatch, without_pictures):
    """Runs a command in this process, up to a step."""
    compute_in_fp64(monkeypatch)

    def run(arguments, until=None):
        with monkeypatch.context() as patch:
            stop_at(until, patch)
            result = invoke(app, *arguments)
        assert result.exit_code == 0, result.output

    return run


def assert_done(results: list[list[tuple[int, str]]]) -> None:
    """By all processes, of which the first one said so. Torch's warnings are no output of ours."""
    for rank, of_rank in enumerate(results):
        for code, output in of_rank:
            assert code == 0, output
            assert ("results in" in output) == (rank == 0)


def assert_near(folder: Path, other: Path) -> None:
    """In all that both have noted but times."""
    lines, others = metrics(folder), metrics(other)
    assert [each["step"] for each in lines] == [each["step"] for each in others]
    for one, two in zip(lines, others, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - MEASURED:
            bound = FP32_BOUND if name == "selected_keys" else BOUND
            assert two[name] == pytest.approx(one[name], rel=bound), name


# A minute each: the other tests here are of a TransformerNP, and some of a HybridLM.
@pytest.mark.parametrize(
    "model",
    [name if name == "titan-mac" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_run_of_two_processes_is_that_of_one(model, tmp_path, text, alone):
    flags = [model, *SIZES, *RUNS[model]]
    if model != "transformer-np":
        flags += ["--dataset", text, "--seq-len", "32"]
    whole, begun, begun_as_well = (tmp_path / name for name in ("whole", "begun", "as_well"))
    alone([*flags, "--out", whole])
    alone([*flags, "--out", begun], 2)
    shutil.copytree(begun, begun_as_well)
    config = begun_as_well / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"parallel": "fsdp"}))

    ddp, graphs, fsdp, left = (tmp_path / name for name in ("ddp", "graphs", "fsdp", "left"))
    results = run_together(
        [
            Command([*flags, "--out", ddp]),
            Command([*flags, "--out", graphs], replayed=True),
            Command([*flags, "--out", fsdp, "--parallel", "fsdp"]),
            Command([*flags, "--out", left, "--parallel", "fsdp"], until=2),
            Command([model, "--resume", begun]),
            Command([model, "--resume", begun_as_well]),
        ]
    )
    assert_done(results)
    alone([model, "--resume", left])
    for folder in (ddp, graphs, fsdp, left, begun, begun_as_well):
        assert_near(folder, whole)


def test_processes_that_share_rows_train_as_one(tmp_path, alone):
    """Three batches a step, whose gradients are added up in the last, of one task each."""
    flags = ["transformer-np", *SIZES, "--steps", "4", "--data", "blr", "--batch-size", "1"]
    flags += ["--context-size", "12", "--target-size", "8", "--gradient-accumulation-steps", "3"]
    whole, shared, left = (tmp_path / name for name in ("whole", "shared", "left"))
    alone([*flags, "--out", whole])
    context = "--parallel", "context"
    commands = [Command([*flags, *context, "--out", shared])]
    commands.append(Command([*flags, *context, "--out", left], until=2))
    assert_done(run_together(commands))
    alone(["transformer-np", "--resume", left])
    for folder in (shared, left):
        assert_near(folder, whole)


def test_signal_to_one_process_stops_all_at_a_log_point_with_a_checkpoint(tmp_path, alone):
    flags = ["transformer-np", *SIZES, "--steps", "6", "--log-every", "2", "--eval-every", "6"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    alone([*flags, "--out", whole])
    every = ["--checkpoint-every", "600m", "--out", stopped]
    for ((code, output),) in run_together([Command([*flags, *every], signalled=3)]):
        assert code == 128 + signal.SIGTERM, output
    assert (stopped / "checkpoints/step-000004/manifest.json").exists()
    alone(["transformer-np", "--resume", stopped])
    assert_near(stopped, whole)


def test_processes_go_on_from_one_checkpoint_or_not_at_all(tmp_path, alone):
    flags = ["transformer-np", *SIZES, "--steps", "6"]
    whole, begun, damaged = tmp_path / "whole", tmp_path / "begun", tmp_path / "damaged"
    alone([*flags, "--out", whole])
    alone([*flags, "--out", begun], 4)
    shutil.copytree(begun, damaged)
    with (damaged / "checkpoints/step-000004/state.pt").open("rb+") as file:
        file.truncate(100)
    resume = ["transformer-np", "--resume"]
    results = run_together(
        [Command([*resume, begun], lost="step-000004"), Command([*resume, damaged])]
    )
    for rank, ((code, output), (other_code, _)) in enumerate(results):
        assert code == 2
        assert "wanted all processes to read one checkpoint" in output, rank
        assert other_code == 0
    # Nothing was changed, and the one before the damaged one was taken by both.
    assert [each["step"] for each in metrics(begun)][-1] == 4
    alone([*resume, begun])
    for folder in (begun, damaged):
        assert_near(folder, whole)


def test_hosts_that_share_no_parameters_train_as_one_process(tmp_path, alone):
    flags = ["transformer-np", *SIZES, "--steps", "4", "--optimizer", "torch-adamw"]
    whole, hosts = tmp_path / "whole", tmp_path / "hosts"
    alone([*flags, "--out", whole])
    command = Command([*flags, "--parallel", "hsdp", "--out", hosts], until=2)
    assert_done(run_together([command, Command(["transformer-np", "--resume", hosts])], hosts=2))
    assert_near(hosts, whole)


def test_what_several_processes_cannot_do_is_refused_in_a_sentence(tmp_path, text):
    folder = tmp_path / "run"
    flags = ["transformer-np", *SIZES, "--steps", "2", "--out", folder]
    refused = {
        (
            "--batch-size",
            "5",
        ): "wanted a --batch-size of as many rows for each of 2 processes; got 5",
        ("--device", "cuda:1"): (
            "wanted --device cuda, of which each process takes the one of its number; got cuda:1"
        ),
        ("--capture",): "--capture needs a CUDA device; got --device cpu",
        ("--capture", "--parallel", "fsdp"): "wanted --parallel ddp beside --capture; got fsdp",
        ("--parallel", "context", "--ragged"): "tasks of one size; got --ragged",
        ("--parallel", "context"): (
            "--parallel context wants one --context-size, as many rows for each of 2 processes; "
            "got that of the data"
        ),
        ("--parallel", "context", "--context-size", "4", "--target-size", "3"): (
            "wants one --target-size, as many rows for each of 2 processes; got 3"
        ),
        ("--resume", folder): "--resume takes what is trained from its folder",
    }
    for results in run_together([Command([*flags, *more]) for more in refused]):
        for (code, output), sentence in zip(results, refused.values(), strict=True):
            assert code == 2
            assert sentence in output
    assert not folder.exists()


def test_an_evaluation_that_cannot_be_is_refused_once(tmp_path, text):
    """Whether that shows before the processes have met or behind, in all of them or in one."""
    run = tmp_path / "run"
    flags = ["titan-mac", *SIZES, "--steps", "1", "--dataset", text, "--seq-len", "32"]
    results = run_together(
        [
            Command([*flags, "--out", run]),
            Command(["evaluate", tmp_path / "nowhere"]),
            Command(["evaluate", run, "--device", "quantum"]),
            Command(["evaluate", run, "--seq-len", "16"], lost="state.pt"),
            Command(["evaluate", run, "--seq-len", "16"]),
        ]
    )
    sentences = (
        "wanted the folder of a run with config.json",
        "--device must be cpu, cuda or cuda:N; got 'quantum'",
        "wanted a checkpoint in",
    )
    for place, sentence in enumerate(sentences, 1):
        codes, outputs = zip(*(of_rank[place] for of_rank in results), strict=True)
        assert codes == (2, 2), outputs
        assert [sentence in output for output in outputs].count(True) == 1, outputs
    assert [of_rank[-1][0] for of_rank in results] == [0, 0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_is_told_how_to_start_several(parallel, tmp_path):
    folder = tmp_path / "run"
    flags = [*SIZES, "--parallel", parallel, "--out", folder]
    start = f"torchrun --nproc-per-node 2 -m fusewright_models titan-mac --parallel {parallel}"
    assert_refused(invoke(app, "titan-mac", *flags), start, folder)


@pytest.mark.slow
def test_losses_that_are_not_finite_end_all_processes(tmp_path):
    ends = {
        "torch-adamw": "not finite; lower the",
        "adamw": "the last 11 steps up to 12 were skipped",
    }
    runs = [(optimizer, parallel) for optimizer in ends for parallel in ("ddp", "fsdp")]
    flags = ["transformer-np", *SIZES, "--steps", "12", "--log-every", "12", "--eval-every", "12"]
    commands = []
    for optimizer, parallel in runs:
        out = ["--out", tmp_path / f"{optimizer}-{parallel}"]
        how = ["--optimizer", optimizer, "--parallel", parallel]
        commands.append(Command([*flags, *how, *out], rate=1e300))
    for rank, results in enumerate(run_together(commands)):
        for (optimizer, _), (code, output) in zip(runs, results, strict=True):
            assert code == 1
            assert (ends[optimizer] in output) == (rank == 0), output


@pytest.mark.slow
def test_other_optimizers_take_the_steps_of_one_process(tmp_path, alone):
    flags = ["transformer-np", *SIZES, "--steps", "4"]
    names = "nested", "m3", "muon", "learned"
    commands = []
    for name in names:
        commands.append(Command([*flags, "--optimizer", name, "--out", tmp_path / name]))
    for name in names:
        shards = [*flags, "--optimizer", name, "--parallel", "fsdp", "--out"]
        commands.append(Command([*shards, tmp_path / f"{name}-shards"]))
        # Left, for one process to go on.
        commands.append(Command([*shards, tmp_path / f"{name}-left"], until=2))
        # And the other way round.
        begun = tmp_path / f"{name}-begun"
        alone([*flags, "--optimizer", name, "--out", begun], 2)
        commands.append(Command(["transformer-np", "--resume", begun, "--parallel", "fsdp"]))
    assert_done(run_together(commands))
    for name in names:
        alone(["transformer-np", "--resume", tmp_path / f"{name}-left"])
    for name in names:
        whole = tmp_path / f"{name}-whole"
        alone([*flags, "--optimizer", name, "--out", whole])
        for way in ("", "-shards", "-left", "-begun"):
            folder = tmp_path / f"{name}{way}"
            assert_near(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["titan-mac", "hybrid"])
def test_matrices_of_language_models_are_multiplied_whole(model, tmp_path, text, alone):
    """Of more shapes than a TransformerNP's, in blocks that are gathered one after another."""
    flags = [model, *SIZES, *RUNS[model], "--dataset", text, "--seq-len", "32"]
    flags += ["--optimizer", "muon", "--out"]
    alone([*flags, tmp_path / "whole"])
    shards = Command([*flags, tmp_path / "shards", "--parallel", "fsdp"])
    assert_done(run_together([shards]))
    assert_near(tmp_path / "shards", tmp_path / "whole")


def test_torchrun_trains_a_sharded_model_and_continues_its_text(tmp_path, text):
    folder = tmp_path / "run"
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["-m", "fusewright_models", "hybrid", "--parallel", "fsdp", *SIZES]
    data = ["--dataset", text, "--seq-len", "32", "--steps", "2"]
    done = subprocess.run(
        [*map(str, [*program, *data, "--out", folder])],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"results in") == 1
    assert {path.name for path in folder.iterdir()} == FILES
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 2]


class Synchronised:
    """What is wrapped, as either wrapper has it."""

    adds = True

    @contextmanager
    def no_sync(self):
        self.adds = False
        yield
        self.adds = True

    def set_requires_gradient_sync(self, adds):
        self.adds = adds


@pytest.mark.parametrize("parallel", PARALLELS)
def test_gradients_are_added_up_in_the_last_batch_of_a_step(parallel):
    processes, model = Processes(), Synchronised()
    processes.parallel = parallel
    for last in (False, False, True, False):
        with processes.adding(model, last=last):
            assert model.adds == last


@pytest.mark.parametrize(
    ("parallel", "gathered"),
    [("fsdp", "parameters"), ("hsdp", "parameters"), ("context", "keys and values")],
)
def test_steps_that_gather_are_eager(parallel, gathered):
    model = torch.nn.Linear(2, 2)
    optimizer, config = torch.optim.AdamW(model.parameters()), TrainingConfig(2, 2, capture=True)
    several = Processes()
    several.parallel, several.count = parallel, 2
    with pytest.raises(ValueError, match=f"captured; --parallel {parallel} gathers {gathered}"):
        make_stepper(model, lambda *given: None, optimizer, config, print, several)
    assert not captures(optimizer, config, several)
