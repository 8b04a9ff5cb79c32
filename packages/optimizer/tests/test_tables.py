"""Tables that are uploaded: what eager steps and captured ones find there."""

from __future__ import annotations

import pytest
import torch

CPU = torch.device("cpu")


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
    assert captured.tolist() == [3, 4]


def test_upload_says_whether_anything_has_changed():
    table = uploaded()
    assert table.hold([1, 2])
    assert not table.hold([1, 2])
    assert table.hold([1, 3])
    assert table.table.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.int64, [2**62 + 1, 0, -5]),
        (torch.int32, list(range(300))),
        (torch.float64, [0.1, -1e300]),
        (torch.float32, [1, 0.1]),
        (torch.int64, []),
    ],
    ids=["int64", "many", "fp64", "fp32", "none"],
)
def test_numbers_in_a_capture_are_those_of_an_eager_step(dtype, numbers, capture):
    from fusewright.optimizer.common.tables import upload

    eager = upload(numbers, dtype, CPU)
    capture(True)
    captured = upload(numbers, dtype, CPU)
    assert (captured.dtype, captured.shape) == (eager.dtype, eager.shape)
    assert torch.equal(captured, eager)


def test_replays_read_nothing_of_the_host(capture, monkeypatch):
    """Its memory would have to live as long as a graph, whose end torch does not tell."""
    from fusewright.optimizer.common import tables

    def refuse(*_):
        raise AssertionError("a captured copy")

    monkeypatch.setattr(tables, "source_of", refuse)
    capture(True)
    assert tables.upload([1, 2], torch.int64, CPU).tolist() == [1, 2]
    table = uploaded()
    assert table.hold([3, 4])
    assert table.table.tolist() == [3, 4]
    blocks = tables.Blocks([0, 5, 0, 0, 9, 4, 0], 4, CPU)
    assert [x.tolist() for x in blocks.tables] == [
        [0, 5, 0, 0, 9, 4, 0],
        [0, 0, 2, 2, 2, 5, 6],
        [1, 1, 4, 4, 4, 5],
    ]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 1], [4, 8, 1]], ids=str)
def test_each_block_has_its_tensor(lengths):
    from fusewright.optimizer.common.tables import Blocks

    blocks = Blocks(lengths, 4, CPU)
    expected = [place for place, length in enumerate(lengths) for _ in range(-(-length // 4))]
    *_, owner = blocks.tables
    assert (blocks.count, owner.tolist()) == (len(expected), expected)
    assert owner.dtype == torch.int32
