"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib
import re

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent
# By the functions of launches.py.
KERNELS = {
    "adamw": ("adamw", "prepare", "squares", "norm", "clip"),
    "matrices": ("muon_momentum", "unit", "muon_move", "m3_memories", "m3_move"),
    "nested": ("group_squares", "group_dots", "control"),
    "learned": (
        *("learned_prepare", "sums", "means", "statistics", "fold", "apply"),
        *("learned_backward", "add_partials"),
    ),
    "velo": ("learned_prepare", "sums", "means", "statistics", "moments", "velo_apply"),
}


@pytest.mark.parametrize("capability", QUICK)
@pytest.mark.parametrize("kind", KERNELS)
def test_one_launch_of_every_kernel_compiles_without_a_spill(kind, capability):
    printed = compiled_in_a_process(HERE, kind, capability)
    assert [k for k in KERNELS[kind] if not re.search(rf"\b{k}_kernel\b", printed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_kind_of_launch_compiles_without_a_spill(kind, capability):
    compiled_in_a_process(HERE, f"every_{kind}", capability)
