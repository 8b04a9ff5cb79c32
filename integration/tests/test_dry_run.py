"""What ``--dry-run`` says of a run is what the run has, and nothing comes of it."""

from __future__ import annotations

import csv
import re
import weakref
from pathlib import Path

import pytest
import torch
from fusewright_models.bench.shapes import Shape, operations
from fusewright_models.cli import app, text, transformer_np
from fusewright_models.cli.commands import optimizer_of
from fusewright_models.cli.dry_run import Counted, beside_states, counted
from fusewright_models.cli.hybrid import HybridRun, all_losses
from fusewright_models.cli.step_memory import BatchSize, LiveMemory, kept_on_gpu, states_of
from fusewright_models.cli.text import TextRun
from fusewright_models.cli.titan_mac import TitanMACRun, next_token_loss
from fusewright_models.cli.transformer_np import TransformerNPRun, negative_log_likelihood
from fusewright_models.training import OPTIMIZER_NAMES
from fusewright_models.training.optimizer_traits import take_step
from fusewright_models.training.source import told_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .commands import assert_refused, invoke

KINDS = {kind.model_name: kind for kind in (TransformerNPRun, TitanMACRun, HybridRun)}
every_model = pytest.mark.parametrize("model", KINDS)
LOSSES = {TitanMACRun: next_token_loss, HybridRun: all_losses}
LOSSES[TransformerNPRun] = negative_log_likelihood
# What a model is built for: coordinates or tokens.
SIZES = {"transformer-np": 2, "titan-mac": 256, "hybrid": 256}
RESULTS = Path(__file__).parent.parent / "results"


def pass_of(run, device):
    """The model of a run, its batch, and its loss of both."""
    with torch.device(device):
        model = run.built(SIZES[run.model_name])
        if isinstance(run, TransformerNPRun):
            batch = run.sampler().sample(run.batch_size)
        else:
            shape = run.batch_size, run.seq_len + 1
            batch = run.batch(torch.zeros(shape, dtype=torch.int64))
    return model, batch, LOSSES[type(run)]


@pytest.mark.sampled
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


@pytest.mark.sampled
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
    assert 0.95 < shapes.held / numbers.held < 1.05


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


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
@every_model
def test_weights_gradients_and_moments_are_those_of_a_step_to_the_byte(name, model):
    run = KINDS[model].from_flags({"preset": "tiny", "device": "cpu", "optimizer": name})
    built, batch, loss = pass_of(run, "cpu")
    optimizer = optimizer_of(run, built)
    told_of(loss(built, batch)).loss.backward()
    gradients = [p.grad for p in built.parameters()]
    take_step(optimizer, torch.ones(()), list(built.parameters()), 1.0)
    moments = pytree.tree_leaves(optimizer.state_dict())
    taken = []
    for some in ([*built.parameters(), *built.buffers()], gradients, moments):
        # Matrices of one shape may have their momenta in one place.
        storages = [x.untyped_storage() for x in some if isinstance(x, torch.Tensor)]
        taken.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
    with torch.device("meta"):
        shape = run.built(SIZES[model])
        assert [*states_of(shape, optimizer_of(run, shape))] == taken


# A run of each model whose backward pass computes nothing again, and those that do.
KEEPING = {
    "transformer-np": ("transformer-np", {}),
    "titan-mac": ("titan-mac", {}),
    "hybrid-plain": ("hybrid", {"mode": "plain"}),
}
RECOMPUTING = {
    "transformer-np-block": ("transformer-np", {"checkpointing": "block"}),
    "titan-mac-block": ("titan-mac", {"checkpointing": "block"}),
    "hybrid-exact": ("hybrid", {"mode": "exact"}),
    "hybrid-stored": ("hybrid", {"mode": "stored"}),
}


def run_of_case(case):
    model, flags = (KEEPING | RECOMPUTING)[case]
    return KINDS[model].from_flags({"preset": "tiny", "device": "cpu"} | flags)


def said_of(run) -> Counted:
    if isinstance(run, TransformerNPRun):
        return transformer_np._forward(run, with_memory=True)[0]
    return text._forward(run, 256, LOSSES[type(run)], with_memory=True)


