from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from fusewright_models.bench import switches, titan_mac
from fusewright_models.bench.__main__ import app
from fusewright_models.bench.results import COLUMNS
from fusewright_models.bench.switches import SWITCHES, taken_back, waiting_share
from fusewright_models.bench.text import TextShape
from fusewright_models.bench.titan_mac import TitanMACHarness
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC

from .commands import assert_refused, bench_of, invoke, rows_of

pytestmark = pytest.mark.usefixtures("without_collections")

SMALL = replace(TITAN_MAC["tiny"], dim=32, segment=16, memory_chunk=8)
CASE = "dim=64 layers=2 B=1 T=20"
run = partial(bench_of, "titan-mac")


def test_step_is_a_row_and_a_missing_peer_a_line(tmp_path, monkeypatch):
    def absent(config):
        raise ModuleNotFoundError("No module named 'titans_pytorch'")

    monkeypatch.setattr(titan_mac, "peer_model", absent)
    result = run("--provider", "fusewright,titans-pytorch", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "ModuleNotFoundError: No module named 'titans_pytorch'" in result.output
    (row,) = rows_of(tmp_path)
    assert list(row) == COLUMNS
    assert [row[name] for name in COLUMNS[:6]] == [
        "TitanMAC",
        CASE,
        "step",
        "fusewright",
        "bf16",
        "wall",
    ]
    assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])


@pytest.mark.parametrize(
    ("options", "provider"),
    [
        (["--variant", "lmm"], "fusewright-lmm"),
        (["--variant", "mag", "--no-memory"], "fusewright-mag-without-memory"),
        (["--variant", "lmm", "--checkpointing"], "fusewright-lmm-checkpointed"),
    ],
    ids=["lmm", "mag-without-memory", "lmm-checkpointed"],
)
def test_rows_name_what_the_case_does_not(tmp_path, options, provider):
    result = run("--provider", "fusewright", "--no-check", "--out", tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert [row["provider"] for row in rows_of(tmp_path)] == [provider]


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["mac", "mal"])
@pytest.mark.parametrize("plain", [*((name,) for name in SWITCHES), SWITCHES], ids="-".join)
def test_plain_ways_give_the_same_loss_and_gradients(
    monkeypatch, assert_same_but_for_rounding, variant, plain
):
    torch.manual_seed(1)
    model = TitanMAC(replace(SMALL, variant=variant)).double()
    tokens = torch.randint(256, (2, 38))
    used = count_plain_calls(monkeypatch)

    def loss_and_gradients():
        loss = model.loss(tokens)
        return [loss.detach(), *torch.autograd.grad(loss, model.parameters())]

    expected = loss_and_gradients()
    assert used == set()
    with taken_back(model, plain):
        found = loss_and_gradients()
        with torch.no_grad():
            assert_same_but_for_rounding([model.loss(tokens)], expected[:1])
    assert used == set(plain)
    assert_same_but_for_rounding(found, expected)
    used.clear()
    assert all(map(torch.equal, loss_and_gradients(), expected))
    assert used == set()


def count_plain_calls(monkeypatch) -> set[str]:
    """The switches whose plain way has been called."""
    used: set[str] = set()

    def noted(name, function):
        return lambda *arguments, **options: (used.add(name), function(*arguments, **options))[1]

    for name, function in {
        "syncs": "waiting",
        "attention": "manual_attention",
        "norms": "manual_norm",
        "gating": "manual_gating",
        "memory": "rows_by_autograd",
    }.items():
        monkeypatch.setattr(switches, function, noted(name, getattr(switches, function)))
    return used


def test_memory_that_is_not_finite_is_seen_where_the_host_waits():
    model = TitanMAC(replace(SMALL, variant="lmm"))
    with torch.no_grad():
        model.blocks[0].layers[0].memory.initial["w1"].fill_(torch.nan)
    tokens = torch.randint(256, (1, 9))
    assert model.loss(tokens).isnan()
    with taken_back(model, ("syncs",)), pytest.raises(ArithmeticError, match="not finite"):
        model.loss(tokens)


def test_switches_are_a_line_and_a_row_each(tmp_path, monkeypatch):
    # A profile takes seconds.
    monkeypatch.setattr(switches, "waiting_share", lambda step: 0.25)
    options = ["--switches", "--variant", "lmm", "--evaluation-batches", "1"]
    result = run(*options, "--out", tmp_path, shape="1,9")
    assert result.exit_code == 0, result.output
    names = ["none", *SWITCHES, "all"]
    rows = rows_of(tmp_path, "switches-*.csv")
    assert [row["ours"] for row in rows] == names
    assert all(float(row["ms"]) > 0 and row["waiting"] == "0.2500" for row in rows)
    for name in names:
        (line,) = (line for line in result.output.splitlines() if line.startswith(f"│ {name} "))
        assert " 25.0 % " in line


def test_waiting_is_the_time_of_reading_the_loss(monkeypatch):
    harness = TitanMACHarness(SMALL, torch.device("cpu"), 0.0, False, None, None)
    step = harness.step(TextShape(1, 9), "fusewright")
    step.reads = True
    read = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: time.sleep(0.3) or read(x))
    start = time.perf_counter()
    share = waiting_share(step)
    # Two steps were taken, and the loss of one read once.
    assert 0.3 / (time.perf_counter() - start) < share < 1.0


def test_step_that_reads_nothing_waits_for_nothing():
    harness = TitanMACHarness(
        replace(SMALL, variant="lmm"), torch.device("cpu"), 0.0, False, None, None
    )
    assert waiting_share(harness.step(TextShape(1, 9), "fusewright")) == 0.0


def test_providers_of_the_other_model_are_still_the_default_command():
    assert_refused(invoke(app, "--provider", "jax"), "provider must be of sdpa-unpruned")
