"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "adamw": "adamw prepare squares norm clip",
    "matrices": "muon_momentum unit muon_move m3_memories m3_move",
    "nested": "group_squares group_dots control",
    "learned": ("learned_prepare sums means statistics fold apply learned_backward add_partials"),
    "velo": "learned_prepare sums means statistics moments velo_apply",
    "products": "hopper_product",
}
EVERY = [f"every_{name}" for name in LAUNCHES]
