from __future__ import annotations

import csv
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from fusewright_models.bench import hybrid
from fusewright_models.bench.__main__ import app
from fusewright_models.bench.hybrid import HybridHarness, peer_model
from fusewright_models.bench.text import TextShape
from fusewright_models.hybrid import HybridLM
from fusewright_models.hybrid_config import HYBRID
from torch import nn
from typer.testing import CliRunner

TINY = HYBRID["tiny"]
CPU = torch.device("cpu")


def run(*arguments, device: str = "cpu", shape: str = "1,20"):
    command = ["hybrid", "--preset", "tiny", "--seconds", "0", "--shape", shape]
    command += ["--device", device, *map(str, arguments)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})


def rows_of(folder):
    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_steps_are_rows_and_a_missing_peer_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    result = run("--provider", "fusewright,fusewright-plain,reference,fla", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search("fla-.*ModuleNotFoundError: ", result.output)
    rows = rows_of(tmp_path)
    assert [row["provider"] for row in rows] == ["fusewright", "fusewright-plain", "reference"]
    for row in rows:
        assert row["op"] == "HybridLM"
        assert row["case"] == "dim=64 layers=4 B=1 T=20"
        assert (row["pass"], row["dtype"], row["timing"]) == ("step", "bf16", "wall")
        assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])


def test_wrong_loss_of_ours_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "our_loss", lambda model, tokens: model.loss(tokens) + 0.5)
    result = run("--provider", "fusewright", "--out", tmp_path)
    assert result.exit_code == 1
    assert "is not within" in result.output
    assert list(tmp_path.iterdir()) == []


def test_allowance_is_what_a_wrong_loss_exceeds():
    harness = HybridHarness(TINY, CPU, 0.0, True, None, None)
    expected = harness.expected(TextShape(2, 40))
    assert 0.0 < expected.allowed < 0.01 * expected.loss
    assert expected.complaint(1.01 * expected.loss)


def test_providers_differ_in_who_computes_and_what_is_kept():
    harness = HybridHarness(TINY, CPU, 0.0, True, None, None)
    found = {}
    for provider in ("fusewright", "fusewright-plain", "reference", "reference-compile"):
        model = harness.model(provider)
        compiled = all("force" in vars(layer) for layer in [*model.stack.layers, model.second])
        found[provider] = model.config.mode, model.final_norm.backend, compiled
    assert found == {
        "fusewright": ("exact", "auto", False),
        "fusewright-plain": ("plain", "auto", False),
        "reference": ("plain", "reference", False),
        "reference-compile": ("plain", "reference", True),
    }
    assert harness.row_name("fla").startswith("fla-")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "a shape is B,T such as 4,4096; got '64'"),
        (["--shape", "4,1"], "T must be at least 2, for a token after next; got 1"),
        (["--provider", "jax"], "provider must be of fusewright, .*; got 'jax'"),
        (["--preset", "huge"], "preset must be of tiny, .*; got 'huge'"),
    ],
)
def test_bad_options_get_one_clear_sentence(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output)


@pytest.mark.gpu
def test_eager_steps_and_replayed_ones_are_measured_on_the_gpu(tmp_path):
    result = run("--provider", "fusewright", "--out", tmp_path, device="cuda", shape="2,200")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert [row["timing"] for row in rows] == ["wall", "graph"]
    assert all(float(row["mem_mib"]) > 0.0 for row in rows)
