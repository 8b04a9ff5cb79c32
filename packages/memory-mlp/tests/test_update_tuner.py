"""The tuner of the pooled update times what it is asked to, on a GPU that has run it before."""

from __future__ import annotations

import collections
import csv
import importlib.util
import pathlib

import pytest
import torch
from fusewright_testkit.timing import Time

TUNER = pathlib.Path(__file__).parents[1] / "tune_update.py"
# What the launch tables say of themselves: how far from the fastest line they are.
TILES_WITHIN, BLOCKS_WITHIN = 1.03, 1.07


@pytest.fixture
def tuner(monkeypatch):
    if not TUNER.exists():
        pytest.skip("the tuner is not part of the distribution")
    spec = importlib.util.spec_from_file_location("tune_update", TUNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def count_the_calls(calls, **options):
        for call in calls:
            call()
        return Time(1.0, 1.0, 1.0)

    monkeypatch.setattr(module, "graph_time", count_the_calls)
    return module


@pytest.fixture
def launched_before(monkeypatch):
    """A launch that has run keeps triton's own launcher as ``run``, as on a GPU."""
    from fusewright.memory_mlp._core.launches import Launch

    def call(self, tensors, floats=()):
        self.dispatch(tensors, floats)
        self.run = refuse

    def refuse(*args):
        raise TypeError("triton's launcher wants a grid")

    monkeypatch.setattr(Launch, "__call__", call)


# A launch and a plan of launches, of tiles and of elements, of either pass.
TIMED = {"bf16": ("ROUND", "HIDDEN", "GRADIENTS", "COTANGENTS", "DWEIGHTS"), "tf32": ("TRANSPOSE",)}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TIMED)
def test_every_kind_of_launch_is_timed(tuner, launched_before, dtype, capsys):
    size = 7, 5, 6
    tile = tuner.UpdateTile(tuner.PRECISIONS[dtype], 16, 16, 16, 1, 1, aligned=False)
    block = tuner.UpdateBlock(block=64, num_warps=1)
    entries = [entry for entry in tuner.LAUNCHES if entry.table in TIMED[dtype]]
    jobs = [(entry, dtype, size, tile if entry.pairs else block) for entry in entries]
    table = tuner.tuned(dtype, size, jobs, best=1, device="cpu")
    assert [row["table"] for row in table] == [entry.table for entry in entries]
    printed = capsys.readouterr().out
    assert "failed" not in printed
    assert "WRONG" not in printed
    assert printed.count("CHAIN") == 3


def test_every_table_and_every_launch_is_one_of_the_package(tuner):
    for entry in tuner.LAUNCHES:
        plan = (
            tuner.launch_backward.UpdateBackwardPlan if entry.backward else tuner.launch.UpdatePlan
        )
        assert hasattr(tuner.module_of(entry), entry.table)
        assert entry.field in plan._fields


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_every_table_has_candidates_at_every_size(tuner, dtype):
    for size in tuner.SIZES:
        for entry in tuner.LAUNCHES:
            wanted = entry.dtype in ("", dtype)
            assert bool(tuner.candidates_of(entry, dtype, size)) == wanted


def plans(tuner, dtype, size):
    """The forward and the backward plan of a size on the GPU of the tables' source."""
    from fusewright.memory_mlp._core.launches import layouts

    rows, width, hidden = size
    k = torch.empty(rows, width, dtype=tuner.DTYPES[dtype], device="meta")
    needed = tuner.launch_backward.BackwardOptions(True, True, False, False, True, True)
    options = "silu", True, tuner.PRECISIONS[dtype], k.device
    # Past the cache: plans are kept for one GPU.
    forward, backward = (getattr(*plan).__wrapped__ for plan in tuner.PLANS)
    return (
        forward(k.shape, hidden, layouts(k, k), False, *options),
        backward(k.shape, hidden, layouts(k, k), needed, *options),
    )


def line_of(tuner, entry, dtype, plan):
    """The line of a launch table that a plan has taken."""
    launch = getattr(plan, entry.field)
    if not entry.pairs:
        return tuner.UpdateBlock(launch.constants["CONFIG"].BLOCK, launch.options["num_warps"])
    launch = getattr(launch, "launch", launch)
    *sides, stages = launch.constants["CONFIG"][:4]
    return tuner.UpdateTile(tuner.PRECISIONS[dtype], *sides, launch.options["num_warps"], stages)


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_plans_take_lines_near_the_fastest_of_their_source(tuner, monkeypatch, dtype):
    gpu = tuner.DeviceProperties(tuner.MULTIPROCESSORS, tuner.SHARED_BYTES, capability=90)
    monkeypatch.setattr(tuner.problem, "device_properties", lambda device: gpu)
    (source,) = TUNER.parent.glob("results/tuning-update-*.csv")
    times = collections.defaultdict(dict)
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            case = row["table"], row["case"], row["dtype"]
            times[case][row["config"]] = float(row["ms"])
    for size in tuner.SIZES:
        found = plans(tuner, dtype, size)
        for entry in tuner.LAUNCHES:
            if entry.dtype in ("", dtype):
                case = times[entry.table, tuner.described(size), dtype]
                line = line_of(tuner, entry, dtype, found[entry.backward])
                limit = TILES_WITHIN if entry.pairs else BLOCKS_WITHIN
                assert case[str(line)] <= limit * min(case.values()), (entry.table, size)
