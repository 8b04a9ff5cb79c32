"""What memory_update hands Hopper's kernel for many rows: with its formulas in plain torch in the
kernel's place, which runs on that GPU alone, results and gradients are those of the update.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp.common.reference import activated
from fusewright.memory_mlp.update import launch, launch_backward, launch_hopper

F32 = torch.float32
SIZES = 300, 20, 24


def run_in_torch(rows_launch, tensors, floats=(1.0,)):
    """The launch, by the formulas that kernels_hopper states."""
    x, config = rows_launch.operands(*tensors), rows_launch.launch.constants["CONFIG"]
    pairs = [(x.a, x.b), (x.c, x.d)][: config.PAIRS]
    acc = sum(a @ (b.T if config.TRANSPOSED else b) for a, b in pairs)
    # What the kernel is not told to read it does not read.
    x = x._replace(**dict(zip(("x", "other_x")[config.LOADS :], (None, None), strict=False)))
    assert all(read is not None for read in (x.x, x.other_x)[: config.LOADS])
    assert (x.norm is not None) == config.BACKWARD
    assert (x.sums is not None) == config.SUMS
    assert config.PART_COLS * 2 * config.SETS == config.BLOCK_N
    if config.BIAS:
        acc = acc + x.bias
    match config.KIND:
        case "hidden":
            y, other = activated(acc, config.ACTIVATION)[0], acc
        case "residual":
            y, other = acc - x.x, None
            x.losses.zero_()[0] = y.square().sum()
        case "slope":
            y, other = acc * activated(x.x, config.ACTIVATION)[1], acc
        case "p_bar" | "z_bar":
            z = x.other_x if config.CURVED else x.x
            _, slope, curve = activated(z, config.ACTIVATION)
            y, other = acc * slope, None
            if config.CURVED and config.KIND == "p_bar":
                other = acc * x.x * curve
            elif config.CURVED:
                y = y + x.x
        case "e_bar":
            y = acc + x.dloss * x.x if config.FROM_LOSS else acc
            other = -floats[0] * y
        case "dk":
            y, other = floats[0] * acc, None
    x.y.copy_(y)
    if config.OTHER:
        x.other.copy_(other)
    if config.SUMS:
        parts = y.split(config.BLOCK_M)
        x.sums.copy_(torch.stack([part.sum(0) for part in parts]))


@pytest.fixture
def in_torch(monkeypatch):
    def clear():
        launch.update_plan.cache_clear()
        launch_backward.backward_plan.cache_clear()

    clear()
    launches = []

    def run(rows_launch, *operands):
        launches.append(rows_launch.launch.constants["CONFIG"].KIND)
        run_in_torch(rows_launch, *operands)

    monkeypatch.setattr(launch_hopper, "serves", lambda problem, weighted: not weighted)
    monkeypatch.setattr(launch_hopper.RowsLaunch, "__call__", run)
    yield launches
    clear()


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_operands_of_each_launch_make_the_update(update_op, in_torch, activation, device):
    op = update_op.having(activation=activation, reduction="mean_all", max_grad_norm=0.05)
    op.check(op.draw((), *SIZES, F32, device))
    assert {*in_torch} == {*launch_hopper.KINDS}
