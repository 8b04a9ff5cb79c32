"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import SHARED_KIB, compiled_in_a_process
from fusewright_testkit.conformance.compiled import *  # noqa: F403

LAUNCHES = {
    "one_of_each_update": (
        "round_weights transpose hidden residual slope gradients add_splits step inner_products "
        "cotangents p_bar e_bar z_bar dk"
    ),
    "one_of_each_read": "read read_backward read_sum",
    "one_of_each_input": (
        "memory_input memory_input_backward add_parts finite_tokens kept_tokens gated_tokens "
        "gated_tokens_backward count_tokens"
    ),
}
EVERY = "every_update", "every_read", "every_input"


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("scans", ["every_scan", "every_deep_scan"])
def test_every_kernel_of_the_scan_compiles_and_fits_in_shared_memory(scans, capability):
    """They spill still, docs/decisions/0005 and 0037 say how much."""
    compiled_in_a_process(pathlib.Path(__file__).parent, scans, capability, may_spill=True)


def test_products_over_many_rows_are_hoppers_there():
    printed = compiled_in_a_process(pathlib.Path(__file__).parent, "update_of_many_rows", 90)
    # One for each product over rows: three forward and four backward.
    assert printed.count(" hopper_rows_kernel ") == 7
