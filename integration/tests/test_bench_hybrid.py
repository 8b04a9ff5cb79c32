from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fusewright_models.bench import depth
from fusewright_models.bench.depth import Memory, Peaks, nbytes
from fusewright_models.bench.hybrid import PROVIDER_NAMES, HybridHarness, peer_model
from fusewright_models.bench.text import TextShape
from fusewright_models.models.hybrid import HYBRID, HybridLM
from torch import nn

from .commands import bench_of, rows_of

pytestmark = pytest.mark.usefixtures("without_collections")

TINY = HYBRID["tiny"]
CPU = torch.device("cpu")
run = partial(bench_of, "hybrid")


def test_steps_are_rows_and_a_missing_peer_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    names = ["fusewright", "fusewright-plain", "fusewright-plain-block", "reference"]
    result = run("--provider", ",".join([*names, "fla"]), "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search("fla-.*ModuleNotFoundError: ", result.output)
    rows = rows_of(tmp_path)
    assert [row["provider"] for row in rows] == names
    for row in rows:
        assert row["op"] == "HybridLM"
        assert row["case"] == "dim=64 layers=4 B=1 T=20"
        assert (row["pass"], row["dtype"], row["timing"]) == ("step", "bf16", "wall")
        assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])


def test_providers_differ_in_who_computes_and_what_is_kept():
    harness = HybridHarness(TINY, CPU, 0.0, True, None, None)
    found = {}
    for provider in PROVIDER_NAMES[:-1]:
        model = harness.model(provider)
        compiled = all("force" in vars(layer) for layer in [*model.stack.layers, model.second])
        kept = model.config.mode, model.config.checkpointing
        found[provider] = *kept, model.final_norm.backend, compiled
    assert found == {
        "fusewright": ("exact", "none", "auto", False),
        "fusewright-plain": ("plain", "none", "auto", False),
        "fusewright-plain-block": ("plain", "block", "auto", False),
        "fusewright-plain-keep-attention": ("plain", "keep-attention", "auto", False),
        "reference": ("plain", "none", "reference", False),
        "reference-compile": ("plain", "none", "reference", True),
    }
    assert harness.name("fla").startswith("fla-")


@pytest.mark.parametrize("preset", ["mini", "350m"])
def test_peer_has_as_many_parameters_as_ours(monkeypatch, preset):
    """With a stand-in whose parameters follow its sizes as the library's do."""

    @dataclass
    class Config:
        vocab_size: int
        hidden_size: int
        num_hidden_layers: int
        num_heads: int
        head_dim: int
        expand_v: float
        intermediate_size: int
        tie_word_embeddings: bool
        use_cache: bool

    class Peer(nn.Module):
        def __init__(self, config):
            super().__init__()
            shapes = 5 * [(config.hidden_size, config.num_heads * config.head_dim)]
            shapes += 3 * [(config.hidden_size, config.intermediate_size)]
            shapes *= config.num_hidden_layers
            shapes += 2 * [(config.vocab_size, config.hidden_size)]
            self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    library = SimpleNamespace(GatedDeltaNetConfig=Config, GatedDeltaNetForCausalLM=Peer)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(models=library))
    monkeypatch.setitem(sys.modules, "fla.models", library)
    config = HYBRID[preset]
    with torch.device("meta"):
        theirs, ours = (
            sum(p.numel() for p in model.parameters())
            for model in (peer_model(config), HybridLM(config))
        )
    # A step of the width.
    assert abs(theirs - ours) <= 3 * 16 * config.dim * config.layers


