"""The tuner of the pooled update times what it is asked to, and its results are those that the
launch tables say they come from.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import pathlib

import pytest
import torch
from fusewright_testkit import tune
from fusewright_testkit.bench import load
from fusewright_testkit.timing import Time

PACKAGE = pathlib.Path(__file__).parents[1]
# What the launch tables say of themselves: how far from the fastest line they are.
TILES_WITHIN, BLOCKS_WITHIN = 1.03, 1.07


@pytest.fixture
def tuner(monkeypatch):
    if not (PACKAGE / "tune.py").exists():
        pytest.skip("the tuner is not part of the distribution")

    def count_the_calls(calls, **options):
        for call in calls:
            call()
        return Time(1.0, 1.0, 1.0)

    monkeypatch.setattr(tune, "graph_time", count_the_calls)
    return load(PACKAGE, "tune")


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
TIMED = {
    "ROUND": "bf16",
    "TRANSPOSE": "tf32",
    "HIDDEN": "bf16",
    "GRADIENTS": "bf16",
    "COTANGENTS": "bf16",
    "DWEIGHTS": "bf16",
    "E_BAR": "bf16",
    "E_BAR_AND_R": "bf16",
}
# Tables whose lines are from no result file.
UNMEASURED = {"E_BAR_AND_R"}


@pytest.mark.sampled
@pytest.mark.parametrize("table", TIMED)
def test_every_kind_of_launch_is_timed(tuner, launched_before, table, capsys):
    size, dtype = (7, 5, 6), TIMED[table]
    (entry,) = (entry for entry in tuner.LAUNCHES if entry.table == table)
    line = tuner.UpdateBlock(block=64, num_warps=1)
    if entry.pairs:
        line = tuner.UpdateTile(tuner.PRECISIONS[dtype], 16, 16, 16, 1, 1, aligned=False)
    tuning = tuner.tuning(entry, dtype, size)
    few = functools.partial(tuner.bench.update_inputs, *size, tuner.DTYPES[dtype], lead=(4,))
    tuning = dataclasses.replace(
        tuning,
        case=dataclasses.replace(tuning.case, sample=few),
        candidates=tune.lines([line], table, table=entry.pairs > 0),
    )
    with tune.kept_calls(entry.kernels) as calls:
        times = tune.timed(tuning, [str(line)], device="cpu")
    assert times == {tune.COMMITTED: 1.0, str(line): 1.0}
    assert {call.args[0].kernel.fn.__name__ for call in calls} == {entry.kernels[0]}
    # The candidate's line is launched, and not that of another table.
    launched = [line_of(tuner, entry, dtype, [call.args[0]]) for call in calls]
    assert (line._replace(aligned=True) if entry.pairs else line) in launched
    tune.print_together([(tuning, tuning.candidates[str(line)])], device="cpu")
    printed = capsys.readouterr().out
    assert "failed" not in printed
    assert printed.count("fwd+bwd") == 2


def test_every_table_is_one_of_the_package(tuner):
    for entry in tuner.LAUNCHES:
        assert hasattr(entry.module, entry.table)


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_every_table_has_candidates_at_every_size(tuner, dtype):
    tunings = [one for one in tuner.tunings() if one.names["dtype"] == dtype]
    wanted = [
        entry.table
        for size in tuner.bench.UPDATES
        for entry in tuner.LAUNCHES
        if tuner.is_of_a_table(entry, dtype, size)
    ]
    assert [one.names["table"] for one in tunings] == wanted
    assert {entry.table for entry in tuner.LAUNCHES if entry.dtype in ("", dtype)} == {*wanted}
    assert all(one.candidates for one in tunings)


def plans(tuner, dtype, size):
    """The forward and the backward plan of a size on the GPU of the tables' source."""
    from fusewright.memory_mlp._core.launches import layouts

    rows, width, hidden = size
    k = torch.empty(rows, width, dtype=tuner.DTYPES[dtype], device="meta")
    needed = tuner.launch_backward.BackwardOptions(True, True, False, True, True)
    state = (torch.empty(0, device="meta"),) * 11
    inputs = layouts(k, k, *state, None)
    options = "silu", True, tuner.PRECISIONS[dtype], k.device
    # Past the cache: plans are kept for one GPU.
    forward, backward = (
        plan.__wrapped__ for plan in (tuner.launch.update_plan, tuner.launch_backward.backward_plan)
    )
    return (
        forward(k.shape, hidden, inputs, *options),
        backward(k.shape, hidden, inputs, needed, *options),
    )


def line_of(tuner, entry, dtype, plan):
    """The line of a launch table that a plan has taken."""
    launches = (getattr(part, "launch", part) for part in plan)
    kernels = {x.kernel.fn.__name__: x for x in launches if hasattr(x, "kernel")}
    launch = kernels[entry.kernels[0]]
    if not entry.pairs:
        return tuner.UpdateBlock(launch.constants["CONFIG"].BLOCK, launch.options["num_warps"])
    *sides, stages = launch.constants["CONFIG"][:4]
    return tuner.UpdateTile(tuner.PRECISIONS[dtype], *sides, launch.options["num_warps"], stages)


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_plans_take_lines_near_the_fastest_of_their_source(tuner, monkeypatch, dtype):
    gpu = tune.Target(tuner.MULTIPROCESSORS, tuner.SHARED_BYTES, capability=90)
    monkeypatch.setattr(tuner.problem, "device_properties", lambda device: gpu)
    (source,) = PACKAGE.glob("results/tuning-update-*.csv")
    times = collections.defaultdict(dict)
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            case = row["table"], row["case"], row["dtype"]
            times[case][row["config"]] = float(row["ms"])
    for size in tuner.bench.UPDATES:
        found = plans(tuner, dtype, size)
        for entry in tuner.LAUNCHES:
            if entry.table in UNMEASURED:
                assert entry.table not in {table for table, *_ in times}
            elif tuner.is_of_a_table(entry, dtype, size):
                case = times[
                    entry.table, tune.described(dict(zip("NDH", size, strict=True))), dtype
                ]
                line = line_of(tuner, entry, dtype, found[entry.backward])
                limit = TILES_WITHIN if entry.pairs else BLOCKS_WITHIN
                assert case[str(line)] <= limit * min(case.values()), (entry.table, size)
