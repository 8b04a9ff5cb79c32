"""Which cases of a sampled test the quick tier runs: the plugin's choice."""

from __future__ import annotations

import re

import pytest
from fusewright_testkit.plugin import MANY, SAMPLE

pytest_plugins = ["pytester"]


@pytest.fixture
def quick(pytester):
    """The names of the cases in the quick tier of a file with this text."""

    def collected(text):
        pytester.makepyfile(f"import pytest\nsampled = pytest.mark.sampled\n{text}")
        options = ("-p", "fusewright_testkit.plugin", "-p", "no:cacheprovider", "-m", "not slow")
        found = pytester.runpytest_inprocess("--collect-only", "-q", *options)
        return [line.partition("::")[2] for line in found.outlines if "::" in line]

    return collected


def crossed(**counts):
    """A sampled test of all values of each parameter with all those of the others."""
    marks = [f"@pytest.mark.parametrize('{name}', range({n}))" for name, n in counts.items()]
    return "\n".join(["@sampled", *marks, f"def test_crossed({', '.join(counts)}): ..."])


def test_few_cases_of_a_long_list_are_quick(quick):
    text = crossed(a=60)
    kept = quick(text)
    assert len(kept) == 60 / SAMPLE
    assert kept == quick(text)
    # Not the first ones: which are goes by names.
    assert kept != [f"test_crossed[a{n}]" for n in range(len(kept))]


@pytest.mark.parametrize("counts", [(9, 4), (2, 5, MANY), (6, 6, 6)], ids=str)
def test_each_value_of_parameters_that_are_crossed_is_in_few_cases(quick, counts):
    kept = quick(crossed(**dict(zip("abc", counts, strict=False))))
    for name, count in zip("abc", counts, strict=False):
        assert {int(re.search(rf"{name}(\d+)", case)[1]) for case in kept} == {*range(count)}
    assert len(kept) < 2 * max(counts)


def test_long_list_beside_a_short_one_is_cut_alone(quick):
    kept = quick(crossed(a=3, b=5 * MANY))
    assert {re.search(r"a(\d)", case)[1] for case in kept} == {"0", "1", "2"}
    assert len(kept) == 5 * MANY / SAMPLE


@pytest.mark.parametrize("count", [1, 2, MANY])
def test_short_lists_stay_whole(quick, count):
    assert len(quick(crossed(a=count))) == count


def test_other_tests_stay_whole(quick):
    other = "@pytest.mark.parametrize('a', range(60))\ndef test_all(a): ..."
    assert len(quick(f"{other}\n@sampled\ndef test_lonely(): ...")) == 61
