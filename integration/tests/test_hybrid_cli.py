"""HybridLM through the training program: what its command adds to that of other models."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli.commands import read_run
from fusewright_models.cli.hybrid import HybridBatch, HybridRun, WarmedWindows, all_losses
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.text import Windows
from fusewright_models.training import RunFolder, Trainer, TrainingConfig, adamw, make_optimizer
from rich.console import Console

from .commands import (
    FILES,
    assert_refused,
    assert_same_metrics,
    assert_same_weights,
    invoke,
    metrics,
)

pytestmark = pytest.mark.usefixtures("short_samples")

TINY = "--preset tiny --seq-len 20 --batch-size 2 --steps 5 --log-every 2 --eval-every 3"
TINY = [*TINY.split(), "--indexer-warmup", "2", "--backend", "reference"]
TOLD = {"next_token_loss", "second_token_loss", "indexer_loss", "selected_keys"}


def run(*arguments):
    return invoke(app, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, short_samples):
    """The folder of a short run, which is only read, and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = run("hybrid", *TINY, "--dataset", text, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_five_steps_leave_every_file_and_report_the_scores(finished):
    folder, output = finished
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert (config["model"], config["preset"], config["indexer_warmup"]) == ("hybrid", "tiny", 2)
    scores = [line for line in metrics(folder) if "held_out_bits_per_byte" in line]
    assert [line["step"] for line in scores] == [0, 3, 5]
    assert abs(scores[0]["held_out_bits_per_byte"] - 8.0) < 0.3
    assert scores[-1]["held_out_bits_per_byte"] < scores[0]["held_out_bits_per_byte"]
    assert f"{scores[-1]['held_out_bits_per_byte']:.4f}" in output
    assert f"{scores[-1]['order_2_bits_per_byte']:.4f}" in output


def test_log_points_tell_the_parts_of_the_loss_and_the_keys(finished):
    lines = [line for line in metrics(finished[0]) if "loss" in line]
    assert [line["step"] for line in lines] == [2, 3, 4, 5]
    for line in lines:
        assert line.keys() >= TOLD
        assert "saturated_batches" not in line
        parts = line["next_token_loss"] + 0.3 * line["second_token_loss"] + line["indexer_loss"]
        assert line["loss"] == pytest.approx(parts, rel=4 * torch.finfo(torch.float32).eps)
    # Two dense steps, whose queries see 1 to 20 keys, those of the last layer 1 to 19.
    assert lines[0]["selected_keys"] == pytest.approx((10.5 + 10.0) / 2)
    assert lines[1]["selected_keys"] < HYBRID["tiny"].k_max


def test_interrupted_run_resumes_to_the_bit_in_its_phase(tmp_path, text, finished, monkeypatch):
    """Stopped in the third step, the first that is not dense, and without a checkpoint of it."""
    whole, _ = finished
    parts = tmp_path / "parts"
    sample = WarmedWindows.sample
    kinds = []

    def interrupted(self, batch):
        if len(kinds) == 4:
            raise KeyboardInterrupt
        found = sample(self, batch)
        kinds.append(found.dense)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(WarmedWindows, "sample", interrupted)
        stopped = run("hybrid", *TINY, "--dataset", text, "--out", parts)
    assert stopped.exit_code == 130
    assert f"fusewright-train hybrid --resume {parts}" in stopped.output
    assert kinds == [True, True, False, False]
    resumed = run("hybrid", "--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    assert_same_metrics(whole, parts)


def test_run_of_before_that_names_no_form_resumes(tmp_path, finished):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config.pop("indexer_form"), config.pop("indexer_rotary")) == ("gated", 0)
    (folder / "config.json").write_text(json.dumps(config))
    choices = RunFolder(folder).load_checkpoint()["choices"]
    assert not choices.keys() & {"indexer_form", "indexer_rotary"}
    result = run("hybrid", "--resume", folder)
    assert result.exit_code == 0, result.output


def test_warm_up_counts_steps_and_not_batches():
    flags = {"preset": "tiny", "device": "cpu", "indexer_warmup": 2, "steps": 40}
    made = HybridRun.from_flags(flags | {"gradient_accumulation_steps": 3})
    windows = Windows(torch.zeros(500, dtype=torch.uint8), length=9)
    source = WarmedWindows(windows, made.indexer_warmup * made.gradient_accumulation_steps)
    assert [source.sample(1).dense for _ in range(8)] == [True] * 6 + [False] * 2
    assert HybridRun.from_flags({"preset": "tiny", "device": "cpu"}).indexer_warmup == 10


def test_options_reach_the_model_and_its_optimizer(tmp_path, text):
    flags = "--num-layers 2 --selected-keys 5 --mode plain --indexer-rate 4 --lr 0.002"
    flags += " --checkpointing block --indexer-form relu --indexer-rotary 8"
    flags = [*TINY, *flags.split(), "--steps", "1", "--dataset", text]
    result = run("hybrid", *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    shape = read_run(HybridRun, RunFolder(tmp_path / "run")).shape(256)
    assert (shape.form, shape.index_rotary) == ("relu", 8)
    state = RunFolder(tmp_path / "run").load_checkpoint()
    # This form has a norm where the other one has a bias.
    assert any("index_norm" in name for name in state["model"])
    assert not any("index_bias" in name for name in state["model"])
    assert {name.split(".")[2] for name in state["model"] if "stack" in name} == {"0", "1"}
    rates = {group["lr"] for group in state["optimizer"]["param_groups"]}
    assert rates == {0.002, 0.008}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "huge"], "'huge' is not one of"),
        (["--mode", "fast"], "'fast' is not one of"),
        (["--checkpointing", "block"], "checkpointing is for mode 'plain'; got 'block' with mode"),
        (["--selected-keys", "99"], "selected_keys must be from 4 to 16 in preset tiny; got 99"),
        (["--indexer-rotary", "3"], "index_rotary must be even, up to index_width 16; got 3"),
        (["--seq-len", "1"], "seq_len must be at least 2, for a window to hold a token after next"),
        (["--indexer-warmup", "-1"], "Invalid value for '--indexer-warmup'"),
        (
            ["--optimizer", "nested", "--indexer-rate", "2"],
            "the optimizer nested takes one rate for all parameters",
        ),
    ],
)
def test_bad_flags_get_one_clear_sentence(tmp_path, monkeypatch, text, flags, message):
    monkeypatch.chdir(tmp_path)
    result = run("hybrid", *TINY, "--dataset", text, *flags)
    assert_refused(result, re.escape(message), tmp_path)


