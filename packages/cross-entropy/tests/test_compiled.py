"""The kernels compile for every supported GPU, without a spill and within their shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import GPUS, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", GPUS)
def test_kernels_compile_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "every_form", capability)
    assert printed.count("softmax_gradient_kernel") == 4
    assert printed.count("scaled_kernel") == 2