def test_depths_are_a_row_for_each_mode_with_the_choices_that_are_kept(tmp_path):
    result = run("--depths", "1,4", "--out", tmp_path, shape="1,9")
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("depth-")
    rows = rows_of(tmp_path)
    modes = ("exact", "stored", "plain")
    found = [(row["mode"], row["case"]) for row in rows]
    assert found == [(mode, f"dim=64 layers={n} B=1 T=9") for mode in modes for n in (1, 4)]
    # Indices and a count for each query of the one sparse layer, in 4 bytes.
    kept, none = f"{9 * (TINY.k_max + 1) * 4 / 2**20:.3f}", "0.000"
    assert [row["choices_mib"] for row in rows] == [none, kept, none, kept, none, none]
    count = sum(p.numel() for p in HybridLM(TINY).parameters())
    assert rows[1]["gradients_mib"] == f"{4 * count / 2**20:.3f}"
    assert {(row["peak_mib"], row["activations_mib"]) for row in rows} == {("", "")}


def test_depth_that_fails_is_a_line_and_plain_autograd_may(tmp_path, monkeypatch):
    def measured(harness, shape):
        if (harness.config.mode, harness.config.layers) == (failing, 16):
            raise torch.OutOfMemoryError
        return Memory(2**22, 2**20, 0, 2**21)

    monkeypatch.setattr(depth, "measured", measured)
    for failing, code in (("plain", 0), ("exact", 1)):
        # Rows that the file has are replaced.
        for _ in range(2):
            result = run("--depths", "8,16", "--out", tmp_path / failing, shape="1,9")
        assert result.exit_code == code, result.output
        assert re.search(rf"16 +│ {failing} +│ out of memory", result.output)
        rows = rows_of(tmp_path / failing)
        assert [row["mode"] for row in rows].count(failing) == 1
        assert len(rows) == 5
        assert {(row["peak_mib"], row["activations_mib"]) for row in rows} == {("4.000", "2.000")}


@pytest.mark.parametrize("mode", ["exact", "plain"])
def test_gradients_that_lie_there_are_no_activations(monkeypatch, mode):
    """With a meter that shows 1000 bytes before the step and 10^9 at every look after it."""
    of_layers, looks = [], []
    readings = {"memory_allocated": 1000, "max_memory_allocated": 1000 + 10**9}
    for name, value in readings.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", looks.append)
    harness = HybridHarness(replace(TINY, mode=mode), CPU, 0.0, False, None, None)
    step = harness.step(TextShape(1, 9), "fusewright")
    peaks, look = Peaks(CPU), Peaks.look
    monkeypatch.setattr(
        Peaks, "look", lambda self, gradients: (of_layers.append(gradients), look(self, gradients))
    )
    peaks.watch(step.model)
    step.run(peaks.mark)
    layers = step.model.stack.layers
    behind = nbytes(step.model) - sum(map(nbytes, layers))
    later = [behind + sum(map(nbytes, layers[place + 1 :])) for place in (3, 2, 1, 0)]
    # The marks before data, both passes and the optimizer, and after it.
    assert of_layers == [0, 0, 0, *(later if mode == "exact" else []), 0, 0]
    assert (peaks.before, peaks.highest, peaks.activations) == (1000, 10**9, 10**9)


def test_stretch_of_a_step_has_its_own_gradients(monkeypatch):
    readings = iter([100, 150, 700, 900, 950, 5000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(readings))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    peaks = Peaks(CPU)
    for _ in range(3):
        peaks.mark()
    peaks.look(300)
    peaks.mark()
    # The optimizer's is no part.
    peaks.mark()
    assert (peaks.highest, peaks.activations) == (850, 800)


@pytest.mark.gpu
def test_memory_of_a_step_is_flat_in_depth_on_the_gpu(tmp_path):
    """What is recomputed is one layer; what is stored is a state for each."""
    result = run("--depths", "8,16,32", "--out", tmp_path, device="cuda", shape="8,2048")
    assert result.exit_code == 0, result.output
    state = 8 * 2048 * TINY.streams * TINY.dim * 4 / 2**20
    found: dict[str, list[float]] = {}
    for row in rows_of(tmp_path):
        found.setdefault(row["mode"], []).append(float(row["activations_mib"]))
    assert max(found["exact"]) - min(found["exact"]) < 0.5 * state
    assert found["stored"][2] - found["stored"][1] > 15 * state
    assert found["plain"][2] - found["plain"][1] > found["stored"][2] - found["stored"][1]
