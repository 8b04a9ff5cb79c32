"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each": (
        "scores scores_dq scores_dk select sparse_forward sparse_dq sparse_dkdv add_parts "
        "members unions keys_of_tiles queries_of_tiles segments add_segments union_forward "
        "union_dq union_dkdv marked_forward marked_dq target divergence"
    ),
}
EVERY = ("every_line",)