def test_margin_that_is_not_reached_is_a_failure(tmp_path, finished):
    shutil.copytree(finished[0], tmp_path / "run")
    result = run("hybrid", "--resume", tmp_path / "run", "--margin", "0.15")
    assert result.exit_code == 1, result.output
    assert "wanted 0.15 bits per byte or more below the order-2 byte model" in result.output


def test_trained_model_continues_a_prompt(finished):
    flags = ["--prompt", "line 7", "--tokens", "6"]
    first = run("generate", finished[0], *flags)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("line 7")
    assert run("generate", finished[0], *flags).stdout == first.stdout
    flags = [*flags, "--prompt", "of", "--temperature", "0"]
    drafted = run("generate", finished[0], *flags, "--speculate")
    assert drafted.stdout == run("generate", finished[0], *flags).stdout
    assert re.search(r"wrote 12 at .* accepted [\d.]+% of \d+ drafts\n$", drafted.stderr)
    assert "wanted a run of titan-mac; " in run("titan-mac", "--resume", finished[0]).output


def test_run_that_writes_no_text_is_not_continued(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "transformer-np"}')
    result = run("generate", tmp_path)
    assert_refused(result, "wanted a run of titan-mac or hybrid; ")


class Batches:
    """The same batch again and again, sparse."""

    def __init__(self) -> None:
        tokens = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(0))
        self.batch = HybridBatch(tokens, dense=False)

    def sample(self, batch):
        return self.batch

    def state_dict(self):
        return {}


def trained(model, optimizer, steps, log_every, folder=None):
    """The lines of metrics."""
    lines = []
    config = TrainingConfig(steps=steps, batch_size=2, log_every=log_every, evaluate_every=steps)
    told = {"console": Console(quiet=True), "observe": lines.append}
    trainer = Trainer(model, Batches(), all_losses, optimizer, config, folder, **told)
    return trainer, lines


def test_saturated_steps_are_skipped_and_told_at_the_next_log_point(host_reads):
    """Embeddings beyond the range of the states for two steps of four."""
    torch.manual_seed(0)
    model = HybridLM(replace(HYBRID["tiny"], fraction_bits=24), backend="reference")
    limit = 2.0 ** (30 - 24)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.0, clip_norm=1.0)
    trainer, lines = trained(model, optimizer, steps=8, log_every=2)
    trainer.run(until=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.embedding.weight.mul_(limit / model.embedding.weight.abs().max() * 100.0)
    broken = model.embedding.weight.detach().clone()
    trainer.run(until=4)
    for name, p in model.named_parameters():
        assert torch.equal(p, broken if name == "embedding.weight" else before[name])
    with torch.no_grad():
        model.embedding.weight.copy_(before["embedding.weight"])
    trainer.run(until=6)
    good, saturated, again = lines
    assert "saturated_batches" not in good
    assert (saturated["saturated_batches"], saturated["skipped_steps"]) == (2, 2)
    assert "loss" not in saturated
    assert saturated.keys().isdisjoint(TOLD)
    assert "saturated_batches" not in again
    assert again["next_token_loss"] < good["next_token_loss"]
    with host_reads:
        trainer._take_step()
    assert host_reads.count == 0


def test_run_that_saturates_on_and_on_stops_and_says_why():
    torch.manual_seed(0)
    model = HybridLM(replace(HYBRID["tiny"], fraction_bits=24), backend="reference")
    with torch.no_grad():
        model.embedding.weight.mul_(1e6)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.0, clip_norm=1.0)
    trainer, _ = trained(model, optimizer, steps=20, log_every=10)
    with pytest.raises(FloatingPointError, match=r"skipped in a row.*; 10 saturated batches"):
        trainer.run()
    # Torch's optimizer does not skip.
    optimizer = make_optimizer("torch-adamw", model, lr=1e-3, weight_decay=0.0, clip_norm=1.0)
    trainer, _ = trained(model, optimizer, steps=2, log_every=1)
    with pytest.raises(FloatingPointError, match=r"not finite.*; 1 saturated batches"):
        trainer.run()


@pytest.mark.parametrize("optimizer", ["muon", "m3", "nested", "learned"])
def test_every_optimizer_trains_it(optimizer):
    torch.manual_seed(0)
    model = HybridLM(HYBRID["tiny"], backend="reference")
    chosen = make_optimizer(optimizer, model, lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    trainer, lines = trained(model, chosen, steps=3, log_every=1)
    trainer.run()
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.gpu
def test_training_on_the_gpu_in_bf16_leaves_every_file(tmp_path, text):
    """Dense steps and sparse ones, both replayed from graphs."""
    flags = "--preset tiny --seq-len 128 --batch-size 2 --steps 20 --log-every 5 --eval-every 9"
    flags = [*flags.split(), "--device", "cuda", "--indexer-warmup", "8", "--capture"]
    result = run("hybrid", *flags, "--dataset", text, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
