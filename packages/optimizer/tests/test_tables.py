"""Tables that are uploaded: what eager steps and captured ones find there."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")


def replay(table):
    """What a replay does: copy each source again."""
    for source, target in table.kept:
        if source is not None:
            target.copy_(source)


def uploaded(**options):
    from fusewright.optimizer.common.tables import Uploaded

    return Uploaded(2, torch.int64, CPU, **options)


def test_replays_leave_what_eager_steps_read_alone(capture):
    table = uploaded(exclusive=True)
    assert table.hold([1, 2])
    eager = table.table
    capture(True)
    assert table.hold([3, 4])
    captured = table.table
    capture(False)
    replay(table)
    # The same numbers as before the capture: nothing is uploaded, and they are still there.
    assert table.hold([1, 2])
    assert table.table is eager
    assert not table.hold([1, 2])
    assert table.table.tolist() == [1, 2]
    assert table.hold([5, 6])
    assert captured.tolist() == [3, 4]


def test_capture_that_finds_addresses_copies_none_and_they_are_left_to_it(capture):
    table = uploaded(exclusive=True)
    table.hold([1, 2])
    capture(True)
    assert not table.hold([1, 2])
    captured = table.table
    capture(False)
    assert not table.kept
    assert not table.hold([1, 2])
    assert table.table is captured
    table.hold([7, 8])
    table.hold([9, 8])
    replay(table)
    assert captured.tolist() == [1, 2]
    assert table.table.tolist() == [9, 8]


def test_capture_reads_numbers_that_are_up_to_date_where_they_are_refreshed(capture):
    table = uploaded()
    table.hold([1, 2])
    capture(True)
    assert not table.hold([1, 2])
    captured = table.table
    capture(False)
    table.hold([3, 4])
    replay(table)
    assert captured.tolist() == [3, 4]


def test_upload_says_whether_anything_has_changed():
    table = uploaded()
    assert table.hold([1, 2])
    assert not table.hold([1, 2])
    assert table.hold([1, 3])
    assert table.table.tolist() == [1, 3]
