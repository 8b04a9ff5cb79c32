"""What ``--dry-run`` says of a run is what the run has, and nothing comes of it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from fusewright_models.bench.shapes import Shape, operations
from fusewright_models.cli import app, dry_run
from fusewright_models.cli.commands import optimizer_of
from fusewright_models.cli.dry_run import BatchSize, Counted, counted
from fusewright_models.cli.hybrid import HybridRun, all_losses
from fusewright_models.cli.text import TextRun
from fusewright_models.cli.titan_mac import TitanMACRun, next_token_loss
from fusewright_models.cli.transformer_np import TransformerNPRun
from fusewright_models.models.titan_mac import TitanMAC
from fusewright_models.training import OPTIMIZER_NAMES
from torch.utils import _pytree as pytree

from .commands import assert_refused, invoke

KINDS = {kind.model_name: kind for kind in (TransformerNPRun, TitanMACRun, HybridRun)}
every_model = pytest.mark.parametrize("model", KINDS)
LOSSES = {TitanMACRun: next_token_loss, HybridRun: all_losses}
RESULTS = Path(__file__).parent.parent / "results"


@every_model
def test_dry_run_says_what_a_run_takes_and_leaves_nothing(tmp_path, monkeypatch, model):
    def read(run):
        raise AssertionError("the data was read")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TextRun, "corpus", read)
    result = invoke(
        app, model, "--preset", "tiny", "--gradient-accumulation-steps", "3", "--dry-run"
    )
    assert result.exit_code == 0, result.output
    run = KINDS[model].from_flags({"preset": "tiny", "device": "cpu"})
    built = run.model(2 if model == "transformer-np" else 256)
    count = getattr(built, "parameter_count", lambda: sum(p.numel() for p in built.parameters()))()
    assert f"{count:,} parameters" in result.output
    units = 3 * run.batch_size * getattr(run, "seq_len", 1)
    unit = "task" if model == "transformer-np" else "token"
    assert re.search(rf"FLOP a {unit}, [0-9.]+ [MG]FLOP a step of {units:,} {unit}s", result.output)
    assert "FLOP in 100 steps" in result.output
    assert re.search(r"memory: [0-9.]+ MiB for weights, gradients and adamw", result.output)
    assert re.search(r"time: [0-9.]+ seconds or more, at the", result.output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["170m", "350m", "1b"])
def test_dry_run_of_a_large_model_takes_no_memory_for_it(monkeypatch, preset):
    """Of one layer, for a test to be short."""
    kind = TitanMACRun if preset == "170m" else HybridRun
    sizes = ["--num-layers", "1", "--seq-len", "64", "--steps", "7"]
    made = []
    build = kind.built
    monkeypatch.setattr(kind, "built", lambda *given: made.append(build(*given)) or made[-1])
    result = invoke(app, kind.model_name, "--preset", preset, *sizes, "--dry-run")
    assert result.exit_code == 0, result.output
    assert {p.device.type for p in made[0].parameters()} == {"meta"}
    assert "FLOP in 7 steps" in result.output


@pytest.mark.parametrize("kind", [TitanMACRun, HybridRun])
def test_shapes_alone_are_counted_as_a_pass_over_numbers_is(kind):
    run = kind.from_flags({"preset": "tiny", "device": "cpu"})
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = run.built(256)
            batch = run.batch(torch.zeros(2, 33, dtype=torch.int64))
            found.append(counted(model, lambda m=model, b=batch: LOSSES[kind](m, b), 64))
    shapes, numbers = found
    assert shapes[:2] == numbers[:2]
    # Plain torch has other ways for a loss over a vocabulary on either.
    assert 0.95 < shapes.operations / numbers.operations < 1.05
    assert 0.95 < shapes.kept / numbers.kept < 1.05


def test_operations_of_transformer_np_are_those_of_its_formula():
    """But for those of narrow inputs and heads, which the formula leaves out."""
    run = TransformerNPRun.from_flags({"preset": "base", "device": "cpu", "data": "gp-rbf"})
    with torch.device("meta"):
        model = run.built(1)
        x = [torch.zeros(4, rows, 1) for rows in (30, 30, 20, 20)]
        loss = lambda: model(x[0], x[1], x[2], y_target=x[3])  # noqa: E731
        forward = counted(model, loss, 200)
    wanted = operations(model.config, Shape(30, 20, 4))["fwd"]
    assert 0.95 < forward.operations / wanted < 1.1


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
@pytest.mark.parametrize("kind", [TransformerNPRun, TitanMACRun])
def test_state_of_an_optimizer_is_at_most_what_is_said(name, kind):
    run = kind.from_flags({"preset": "tiny", "device": "cpu", "optimizer": name})
    model = run.model(2 if kind is TransformerNPRun else 256)
    optimizer = optimizer_of(run, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(*([torch.ones(())] if name == "nested" else []))
    state = [x for x in pytree.tree_leaves(optimizer.state_dict()) if isinstance(x, torch.Tensor)]
    taken = sum(x.nbytes for x in state) / sum(p.numel() for p in model.parameters())
    # Factors of small matrices are a larger part of these than of large ones.
    assert dry_run.STATE[name] / 2 < taken < dry_run.STATE[name] + 0.01 * 2


def test_memory_on_a_gpu_is_near_a_measured_peak():
    with (RESULTS / "h200-torch2.11-triton3.6.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] == "TitanMAC"]
    peaks = [
        float(row["mem_mib"])
        for row in rows
        if (row["case"], row["provider"], row["timing"])
        == ("dim=320 layers=6 B=4 T=4096", "fusewright", "graph")
    ]
    assert peaks
    run = TitanMACRun.from_flags({"preset": "l4", "device": "cuda", "batch_size": 4})
    with torch.device("meta"):
        count = sum(p.numel() for p in TitanMAC(run.shape(32_000)).parameters())
    size = BatchSize(rows=4 * 4096, unit="token", units=4 * 4096, layer_columns=(6, 320))
    states = (dry_run.WEIGHT_AND_GRADIENT + dry_run.STATE["adamw"]) * count
    said = (states + dry_run.kept_bytes(run, Counted(count, 1, 1, 1), size)) / 2**20
    assert all(0.75 < said / peak < 1.25 for peak in peaks)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("titan-mac", ["--dim", "100", "--num-heads", "3"], "dim must be"),
        ("titan-mac", ["--vocab-size", "10"], "the tokenizer has 256 tokens; got --vocab-size 10"),
        ("hybrid", ["--optimizer", "learned", "--beta1", "0.5"], "learned has no betas"),
        ("transformer-np", ["--context-size", "64"], "an image has 64 pixels"),
        ("transformer-np", ["--device", "quantum"], "--device must be cpu, cuda or cuda:N"),
    ],
)
def test_dry_run_refuses_what_a_run_would(tmp_path, monkeypatch, model, flags, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(app, model, "--preset", "tiny", *flags, "--dry-run")
    assert_refused(result, re.escape(message), tmp_path)
