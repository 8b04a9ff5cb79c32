"""A Llama of transformers under the clock: each provider is a row, once its gradients are right."""

from __future__ import annotations

from functools import partial

import pytest
from fusewright_models.bench.results import COLUMNS
from fusewright_models.patching import forwards

from .commands import bench_of, rows_of

pytest.importorskip(
    "transformers", reason="the extra transformers, of nox -s transformers, is not installed"
)
pytestmark = pytest.mark.usefixtures("without_collections")
run = partial(bench_of, "llama", shape="2,8")
OURS = ["fusewright", "fusewright-kept", "fusewright-attention"]


def test_providers_are_rows_and_a_missing_peer_a_line(tmp_path):
    providers = ["torch", *OURS, "liger"]
    result = run("--provider", ",".join(providers), "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert [row["provider"] for row in rows] == providers[:-1]
    for row in rows:
        assert [row[name] for name in COLUMNS[:3]] == ["Llama", "dim=64 layers=2 B=2 T=8", "step"]
        assert [row[name] for name in COLUMNS[4:6]] == ["bf16", "wall"]
        assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert f"{row['provider']}: gradients err up to " in result.output
    assert "No module named 'liger_kernel'" in result.output


@pytest.mark.parametrize("wrong", ["loss", "gradients"])
def test_wrong_loss_or_gradient_of_ours_is_no_row(tmp_path, monkeypatch, wrong):
    loss_of = forwards.vocabulary_loss

    def changed(*given, **options):
        loss = loss_of(*given, **options)
        return loss + 0.1 if wrong == "loss" else 0.5 * (loss + loss.detach())

    monkeypatch.setattr(forwards, "vocabulary_loss", changed)
    result = run("--provider", "torch,fusewright", "--out", tmp_path)
    assert result.exit_code == 1
    said = {"loss": "is not within", "gradients": "ArithmeticError: gradients of"}[wrong]
    assert said in result.output
    assert [row["provider"] for row in rows_of(tmp_path)] == ["torch"]


@pytest.mark.slow
def test_compiled_providers_run(tmp_path):
    providers = "compile,fusewright-compile"
    result = run("--provider", providers, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert [row["provider"] for row in rows_of(tmp_path)] == providers.split(",")
