from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fusewright_models.cli import app, transformer_np
from fusewright_models.data import DATA_NAMES, Digits
from fusewright_models.training import RunFolder

from .commands import (
    assert_refused,
    assert_same_metrics,
    assert_same_weights,
    flags_of,
    interrupted,
    invoke,
    leave_out_pictures,
    metrics,
    state_file,
    train_at,
)

FILES = {"config.json", "metrics.jsonl", "loss.png", "predictions.png", "report.html"}
FILES |= {"checkpoints", "run.lock"}
TINY = ["--preset", "tiny", "--steps", "5", "--log-every", "2", "--eval-every", "3"]


def run(*arguments):
    return invoke(app, "transformer-np", *arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("data", DATA_NAMES)
def test_five_steps_leave_every_file_and_report_the_scores(tmp_path, data):
    out = tmp_path / "run"
    result = run(*TINY, "--data", data, "--out", out)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "predictions.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "config.json").read_text())
    assert (config["model"], config["data"], config["steps"]) == ("transformer-np", data, 5)

    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [2, 3, 4, 5]
    scores = [line for line in lines if "held_out_log_likelihood" in line]
    assert [line["step"] for line in scores] == [0, 3, 5]
    assert [line["held_out_tasks"] for line in scores] == [8, 8, 32]
    assert len({line["reference_log_likelihood"] for line in scores[:2]}) == 1
    for line in (scores[0], scores[-1]):
        assert f"{line['held_out_log_likelihood']:.4f}" in result.output
    assert f"{scores[-1]['reference_log_likelihood']:.4f}" in result.output


def test_same_seed_same_run_and_interrupted_run_resumes_to_it(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*TINY, "--out", whole).exit_code == 0
    # Two batches are the evaluations of steps 0 and 3, three are training steps before it.
    stopped = interrupted(monkeypatch, Digits, 7, lambda: run(*TINY, "--out", parts))
    assert stopped.exit_code == 130
    assert f"--resume {parts}" in stopped.output
    assert RunFolder(parts).load_checkpoint()["step"] == 3

    resumed = run("--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    assert (whole / "predictions.png").read_bytes() == (parts / "predictions.png").read_bytes()


@pytest.mark.usefixtures("without_pictures")
def test_run_stopped_before_its_first_checkpoint_resumes_from_its_start(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*TINY, "--out", whole).exit_code == 0
    # One batch is the evaluation of step 0; the third training step is never taken.
    stopped = interrupted(monkeypatch, Digits, 4, lambda: run(*TINY, "--out", parts))
    assert stopped.exit_code == 130
    assert not RunFolder(parts).holds_a_checkpoint

    resumed = run("--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    steps = [[line["step"] for line in metrics(path)] for path in (whole, parts)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        # fusewright's skips steps whose gradients have no finite norm, of corrupted weights all.
        ("adamw", "parameters after step 3: not finite"),
        ("torch-adamw", "over steps 1 to 2: not finite"),
    ],
)
def test_run_that_is_not_finite_ends_in_one_sentence(tmp_path, monkeypatch, optimizer, what):
    train_at(monkeypatch, 1e39)
    result = run(*TINY, "--optimizer", optimizer, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "stopped: " in result.output
    assert f"{what}; lower the learning rate" in result.output
    assert not RunFolder(tmp_path / "run").holds_a_checkpoint
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of one step, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        assert run(*TINY, "--steps", "1", "--out", folder).exit_code == 0
    return folder


def config_with(**changes) -> Callable[[Path], None]:
    """An edit of a run's config.json."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def config_without(*names: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if name not in names}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def file_of(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


def cut_checkpoint(folder: Path) -> None:
    file = state_file(folder)
    file.write_bytes(file.read_bytes()[:1000])


def only_checkpoint(content: bytes) -> Callable[[Path], None]:
    return lambda folder: state_file(folder).write_bytes(content)


def checkpoint_of(state: object) -> Callable[[Path], None]:
    """As a run of before left one, which has no digest."""

    def edit(folder: Path) -> None:
        shutil.rmtree(folder / "checkpoints")
        torch.save(state, folder / "checkpoint.pt")

    return edit


def metrics_of(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """An edit of the lines of metrics.jsonl."""

    def edit(folder: Path) -> None:
        file = folder / "metrics.jsonl"
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return edit


CONFIG, CHECKPOINT = "{folder}/config.json", "{folder}/checkpoints/step-000001/state.pt"
SINGLE = "{folder}/checkpoint.pt"
CORRUPTED = {
    "model": (config_with(model="titan-mac"), "{folder} holds another model's"),
    "colour": (config_with(colour="red"), "begun by another version: colour differ"),
    "no-ragged": (config_without("ragged"), "begun by another version: ragged differ"),
    "no-device": (config_without("device"), "begun by another version: device differ"),
    "no-pad": (config_without("pad", "ragged"), "begun by another version: ragged differ"),
    "norm": (config_with(norm="mid"), f"{CONFIG}: norm must be one of ('pre', 'post'); got 'mid'"),
    "preset": (config_with(preset="huge"), f"{CONFIG}: preset must be one of ('tiny', 'demo', "),
    "data": (config_with(data="mnist"), f"{CONFIG}: data must be one of ('digits', 'gp-rbf', "),
    "data-list": (config_with(data=["blr"]), f"{CONFIG}: data must be str; got ['blr']"),
    "text": (config_with(steps="many"), f"{CONFIG}: steps must be int; got 'many'"),
    "float": (config_with(batch_size=2.0), f"{CONFIG}: batch_size must be int; got 2.0"),
    "bool": (config_with(steps=True), f"{CONFIG}: steps must be int; got True"),
    "null": (config_with(lr=None), f"{CONFIG}: lr must be float; got None"),
    "number": (config_with(context_size=4), f"{CONFIG}: context_size must be str or None; got 4"),
    "zero": (config_with(steps=0), f"{CONFIG}: steps must be at least 1; got 0"),
    "size": (config_with(context_size="9-3"), f"{CONFIG}: a size is a count such as 64"),
    "seed": (
        config_with(seed=2**70),
        f"{CONFIG}: seed must be at least 0 and at most {2**63 - 1}",
    ),
    "device": (config_with(device="meta"), f"{CONFIG}: --device must be cpu, cuda or cuda:N"),
    "list": (file_of("config.json", b"[]"), f"wanted a JSON object in {CONFIG}; got a list"),
    "brace": (file_of("config.json", b"{"), f"wanted a JSON object in {CONFIG}; got no JSON"),
    "bytes": (
        file_of("config.json", b"\xff\xfe"),
        f"wanted a JSON object in {CONFIG}; got no JSON",
    ),
    "cut": (cut_checkpoint, f"wanted a checkpoint of a run in {CHECKPOINT}; got a damaged file"),
    "empty": (
        only_checkpoint(b""),
        f"wanted a checkpoint of a run in {CHECKPOINT}; got a damaged file",
    ),
    "no-pickle": (
        only_checkpoint(b"not a checkpoint"),
        f"wanted a checkpoint of a run in {CHECKPOINT}; got a damaged file",
    ),
    "tensor": (
        checkpoint_of(torch.zeros(1)),
        f"wanted a checkpoint of a run in {SINGLE}; got a saved Tensor",
    ),
    "weights": (
        checkpoint_of({"model": {}}),
        f"source, step, torch_rng in {SINGLE}; got model",
    ),
    "other-data": (
        config_with(data="blr"),
        "wanted the choices that the run was trained with: data 'digits'; got data 'blr'",
    ),
    "later-choice": (
        config_with(frequencies=2),
        "wanted the choices that the run was trained with: frequencies 'absent'; got frequencies 2",
    ),
    "torn-before": (
        metrics_of(lambda lines: [lines[0], '{"step": 2, "lo\n', *lines[1:]]),
        "wanted a JSON object in line 2 of {folder}/metrics.jsonl; got no",
    ),
    "no-step": (
        metrics_of(lambda lines: [*lines, "{}\n"]),
        "wanted the number of a step in line 4 of {folder}/metrics.jsonl; got none",
    ),
    "no-metrics": (
        lambda folder: (folder / "metrics.jsonl").unlink(),
        "wanted the metrics up to step 1, which the checkpoint was saved after, in "
        "{folder}/metrics.jsonl; got none",
    ),
    "few-metrics": (metrics_of(lambda lines: lines[:1]), "got those up to step 0"),
    "empty-config": (file_of("config.json", b""), f"wanted a JSON object in {CONFIG}; got no JSON"),
    "empty-object": (
        file_of("config.json", b"{}"),
        f"wanted the name of a model in {CONFIG}; got an empty object",
    ),
    "no-config": (
        lambda folder: (folder / "config.json").unlink(),
        "wanted the folder of a run with config.json; got {folder}",
    ),
    **{
        f"edited-{name}": (
            config_with(**{name: value}),
            f"wanted the choices that the run was trained with: {name} {before!r}; "
            f"got {name} {value!r}",
        )
        for name, before, value in (
            ("ragged", False, True),
            ("seed", 0, 3),
            ("weight_decay", 0.01, 0.5),
            ("batch_size", 8, 4),
            ("lr", 0.002, 0.001),
        )
    },
}


def contents(folder: Path) -> dict[str, bytes]:
    """But for the lock, which is no part of the run."""
    files = [each for each in folder.rglob("*") if each.is_file() and each.name != "run.lock"]
    return {str(each): each.read_bytes() for each in files}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTED.values(), ids=CORRUPTED)
def test_run_that_cannot_be_resumed_is_refused_and_kept(tmp_path, finished, corrupt, message):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    corrupt(folder)
    before = contents(folder)
    result = run("--resume", folder)
    assert_refused(result, re.escape(message.format(folder=folder)))
    assert "weights_only" not in result.output
    assert contents(folder) == before


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("change", "torn"),
    [
        (lambda lines: [*lines, '{"step": 2, "lo'], '{"step": 2, "lo'),
        # Of the last evaluation, which is taken again.
        (lambda lines: [*lines[:-1], lines[-1][:20]], '{"step": 1, "held_ou'),
        # Whole, but for its end.
        (lambda lines: [*lines[:-1], lines[-1].rstrip()], None),
    ],
    ids=["of-later", "of-checkpoint", "no-end"],
)
def test_torn_last_line_of_metrics_is_dropped_and_told(tmp_path, finished, change, torn):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    metrics_of(change)(folder)
    result = run("--resume", folder)
    assert result.exit_code == 0, result.output
    told = f"dropped the last line of {folder}/metrics.jsonl, torn: b{torn!r}"
    assert ("dropped" not in result.output) if torn is None else (told in result.output)
    assert_same_metrics(finished, folder)


@pytest.mark.usefixtures("without_pictures")
def test_torn_last_line_is_dropped_where_there_is_no_checkpoint_yet(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints")
    metrics_of(lambda lines: [*lines[:1], '{"step'])(folder)
    result = run("--resume", folder)
    assert result.exit_code == 0, result.output
    assert "dropped the last line" in result.output
    assert_same_weights(finished, folder)
    assert_same_metrics(finished, folder)


@pytest.mark.usefixtures("without_pictures")
def test_where_and_how_a_run_is_trained_may_change(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    config_with(log_every=7, eval_every=9, capture=False, pad=True, backend="reference")(folder)
    result = run("--resume", folder)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("names", [["pad"], ["ahead", "frequencies"]], ids="-".join)
def test_run_of_before_that_says_nothing_of_later_choices_resumes(tmp_path, finished, names):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    config_without(*names)(folder)
    choices = RunFolder(folder).load_checkpoint()["choices"]
    assert not choices.keys() & set(names)
    result = run("--resume", folder)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("without_pictures")
def test_checkpoint_of_before_that_has_no_choices_resumes(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    state = RunFolder(folder).load_checkpoint()
    for name in ("choices", "noted", "evaluated", "since_log"):
        del state[name]
    del state["source"]["tasks"]
    checkpoint_of(state)(folder)
    result = run("--resume", folder)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("left", [["metrics.jsonl"], ["checkpoints"]], ids="-".join)
def test_results_are_not_mixed_with_those_of_a_run_without_its_config(tmp_path, finished, left):
    for name in left:
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        copy(finished / name, tmp_path / name)
    result = run(*TINY, "--out", tmp_path)
    message = f"wanted a folder without a run's files in --out; got {tmp_path}, which holds "
    assert_refused(result, re.escape(message + " and ".join(left)))
    assert [path.name for path in tmp_path.iterdir()] == left


@pytest.mark.parametrize("below", [".", "run"])
def test_results_folder_that_cannot_be_made_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    result = run(*TINY, "--out", tmp_path / "file" / below)
    assert_refused(result, re.escape(str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_results_join_other_files_of_an_existing_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(*TINY, "--steps", "1", "--out", tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"notes.txt"}


@pytest.mark.sampled
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_one_task_of_one_context_point_and_one_target_trains(tmp_path, norm, scale):
    sizes = ["--batch-size", "1", "--context-size", "1", "--target-size", "1"]
    result = run(*TINY, *sizes, "--norm", norm, "--scale", scale, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.usefixtures("without_pictures")
def test_options_reach_the_run(tmp_path):
    choices = {
        "--norm": "post",
        "--scale": "softplus",
        "--backend": "reference",
        "--precision": "bf16",
        "--context-size": "4-6",
        "--target-size": "8",
        "--frequencies": "3",
        "--ahead": "2",
        "--batch-size": "2",
        "--optimizer": "muon",
        "--lr": "0.002",
        "--weight-decay": "0.1",
        "--seed": "7",
        "--device": "cpu",
        "--checkpointing": "keep-attention",
    }
    flags = [text for pair in choices.items() for text in pair]
    flags += ["--indicator", "--ragged", "--no-compile", "--no-capture", "--no-pad"]
    result = run(*TINY, *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run/config.json").read_text())
    for flag, value in choices.items():
        assert str(config[flag.removeprefix("--").replace("-", "_")]) == value
    assert (config["indicator"], config["ragged"]) == (True, True)
    assert (config["compile"], config["capture"], config["pad"]) == (False, False, False)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("flag", [None, "--pad", "--no-pad"])
def test_batches_are_padded_where_steps_are_captured_or_it_is_asked_for(
    tmp_path, monkeypatch, captures, flag
):
    """Steps of the CPU are not captured: that they would be is made up."""
    monkeypatch.setattr(transformer_np, "captures", lambda *given: captures)
    flags = ["--data", "gp-rbf", *([flag] if flag else [])]
    assert run(*TINY, *flags, "--out", tmp_path).exit_code == 0
    trained = [line for line in metrics(tmp_path) if "loss" in line]
    padded = [line.get("padded_tokens_per_second", 0.0) > 0.0 for line in trained]
    assert any(padded) == (captures if flag is None else flag == "--pad")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "mnist"], "data must be one of ('digits', "),
        (["--preset", "huge"], "'huge' is not one of"),
        (["--precision", "fp16"], "'fp16' is not one of"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--context-size", "9-3"], "a range such as 3-46; got '9-3'"),
        (["--context-size", "40", "--target-size", "40"], "got sizes that add up to 80"),
        (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
        (["--backend", "cuda"], "'cuda' is not one of"),
        (["--lr", "fast"], "Invalid value for '--lr'"),
        (["--lr", "-1"], "Invalid value for '--lr'"),
        (["--lr", "nan"], "Invalid value"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--seed", str(2**63)], "Invalid value for '--seed'"),
        (["--frequencies", "-1"], "Invalid value for '--frequencies'"),
        (["--context-size", "64"], "an image has 64 pixels"),
        (["--device", "mps"], "--device must be cpu, cuda or cuda:N; got 'mps'"),
        (["--resume", "nowhere"], "wanted the folder of a run with config.json; got nowhere"),
        (["--resume", "nowhere", "--lr", "1"], "takes what is trained from its folder; got --lr"),
    ],
    ids=flags_of,
)
def test_bad_flags_get_one_clear_sentence(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    result = run(*flags)
    assert_refused(result, re.escape(message), tmp_path)


def test_existing_run_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = run(*TINY, "--out", tmp_path)
    assert result.exit_code == 2
    assert "holds a run: continue it with --resume" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("without_pictures")
def test_paths_are_printed_as_they_are(tmp_path):
    """Brackets are no markup, and colons no pictures."""
    out = tmp_path / "run[bold]:smile:[" / "]"
    result = run(*TINY, "--profile", "1:1", "--out", out)
    assert result.exit_code == 0, result.output
    for told in (f"fp32, into {out}", f"the trace is in {out}/trace", f"results in {out}"):
        assert told in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_gpu_is_said_before_anything_is_written(tmp_path):
    result = run(*TINY, "--device", "cuda", "--out", tmp_path / "run")
    assert_refused(result, "--device cuda", tmp_path)


def test_help_lists_the_subcommand():
    result = invoke(app, "--help")
    assert result.exit_code == 0
    assert "transformer-np" in result.output


@pytest.mark.gpu
def test_training_on_the_gpu_in_bf16_leaves_every_file(tmp_path):
    result = run(*TINY, "--device", "cuda", "--precision", "bf16", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == FILES
