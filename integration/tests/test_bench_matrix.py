"""The matrix of providers, checkpointing and graphs."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
import torch
from fusewright.attention.rectangular import launch_backward
from fusewright_models import TransformerNPConfig
from fusewright_models.bench import providers
from fusewright_models.bench.__main__ import matrix
from fusewright_models.bench.matrix import COLUMNS, MatrixHarness
from fusewright_models.bench.providers import PROVIDER_NAMES, Provider
from fusewright_models.bench.shapes import Shape
from fusewright_models.bench.transformer_np import TransformerNPHarness
from fusewright_models.choices import CHECKPOINTINGS
from fusewright_models.devices import peak_tflops

from .commands import assert_refused, flags_of, invoke

pytestmark = pytest.mark.usefixtures("without_collections")

TINY = ["--preset", "tiny", "--seconds", "0"]
CASE = "M=8 N=6 B=2"
FEW = "sdpa,fusewright"


def run(*arguments, device: str = "cpu", shape: str = "8,6,2"):
    return invoke(matrix, *TINY, "--shape", shape, "--device", device, *arguments)


def rows_in(folder):
    (path,) = folder.glob("matrix-*.csv")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    return rows


def out_of_memory(*arguments, **options):
    raise torch.OutOfMemoryError("tried to allocate everything")


def test_every_cell_has_a_row(tmp_path):
    result = run("--provider", FEW, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    cells = [(row["provider"], row["checkpointing"], row["timing"]) for row in rows]
    assert cells == [(name, how, "wall") for name in FEW.split(",") for how in CHECKPOINTINGS]
    for row in rows:
        assert row["case"] == CASE
        assert 0.0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert row["tflops"]
        assert row["note"] == row["mfu"] == row["mem_mib"] == ""
    assert [path.name[:7] for path in tmp_path.iterdir()] == ["matrix-"]


def test_rows_measured_again_replace_their_like(tmp_path):
    assert run("--provider", FEW, "--out", tmp_path).exit_code == 0
    before = rows_in(tmp_path)
    again = run("--provider", "fusewright", "--checkpointing", "block", "--out", tmp_path)
    assert again.exit_code == 0, again.output
    after = rows_in(tmp_path)
    (place,) = (n for n, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    assert (after[place]["provider"], after[place]["checkpointing"]) == ("fusewright", "block")
    # What it is compared with is that of the run before.
    before_ms, ms = float(before[0]["ms"]), float(after[place]["ms"])
    assert f" {before_ms / ms:.2f} " in again.output


def test_what_is_absent_is_a_row_and_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "version_of", lambda name: "absent")
    names = "fa4,fa4-compile,fusewright-fp8"
    result = run("--provider", names, "--checkpointing", "none", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    notes = {row["provider"]: row["note"] for row in rows_in(tmp_path)}
    assert notes == {
        "fa4": "absent: flash-attn-4 is not installed",
        "fa4-compile": "absent: flash-attn-4 is not installed",
        "fusewright-fp8": "absent: this build has no attention in 8 bits",
    }
    assert "flash-attn-4 is not installed" in result.output


def test_peer_without_an_op_cannot_be_kept(monkeypatch):
    monkeypatch.setattr(providers, "version_of", lambda name: "4.0.0")
    absent = Provider("fa4").absent
    assert absent(torch.device("cuda"), "block") is None
    assert "no op of torch's" in absent(torch.device("cuda"), "keep-attention")
    assert "needs a CUDA device" in absent(torch.device("cpu"), "none")


def test_peer_out_of_memory_is_a_row_and_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "plain_loss", out_of_memory)
    result = run("--provider", FEW, "--checkpointing", "none", "--no-check", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    peer, ours = rows_in(tmp_path)
    assert (peer["note"], peer["ms"]) == ("out of memory", "")
    assert (ours["note"], bool(ours["ms"])) == ("", True)


def test_ours_out_of_memory_is_a_row_and_an_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "our_loss", out_of_memory)
    result = run("--provider", "fusewright", "--no-check", "--out", tmp_path)
    assert result.exit_code == 1
    assert {row["note"] for row in rows_in(tmp_path)} == {"out of memory"}


def test_losses_are_those_of_the_model_that_keeps_everything():
    """Held against the same loss, whatever is computed again."""
    result = run("--provider", ",".join([*PROVIDER_NAMES[:2], "fusewright"]))
    assert result.exit_code == 0, result.output
    assert "loss" not in result.output


def harness_of(device, *, graphs=True):
    harness = TransformerNPHarness(TransformerNPConfig(), device, 0.0, False, None, None)
    return MatrixHarness(harness, CHECKPOINTINGS, graphs)


@pytest.mark.parametrize(
    ("kind", "shape", "graphs", "expected"),
    [
        ("fusewright", Shape(64, 500, 64), True, ("wall", "graph")),
        ("sdpa-compile", Shape(64, 500, 64), True, ("wall", "graph")),
        ("fusewright-captured", Shape(64, 500, 64), True, ("graph",)),
        ("fusewright", Shape(64, 500, 64), False, ("wall",)),
        ("fusewright-captured", Shape(64, 500, 64), False, ()),
        ("fusewright", Shape(200_000, 5_000, 1), True, ("wall",)),
    ],
)
def test_steps_are_replayed_too_where_the_host_takes_time(kind, shape, graphs, expected):
    timings = harness_of(torch.device("cuda"), graphs=graphs).timings(shape, Provider(kind))
    assert timings == expected
    on_cpu = harness_of(torch.device("cpu"), graphs=graphs).timings(shape, Provider(kind))
    assert on_cpu == tuple(timing for timing in expected if timing == "wall")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", None),
    ],
)
def test_peak_is_that_of_the_gpus_data_sheet(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak
    assert peak_tflops(torch.device("cpu")) is None


def test_two_kernels_take_the_place_of_hoppers_and_give_it_back(monkeypatch):
    cleared = []
    plans = SimpleNamespace(
        cache_clear=lambda: cleared.append(launch_backward.hopper_backward_config)
    )
    monkeypatch.setattr(launch_backward, "backward_plan", plans)
    before = launch_backward.hopper_backward_config
    with Provider("fusewright-two-kernels").context():
        assert launch_backward.hopper_backward_config(None, aligned=True) is None
    assert launch_backward.hopper_backward_config is before
    # Plans of neither outlive it.
    assert len(cleared) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpointing", "some"], "checkpointing must be of none, .*; got 'some'"),
        (["--provider", "jax"], "provider must be of sdpa-unpruned, .*; got 'jax'"),
        (["--shape", "64"], "a shape is M,N,B such as 64,500,64; got '64'"),
    ],
    ids=flags_of,
)
def test_bad_options_get_one_clear_sentence(arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.gpu
def test_matrix_is_measured_on_the_gpu(tmp_path):
    names = "sdpa,fusewright,fusewright-two-kernels,fusewright-captured"
    result = run("--provider", names, "--out", tmp_path, device="cuda", shape="160,6,2")
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    assert {row["note"] for row in rows} == {""}
    assert len(rows) == len(CHECKPOINTINGS) * 7
    assert all(float(row["mem_mib"]) > 0.0 for row in rows)
