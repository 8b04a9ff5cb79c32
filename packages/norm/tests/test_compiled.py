"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "norm_forward norm_forward_wide norm_backward norm_backward_small norm_backward_wide "
        "weight_parts add_parts sinkhorn_forward sinkhorn_backward hopper_norm_linear"
    ),
}
EVERY = ("every_line",)
TABLES = EVERY
