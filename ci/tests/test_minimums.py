"""Floors become pins, and a promise without a number is refused."""

from __future__ import annotations

import minimums
import pytest
import workspace


@pytest.mark.parametrize(
    ("requirement", "pin"),
    [
        ("torch>=2.11", "torch==2.11"),
        ("numpy >=2.0, <3", "numpy==2.0"),
        ("triton>=3.6; sys_platform == 'linux'", "triton==3.6; sys_platform == 'linux'"),
        ("fla[extra]<2,>=0.4.1", "fla[extra]==0.4.1"),
    ],
)
def test_floor_becomes_a_pin(requirement, pin):
    assert minimums.floor(requirement) == pin


def test_a_requirement_without_a_floor_is_refused():
    with pytest.raises(ValueError, match="wanted a requirement with a floor"):
        minimums.floor("torch<3")


def test_of_two_floors_the_higher_counts():
    assert minimums.floors(["rich>=13.9", "Rich>=13.10", "typer>=0.15"]) == [
        "Rich==13.10",
        "typer==0.15",
    ]


@pytest.mark.parametrize(
    "part", workspace.packages() + workspace.integration(), ids=lambda p: p.name
)
def test_every_promise_of_the_repository_has_a_number(part):
    projects = [*workspace.needed_for(part), workspace.kit()]
    floors = minimums.floors(workspace.third_party(projects, "test"))
    assert "torch==2.11" in floors
