"""Which cases of a sampled test the quick tier runs: the plugin's choice."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from fusewright_testkit.plugin import SAMPLE, mark_samples


class Item(SimpleNamespace):
    """A collected case, as far as the plugin looks at one."""

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.add(mark.name)


def cases(test, *counts, marks=("sampled",)):
    """Each value of every parameter, of which there are so many, with all values of the others."""
    crossed = itertools.product(*map(range, counts))
    return [case_of(test, dict(zip("abc", values, strict=False)), marks) for values in crossed]


def case_of(test, indices, marks):
    name = f"{test}[{'-'.join(f'{k}{v}' for k, v in indices.items())}]"
    of = SimpleNamespace(indices=indices)
    return Item(name=name, nodeid=f"test_file.py::{name}", marks={*marks}, callspec=of)


def quick(items):
    mark_samples(items)
    return [item for item in items if "slow" not in item.marks]


def names(items):
    return [item.name for item in items]


def test_few_cases_of_a_list_are_in_no_tier():
    kept = quick(cases("test_some", 60))
    assert len(kept) == 60 / SAMPLE
    assert names(kept) == names(quick(cases("test_some", 60)))
    # Not the first ones: which are goes by names.
    assert names(kept) != names(cases("test_some", 60)[: len(kept)])


@pytest.mark.parametrize("counts", [(9, 14), (2, 5, 14), (6, 6, 6)])
def test_each_value_of_parameters_that_are_crossed_is_in_few_cases(counts):
    kept = quick(cases("test_crossed", *counts))
    for name, count in zip("abc", counts, strict=False):
        assert {item.callspec.indices[name] for item in kept} == {*range(count)}
    assert len(kept) < 2 * max(counts)


def test_one_case_at_least_is_left():
    for count in range(1, 6):
        for test in ("test_a", "test_b", "test_c"):
            assert quick(cases(test, count))
    lonely = Item(name="test_lonely", nodeid="test_file.py::test_lonely", marks={"sampled"})
    assert quick([lonely]) == [lonely]


def test_other_tests_stay_whole():
    assert len(quick([*cases("test_all", 9, marks=()), *cases("test_some", 9)])) >= 10
