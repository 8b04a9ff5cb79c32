"""Every kernel of VeLO compiles for every supported card, without a spill and within its shared
memory.
"""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent / "velo"
KERNELS = ("_learned_prepare", "_sums", "_means", "_statistics", "_moments", "_velo_apply")


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_one_launch_of_every_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each", capability)
    assert [k for k in KERNELS if f"{k}_kernel" not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kind_of_launch_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_kind", capability)
