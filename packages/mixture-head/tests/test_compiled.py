"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "mixture_forward mean mixture_backward silu_heads silu_heads_backward add_parts "
        "hopper_heads add_outputs grouped_product grouped_weight"
    ),
}
EVERY = ("every_line",)
TABLES = EVERY
