"""Which cases of a sampled test the quick tier runs: the plugin's choice."""

from __future__ import annotations

from types import SimpleNamespace

from fusewright_testkit.plugin import SAMPLE, mark_samples


class Item(SimpleNamespace):
    """A collected case, as far as the plugin looks at one."""

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.add(mark.name)


def cases(test, count, *marks):
    names = [f"{test}[case{number}]" for number in range(count)]
    return [Item(name=name, nodeid=f"test_file.py::{name}", marks=set(marks)) for name in names]


def quick(items):
    mark_samples(items)
    return [item.name for item in items if "slow" not in item.marks]


def test_some_cases_of_a_sampled_test_are_in_no_tier():
    kept = quick(cases("test_some", 60, "sampled"))
    assert 60 / SAMPLE / 2 < len(kept) < 60 / SAMPLE * 2
    assert kept == quick(cases("test_some", 60, "sampled"))


def test_one_case_at_least_is_left():
    for count in range(1, 6):
        for test in ("test_a", "test_b", "test_c"):
            assert quick(cases(test, count, "sampled"))


def test_other_tests_stay_whole():
    assert len(quick([*cases("test_all", 9), *cases("test_some", 9, "sampled")])) >= 10
