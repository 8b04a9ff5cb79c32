"""The code of a page runs, and the page reads as what it prints."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
import workspace

# By its file: the testkit as a package would import torch.
sys.path.append(str(workspace.kit().import_folder))

import pages


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(language: str, body: str) -> str:
    return f"```{language}\n{body}```\n"


def test_output_is_what_the_code_prints_now():
    code = block("python", "x = 2\nprint(x)\n")
    then = "\nbehind it\n\n" + block("python", "x += 1\n")
    assert pages.ran(code + then, {}) == code + "\n" + block("text", "2\n") + then
    stale = code + "\n" + block("text", "old\n") + then
    assert pages.ran(stale, {}) == code + "\n" + block("text", "2\n") + then


def test_output_of_code_that_prints_nothing_goes():
    code = block("python", "x = 2\n")
    assert pages.ran(code + "\n" + block("text", "2\n") + "\nend\n", {}) == code + "\nend\n"


def test_text_that_stands_elsewhere_is_left():
    page = block("python", "x = 2\n") + "\nwords\n\n" + block("text", "2\n")
    assert pages.ran(page, {}) == page


def test_blanks_at_the_ends_of_lines_are_none_of_the_page():
    code = block("python", "print('a  \\n\\nb')\n")
    assert pages.ran(code, {}) == code + "\n" + block("text", "a\n\nb\n")


def test_commands_go_to_their_programs_and_are_shown_where_the_page_shows_them():
    given = []

    def program(arguments):
        given.append(arguments)
        print("did", *arguments)

    page = block("sh", 'try --name "a b" \\\n    --more\n# a comment\ntry again\n')
    assert pages.ran(page, {"try": program}) == page
    assert given == [["--name", "a b", "--more"], ["again"]]
    shown = page + "\n" + block("text", "did --name a b --more\ndid again\n")
    assert pages.ran(page + "\n" + block("text", ""), {"try": program}) == shown


def test_command_of_no_program_is_refused():
    with pytest.raises(ValueError, match="wanted a command of try; got 'rm -r x'"):
        pages.ran(block("sh", "rm -r x\n"), {"try": print})


def test_blocks_with_a_name_are_files(folder):
    page = block('python title="src/a.py"', "x = 1 / 0\n") + block('csv title="b.csv"', "a,b\n")
    assert pages.ran(page, {}) == page
    assert (folder / "src/a.py").read_text() == "x = 1 / 0\n"
    assert (folder / "b.csv").read_text() == "a,b\n"


def test_errors_name_the_line_of_the_page():
    page = "words\n\n" + block("python", "x = 1\ny = x / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        pages.ran(page, {}, "page.md")
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (Path(last.filename).name, last.lineno) == ("page.md", 5)


def test_python_of_a_page_is_found_in_its_order():
    page = block("python", "a\n") + block("sh", "b\n") + "    c\n\n" + block("python", "d\n")
    assert pages.python_blocks(page) == ["a\n", "d\n"]
