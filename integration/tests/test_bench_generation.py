"""Rates of texts that are continued, as rows."""

from __future__ import annotations

import pytest
from fusewright_models.bench.__main__ import app
from fusewright_models.models.hybrid import HybridLM

from .commands import assert_refused, invoke, rows_of

pytestmark = pytest.mark.usefixtures("without_collections")


def run(model, *arguments):
    flags = ["--preset", "tiny", "--tokens", "6", "--seconds", "0", "--device", "cpu"]
    return invoke(app, "generate", model, *flags, *arguments)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "op", "providers"),
    [
        ("titan-mac", "TitanMAC", ["fusewright"]),
        ("hybrid", "HybridLM", ["fusewright", "fusewright-speculative"]),
    ],
)
def test_rates_are_rows_for_each_way(model, op, providers, tmp_path):
    # Rows that the file has are replaced.
    for _ in range(2):
        found = run(model, "--shape", "1,20", "--shape", "2,20", "--out", tmp_path)
        assert found.exit_code == 0, found.output
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("generate-")
    rows = rows_of(tmp_path)
    assert [row["provider"] for row in rows] == 2 * providers
    batches = [batch for batch in (1, 2) for _ in providers]
    for row, batch in zip(rows, batches, strict=True):
        assert row["case"].endswith(f"B={batch} T=20 tokens=6 temperature=1")
    for row in rows:
        assert row["op"] == op
        assert min(float(row["reading"]), float(row["drawing"])) > 0.0
        speculative = row["provider"].endswith("-speculative")
        assert bool(row["acceptance"]) == speculative
        assert 0.0 <= float(row["acceptance"] or 0.0) <= 1.0


def test_losses_that_are_wrong_are_a_failure(monkeypatch, tmp_path):
    read = HybridLM.read

    def wrong(self, tokens, caches=None):
        hidden, caches = read(self, tokens, caches)
        return (-hidden if tokens.shape[1] == 1 else hidden), caches

    monkeypatch.setattr(HybridLM, "read", wrong)
    found = run("hybrid", "--shape", "1,20", "--out", tmp_path)
    assert found.exit_code == 1
    assert "ArithmeticError: losses are off by " in found.output
    assert list(tmp_path.iterdir()) == []
    assert run("hybrid", "--shape", "1,20", "--no-check").exit_code == 0


def test_a_model_that_continues_no_text_is_refused():
    found = invoke(app, "generate", "transformer-np")
    assert_refused(found, "model must be of titan-mac, hybrid; got 'transformer-np'")