@pytest.mark.sampled
@pytest.mark.parametrize("case", KEEPING | RECOMPUTING)
def test_memory_of_a_pass_is_what_one_over_numbers_holds(case):
    run = run_of_case(case)
    model, batch, loss = pass_of(run, "cpu")
    with LiveMemory() as memory:
        told_of(loss(model, batch)).loss.backward()
    assert memory.now == sum(p.nbytes for p in model.parameters())
    said = said_of(run)
    # Plain torch has other ways for a loss over a vocabulary on either device.
    assert memory.most == pytest.approx(said.held, rel=0.02)
    size = BatchSize(said.rows, "token", said.rows, (1, 1))
    assert sum(said.states[:2]) + beside_states(run, said, size) == pytest.approx(
        said.states.weights + memory.most, rel=0.02
    )


class Saved:
    """A tensor that autograd keeps, as long as it does."""

    def __init__(self, x):
        self.x = x


@pytest.mark.sampled
@pytest.mark.parametrize("case", KEEPING)
def test_most_of_what_a_pass_holds_is_saved_for_its_backward_pass(case):
    run = run_of_case(case)
    model, batch, loss = pass_of(run, "cpu")
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    saved = weakref.WeakSet()

    def keep(x):
        saved.add(found := Saved(x))
        return found

    with saved_tensors_hooks(keep, lambda found: found.x):
        found = told_of(loss(model, batch))
    storages = [each.x.untyped_storage() for each in saved]
    kept = {x._cdata: x.nbytes() for x in storages if x._cdata not in own}
    del found
    # Attention in plain torch keeps one matrix of a layer's scores, and makes two.
    assert 0.85 < sum(kept.values()) / said_of(run).held < 1.0


def peaks_of(file: str, **wanted: str) -> list[tuple[str, float]]:
    """Cases of rows of a result file, and their MiB."""
    with (RESULTS / file).open(newline="") as opened:
        rows = [row for row in csv.DictReader(opened) if row.items() >= wanted.items()]
    return sorted({(row["case"], float(row["mem_mib"])) for row in rows})


H200 = "h200-torch2.11-triton3.6.csv"
STEP = {"pass": "step", "timing": "wall"}
# Rows of each formula, with the run of the sizes that were measured.
MEASURED = {
    "titan-mac": (H200, STEP | {"op": "TitanMAC", "provider": "fusewright"}, {}),
    "hybrid-exact": (H200, STEP | {"op": "HybridLM", "provider": "fusewright"}, {"mode": "exact"}),
    "hybrid-plain": (
        *(H200, STEP | {"op": "HybridLM", "provider": "fusewright-plain"}),
        {"mode": "plain"},
    ),
    "transformer-np": (H200, STEP | {"op": "TransformerNP", "provider": "fusewright"}, {}),
    "transformer-np-block": (
        f"matrix-{H200}",
        {"provider": "fusewright", "timing": "wall", "checkpointing": "block"},
        {"checkpointing": "block"},
    ),
}
# By the columns of their rows.
PRESETS = {"320": ("l4", 32_000), "512": ("mini", 8192), "1024": ("350m", 32_000)}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MEASURED)
def test_memory_on_a_gpu_is_near_all_measured_peaks(name):
    """Within a quarter: a formula of two numbers for shapes of every kind."""
    file, wanted, flags = MEASURED[name]
    kind = KINDS[name.removesuffix("-block").removesuffix("-exact").removesuffix("-plain")]
    peaks = peaks_of(file, **wanted)
    assert peaks
    for case, peak in peaks:
        sizes = dict(part.split("=") for part in case.split())
        preset, vocab = "base", 0
        if "dim" in sizes:
            preset, vocab = PRESETS[sizes["dim"]]
            if kind is TitanMACRun and preset == "mini":
                preset, vocab = "profile", 49_152
        run = kind.from_flags({"preset": preset, "device": "cuda"} | flags)
        with torch.device("meta"):
            shape = run.shape(vocab or 18)
            states = states_of(model := run.built(vocab or 18), optimizer_of(run, model))
        if vocab:
            rows, columns = int(sizes["B"]) * int(sizes["T"]), shape.dim
        else:
            rows, columns = int(sizes["B"]) * (int(sizes["M"]) + int(sizes["N"])), shape.width
        size = BatchSize(rows, "token", rows, (shape.layers, columns))
        said = (sum(states) + kept_on_gpu(run, size)) / 2**20
        assert 0.75 < said / peak < 1.25, case


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
