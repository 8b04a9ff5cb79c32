"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

from fusewright_testkit.compiled import compiled_in_a_process
from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "mixture_forward mean mixture_backward silu_heads silu_heads_backward add_parts "
        "hopper_heads add_outputs"
    ),
}
EVERY = ("every_line",)
TABLES = EVERY


def test_backward_pass_for_hopper_compiles_without_a_spill():
    here = pathlib.Path(__file__).parent
    printed = compiled_in_a_process(here, "launch_hopper_backward_pass", 90)
    for kernel in ("split", "hopper_silu_heads_backward", "add_tiles"):
        assert f" {kernel}_kernel " in printed
