"""Times of two commits are compared row by row; noise and other clocks tell nothing."""

from __future__ import annotations

import performance
import pytest
from performance import Time

HEADER = "op,case,pass,provider,dtype,timing,ms,ms_p20,ms_p80\n"


def test_newest_versions_of_a_gpu_win_and_other_files_are_left():
    line = "rms_norm,rows=8,fwd,{},bf16,{},{},{},\n"
    found = performance.rows(
        {
            "h200-torch2.13-triton3.7.csv": HEADER + line.format("fusewright", "graph", 2.0, 1.9),
            "h200-torch2.9-triton3.10.csv": HEADER + line.format("fusewright", "graph", 3.0, 2.9),
            "a100-torch2.9-triton3.6.csv": HEADER
            + line.format("torch", "graph", 4.0, 3.9)
            + line.format("fusewright", "wall", 5.0, 4.9),
            "tuning-h200-torch2.13-triton3.7.csv": "op,ms\nrms_norm,1.0\n",
        }
    )
    row = performance.Row("h200", "rms_norm", "rows=8", "fwd", "fusewright", "bf16", "graph")
    assert found == {row: Time(2.0, 1.9, 2.0)}


@pytest.mark.parametrize(
    ("old", "new", "slower", "faster"),
    [
        (Time(1.0, 0.9, 1.1), Time(1.5, 1.4, 1.6), True, False),
        (Time(1.0, 0.9, 1.1), Time(1.5, 1.0, 1.6), False, False),
        (Time(1.0, 1.0, 1.0), Time(1.04, 1.04, 1.04), False, False),
        (Time(1.5, 1.4, 1.6), Time(1.0, 0.9, 1.1), False, True),
    ],
    ids=["slower", "overlapping", "noise", "faster"],
)
def test_a_change_is_beyond_noise_and_spread(old, new, slower, faster):
    row = performance.Row("h200", "rms_norm", "rows=8", "fwd", "fusewright", "bf16", "graph")
    (change,) = performance.changes({row: old}, {row: new})
    assert (change.slower, change.faster) == (slower, faster)
    assert performance.changes({row: old}, {}) == []
