"""Every kernel compiles for every supported card, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent
# By the functions of launches.py.
KERNELS = {
    "adamw": ("_adamw", "_prepare", "_squares", "_norm", "_clip"),
    "matrices": ("_muon_momentum", "_unit", "_muon_move", "_m3_memories", "_m3_move"),
    "nested": ("_group_squares", "_group_dots", "_control"),
    "learned": (
        *("_learned_prepare", "_sums", "_means", "_statistics", "_fold", "_apply"),
        *("_learned_backward", "_add_shares"),
    ),
    "velo": ("_learned_prepare", "_sums", "_means", "_statistics", "_moments", "_velo_apply"),
}


@pytest.mark.parametrize("capability", QUICK)
@pytest.mark.parametrize("kind", KERNELS)
def test_one_launch_of_every_kernel_compiles_without_a_spill(kind, capability):
    printed = compiled_in_a_process(HERE, kind, capability)
    assert [k for k in KERNELS[kind] if f"{k}_kernel" not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_kind_of_launch_compiles_without_a_spill(kind, capability):
    compiled_in_a_process(HERE, f"every_{kind}", capability)
