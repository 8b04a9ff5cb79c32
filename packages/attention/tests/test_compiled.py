"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pytest
from fusewright_testkit.compiled import SHARED_KIB, compiled_in_a_process
from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "streaming_forward streaming_dq streaming_dkdv window_forward window_dq window_dkdv "
        "single_tile_forward single_tile_backward add_chunks rotary hopper_forward "
        "combine_parts flagged_forward window_hopper_forward flagged_window_forward "
        "window_hopper_backward hopper_single_tile_forward hopper_single_tile_backward add_sinks"
    ),
}
EVERY = ("every_line",)
TABLES = ("all_lines",)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_values_of_another_width_and_wide_heads_in_fp32_fit_the_shared_memory(capability, request):
    compiled_in_a_process(request.path.parent, "spilling", capability, may_spill=True)
