"""Both kernels compile for every supported GPU, without a spill."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import GPUS, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", GPUS)
def test_steps_compile_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "steps_of_states", capability)
    assert (printed.count("advance_kernel"), printed.count("undo_kernel")) == (1, 1)
