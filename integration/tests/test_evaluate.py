"""The score of a trained language model, by a command, in any number of processes."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli.text import TextRun

from .commands import assert_refused, invoke, metrics
from .together import Command, compute_in_fp64, run_together

SIZES = [
    "--preset",
    "tiny",
    "--device",
    "cpu",
    "--steps",
    "2",
    "--eval-every",
    "2",
    "--batch-size",
    "2",
]
MODELS = {"titan-mac": ["--seq-len", "20"], "hybrid": ["--seq-len", "20", "--indexer-warmup", "0"]}


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run") / request.param
    flags = [*SIZES, *MODELS[request.param], "--dataset", text]
    assert invoke(app, request.param, *flags, "--out", folder).exit_code == 0
    return folder


def score(output: str) -> list[str]:
    return [line for line in output.splitlines() if "windows of" in line or "order-2" in line]


def test_evaluation_has_the_runs_own_score(trained):
    (*_, line) = (line for line in metrics(trained) if "held_out_bits_per_byte" in line)
    result = invoke(app, "evaluate", trained)
    assert result.exit_code == 0, result.output
    of_model, of_bytes = score(result.output)
    assert "windows of 20 tokens" in of_model
    assert f"{line['held_out_bits_per_byte']:.4f}" in of_model
    assert f"{line['order_2_bits_per_byte']:.4f}" in of_bytes
    longer = invoke(app, "evaluate", trained, "--seq-len", 90, "--batch-size", 1)
    assert longer.exit_code == 0, longer.output
    assert "windows of 90 tokens" in longer.output
    assert score(longer.output)[0] != of_model


@pytest.mark.slow
def test_processes_that_share_windows_have_the_score_of_one(trained, monkeypatch):
    flags = ["evaluate", trained, "--seq-len", "91"]
    compute_in_fp64(monkeypatch)
    alone = invoke(app, *flags)
    assert alone.exit_code == 0, alone.output
    (code, output), (other, nothing) = (of[0] for of in run_together([Command(flags)]))
    assert (code, other) == (0, 0), output + nothing
    assert score(output) == score(alone.output) != []
    assert score(nothing) == []


def test_memory_that_runs_out_is_told_in_a_sentence(trained, monkeypatch):
    def score(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    monkeypatch.setattr(TextRun, "score", score)
    result = invoke(app, "evaluate", trained, "--seq-len", 9000)
    assert result.exit_code == 1
    assert "out of memory with 2 windows of 9,000 tokens at a time: tried to" in result.output
    assert "2.50 GiB; a smaller --batch-size needs less" in result.output


def test_impossible_evaluation_gets_one_clear_sentence(tmp_path, trained):
    assert_refused(invoke(app, "evaluate", tmp_path), "wanted the folder of a run with config.json")
    (tmp_path / "config.json").write_bytes((trained / "config.json").read_bytes())
    assert_refused(invoke(app, "evaluate", tmp_path), "wanted the folder of a run with a checkpo")
    assert_refused(invoke(app, "evaluate", trained, "--device", "quantum"), "--device must be cpu")
