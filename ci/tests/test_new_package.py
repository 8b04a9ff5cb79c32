"""A new package is whole from its first day; its own tests are run by `nox -s "tests(new)"`."""

from __future__ import annotations

import check_wheel
import new_package
import public_api
import pytest
import release_check
import workspace


@pytest.fixture
def laid_out(tmp_path):
    return new_package.lay_out("two-words", tmp_path)


def test_laid_out_package_is_discovered_and_spelled_right(laid_out, tmp_path):
    assert workspace.packages(tmp_path) == [laid_out]
    assert laid_out.distribution == "fusewright-two-words"
    assert laid_out.import_name == "fusewright.two_words"


def test_laid_out_package_keeps_the_wheel_contract(laid_out, build_wheels):
    assert check_wheel.problems(laid_out, build_wheels(laid_out)) == []


def test_laid_out_package_offers_a_working_operation(laid_out):
    surface = public_api.surface(public_api.folder_reader(laid_out.import_folder))
    assert {"available_backends", "scale"} <= surface.keys()


def test_the_templates_name_is_not_left(laid_out):
    left = []
    for path in laid_out.folder.rglob("*"):
        if path.is_file() and path.name != "LICENSE":
            text = path.as_posix() + path.read_text()
            left += [path for s in "._-/" if f"fusewright{s}example" in text]
    assert left == []


def test_laid_out_package_is_not_released_by_accident(laid_out):
    text = (laid_out.folder / "CHANGELOG.md").read_text()
    assert "wanted a date" in release_check.changelog_problems(text, laid_out.version)[0]


@pytest.mark.parametrize("name", ["Two", "two_words", "two words", "-two", "../two", ""])
def test_a_name_that_is_not_one_word_is_refused(tmp_path, name):
    with pytest.raises(SystemExit, match="wanted a name like memory-mlp"):
        new_package.lay_out(name, tmp_path)


def test_a_package_that_is_there_is_left_alone(laid_out, tmp_path):
    with pytest.raises(SystemExit, match="wanted a new name"):
        new_package.lay_out("two-words", tmp_path)
