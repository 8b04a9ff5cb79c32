"""What is told of speed and memory, and where lines of metrics are shown beside the folder."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from fusewright_models.cli import app, dry_run, transformer_np
from fusewright_models.cli import text as text_command
from fusewright_models.cli.dry_run import PASSES
from fusewright_models.cli.hybrid import HybridRun, all_losses
from fusewright_models.cli.titan_mac import TitanMACRun, next_token_loss
from fusewright_models.cli.transformer_np import TransformerNPRun
from fusewright_models.training.reporting import record
from fusewright_models.training.reporting.record import Speed

from .commands import MEASURED, assert_refused, invoke, metrics

pytestmark = pytest.mark.usefixtures("without_pictures", "short_samples")
TEXT = ("titan-mac", "hybrid")
RUNS = {kind.model_name: kind for kind in (TransformerNPRun, TitanMACRun, HybridRun)}
FORWARD = {
    "transformer-np": lambda run: transformer_np._forward(run)[0],
    "titan-mac": lambda run: text_command._forward(run, 256, next_token_loss),
    "hybrid": lambda run: text_command._forward(run, 256, all_losses),
}
every_model = pytest.mark.parametrize("model", ["transformer-np", *TEXT])


def flags(model, text, *more):
    """Of four steps of the smallest run."""
    common = ["--preset", "tiny", "--steps", "4", "--log-every", "1", "--batch-size", "2"]
    data = [] if model == "transformer-np" else ["--dataset", text, "--seq-len", "16"]
    return [model, *common, "--eval-every", "2", *data, *more]


class WandB:
    """As much of the library as a run of ours asks for, writing down what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.begun, self.lines, self.ended = error, [], [], 0

    def init(self, **options):
        if self.error is not None:
            raise self.error
        self.begun.append(options)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, numbers, step):
        self.lines.append({"step": step, **numbers})

    def finish(self):
        self.ended += 1


@every_model
def test_metrics_are_shown_to_weights_and_biases_and_to_tensorboard(
    tmp_path, text, monkeypatch, model
):
    library, out = WandB(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", library)
    given = flags(model, text, "--wandb", "--wandb-project", "mine", "--tensorboard")
    result = invoke(app, *given, "--out", out)
    assert result.exit_code == 0, result.output
    (begun,) = library.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", "run", "allow")
    assert begun["config"]["steps"] == 4
    assert library.lines == metrics(out)
    assert library.ended == 1
    assert events(out) == numbers_of(metrics(out))
    if model != "transformer-np":
        return
    # A resumed folder goes on with the same run there.
    assert invoke(app, model, "--resume", out).exit_code == 0
    assert library.begun[1]["id"] == begun["id"]
    # Or without it.
    assert invoke(app, model, "--resume", out, "--no-wandb").exit_code == 0
    assert len(library.begun) == library.ended == 2


def test_run_that_weights_and_biases_does_not_begin_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", WandB(Exception("no key is known")))
    given = flags("transformer-np", None, "--wandb", "--out", tmp_path)
    told = "Weights & Biases began no run: no key is known; WANDB_MODE=offline keeps it"
    result = invoke(app, *given)
    assert result.exit_code == 2
    assert told in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("library", ["wandb", "tensorboard"])
def test_missing_library_is_told_with_the_extra_that_brings_it(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    given = flags("transformer-np", None, f"--{library}", "--out", tmp_path / "run")
    missing = f'need {library}, which is not installed: pip install "./integration[{library}]"'
    assert_refused(invoke(app, *given), re.escape(missing), tmp_path)


def events(folder) -> list[tuple[int, str, float]]:
    """Of all files, in the order of writing."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for file in sorted((folder / "tensorboard").iterdir()):
        for event in EventFileLoader(str(file)).Load():
            found += [
                (event.step, each.tag, each.tensor.float_val[0]) for each in event.summary.value
            ]
    return found


def numbers_of(lines) -> list[tuple[int, str, float]]:
    """As an event keeps them, in fp32."""
    return [
        (line["step"], name, float(torch.tensor(float(x))))
        for line in lines
        for name, x in line.items()
        if name != "step"
    ]


# Before the first checkpoint, from which on the run begins again, and after it.
@pytest.mark.parametrize("killed", [2, 4])
def test_resumed_run_takes_back_the_events_of_steps_that_it_takes_again(
    tmp_path, monkeypatch, killed
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with monkeypatch.context() as patch:
        note = record.Record.note

        def stopping(self, step, numbers):
            if step == killed:
                raise KeyboardInterrupt
            return note(self, step, numbers)

        patch.setattr(record.Record, "note", stopping)
        given = flags("transformer-np", None, "--tensorboard", "--out", tmp_path)
        assert invoke(app, *given).exit_code == 130
    result = invoke(app, "transformer-np", "--resume", tmp_path)
    assert result.exit_code == 0, result.output
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in shown.Scalars("loss")] == [1, 2, 3, 4]
    assert [each.step for each in shown.Scalars("held_out_tasks")] == [0, 2, 4]


@pytest.mark.parametrize(
    "model", ["transformer-np", *(pytest.param(name, marks=pytest.mark.slow) for name in TEXT)]
)
def test_lines_tell_the_share_of_what_the_device_could_do(tmp_path, text, monkeypatch, model):
    """Its peak is patched, and so known."""
    peak = 1e-3
    for module in (record, dry_run):
        monkeypatch.setattr(module, "peak_tflops", lambda device: peak)
    given = flags(model, text, "--precision", "bf16")
    result = invoke(app, *given, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kind = RUNS[model]
    sizes = {"batch_size": 2} | ({} if model == "transformer-np" else {"seq_len": 16})
    run = kind.from_flags({"preset": "tiny", "device": "cpu", "precision": "bf16"} | sizes)
    forward = FORWARD[model](run)
    operations = PASSES * forward.operations / forward.rows
    trained = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["mfu"] for line in trained] == [
        line["tokens_per_second"] * operations / (peak * 1e12) for line in trained
    ]


def test_share_of_several_devices_is_of_all_of_them(monkeypatch):
    monkeypatch.setattr(record, "peak_tflops", lambda device: 2.0)
    found = Speed(torch.device("cpu"), 4, 1e9).numbers(tokens=800, padding=100, seconds=0.5)
    assert found["tokens_per_second"] == 1400.0
    assert found["padded_tokens_per_second"] == 200.0
    assert found["mfu"] == 1400.0 * 1e9 / 8e12
    alone = Speed(torch.device("cpu")).numbers(tokens=800, padding=0, seconds=0.5)
    assert alone.keys() == {"tokens_per_second", "seconds", "peak_memory_mib"}
    # Of a program that has imported torch.
    assert 50.0 < alone["peak_memory_mib"] < 2**20
    assert alone.keys() < MEASURED


@pytest.mark.gpu
def test_peak_of_a_gpu_is_that_of_its_tensors():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.empty(2**24, device=device)
    found = Speed(device).numbers(tokens=1, padding=0, seconds=1.0)
    assert found["peak_memory_mib"] >= held.nbytes / 2**20
