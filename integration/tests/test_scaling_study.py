"""The simulation of more GPUs than there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from fusewright_models.studies.results import read
from fusewright_models.studies.scaling import (
    BEGIN,
    COUNTS,
    LINK,
    SHARE,
    SUBJECTS,
    WAYS,
    Line,
    Subject,
    half,
    line,
    main,
    measured_in,
)

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = DOCS.parent / "integration/results/scaling-h200-torch2.11-triton3.6.csv"
EVEN = Subject("even", "even", 10**9, 10, 1000.0, 100.0)


def test_bytes_are_those_of_the_formulas():
    size = 4.0 * 10**9
    for count in (2, 8):
        assert half(size, count)[0] == pytest.approx((count - 1) / count * size)
    # Each of eight has its own eighth to send to the seven other hosts.
    assert half(size, 64)[0] == pytest.approx(7 / 8 * size + 7 / 8 * size / 8)
    assert half(size, 1) == (0.0, 0.0)
    for way, times in (("ddp, captured", 2), ("ddp, eager", 2), ("fsdp, eager", 3)):
        assert line(EVEN, way, 8).wire_gb == pytest.approx(times * half(size, 8)[0] / 1e9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_more_gpus_are_never_more_efficient(subject, way):
    found = [line(subject, way, count) for count in (1, *COUNTS)]
    assert found[0].efficiency == pytest.approx(1.0)
    efficiencies = [each.efficiency for each in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    memories = [each.memory_gib for each in found]
    assert memories == sorted(memories, reverse=True)


def test_messages_that_find_no_room_beside_the_computation_take_its_time():
    short = Subject("short", "short", EVEN.parameters, EVEN.blocks, 1e-3, 100.0)
    for way in WAYS:
        found = line(short, way, 8)
        alone = found.wire_gb * 1e9 / (SHARE * LINK)
        # Beside the bytes each message takes its time to begin.
        seconds = found.step_ms / 1000
        assert alone < seconds < alone + 400 * BEGIN


def test_documented_rows_are_those_of_the_simulation(tmp_path):
    main(tmp_path, MEASURED)
    assert (tmp_path / "scaling.csv").read_text() == (DOCS / "scaling.csv").read_text()
    assert (tmp_path / "scaling.png").stat().st_size > 0
    assert len(read(Line, tmp_path / "scaling.csv")) == len(SUBJECTS) * len(WAYS) * len(COUNTS)


def test_captured_steps_of_two_were_measured_as_they_are_expected():
    taken = measured_in(MEASURED)
    found = [line(subject, "ddp, captured", 2, taken) for subject in SUBJECTS if subject.case]
    assert [each.measured_ms for each in found] == [
        taken[subject.case, "ddp, captured", 2] for subject in SUBJECTS if subject.case
    ]
    for each in found:
        assert each.measured_ms == pytest.approx(each.step_ms, rel=0.02)
