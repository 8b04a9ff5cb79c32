"""Where the kernel for Hopper multiplies, and the stacks that it takes; no kernel runs."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer._core.backends import DeviceProperties
from fusewright.optimizer.matrix import launch_hopper
from fusewright.optimizer.matrix.launch_hopper import PRODUCT, WORKSPACE, cdiv, serves, tiles_of

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def on(monkeypatch):
    """Pretend to be on a GPU with this capability."""

    def pretend(capability):
        found = DeviceProperties(multiprocessors=132, shared_bytes=0, capability=capability)
        monkeypatch.setattr(launch_hopper, "device_properties", lambda device: found)
        monkeypatch.setattr(launch_hopper, "interpreted", lambda: False)
        launch_hopper.fastest_stack.cache_clear()

    yield pretend
    launch_hopper.fastest_stack.cache_clear()


@pytest.mark.parametrize("rows", [128, 384, 1024, 1152, 2048])
def test_half_of_a_symmetric_product_has_the_tiles_that_reach_its_diagonal(rows):
    height, width = PRODUCT.groups * PRODUCT.rows, PRODUCT.block_cols
    wanted = sum(
        col <= row + height - 1 for row in range(0, rows, height) for col in range(0, rows, width)
    )
    assert tiles_of(rows, rows, True) == wanted
    assert tiles_of(rows, rows, False) == cdiv(rows, height) * cdiv(rows, width)


def test_whole_tiles_of_16_bits_on_hopper_are_served(on):
    on(90)
    assert serves((3, 384, 640), torch.bfloat16, HOPPER)
    assert serves((3, 640, 384), torch.float16, HOPPER)
    assert not serves((3, 384, 640), torch.float32, HOPPER)
    assert not serves((3, 384, 640), torch.bfloat16, torch.device("cpu"))
    # No whole tiles of rows; of terms; too few tiles.
    for shape in ((1, 448, 1024), (1, 1024, 1000), (1, 256, 1024)):
        assert not serves(shape, torch.bfloat16, HOPPER)
    on(80)
    assert not serves((3, 384, 640), torch.bfloat16, HOPPER)


@pytest.mark.parametrize(
    "shape", [(80, 2048, 2048), (40, 5504, 2048), (19, 384, 1536), (1, 8192, 8192)]
)
def test_stacks_fill_the_programs_within_their_memory(on, shape):
    on(90)
    count, rows, cols = shape
    short = min(rows, cols)
    found = launch_hopper.fastest_stack(shape, torch.bfloat16, HOPPER)
    assert 1 <= found <= count
    assert found == 1 or found * 2 * (2 * rows * cols + short * short) <= WORKSPACE


def test_a_stack_of_five_leaves_fewer_programs_idle_than_one_of_six(on):
    """Of 72 tiles a matrix 360 are three rounds of 132 programs, and 432 are four."""
    on(90)
    assert launch_hopper.fastest_stack((80, 2048, 2048), torch.bfloat16, HOPPER) == 5
