"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "streaming_forward streaming_dq streaming_dkdv window_forward window_dq window_dkdv "
        "single_tile_forward single_tile_backward add_chunks rotary hopper_forward "
        "combine_parts flagged_forward window_hopper_backward"
    ),
}
EVERY = ("every_line",)
TABLES = EVERY
