"""Small rules for every file that git would keep: line ends, final newlines, size, the words of the
field; and one for tests: a tolerance is computed, never set by hand (docs/decisions/0002).

    python ci/check_text.py

The table "house word → field's word" stands in CONTRIBUTING.md; code and prose use none of its left
column.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import workspace

LARGEST = 1 << 20
# Trained networks that come with a package.
LARGEST_WEIGHTS = 5_000_000
GLOSSARY = workspace.ROOT / "CONTRIBUTING.md"
HEADING = "| house word | field's word |"
# A part of an identifier counts, a part of a word does not.
WORD = r"(?<![A-Za-z]){}(?![A-Za-z])"
# Below it a number that something is compared with is a tolerance, above it a property.
SMALL = 1e-2
TOLERANCES = ("atol", "rtol")
NEARNESS = ("abs", "rel", "abs_tol", "rel_tol")
# The folders of what is a test: the packages', those of ci, and the suite in the testkit.
TESTS = {"tests", "conformance"}


def problems(name: str, content: bytes) -> list[str]:
    """What is wrong with a file of this content; of a binary one only its size counts."""
    most = LARGEST_WEIGHTS if name.endswith(".safetensors") else LARGEST
    if len(content) > most:
        return [f"{name}: {len(content) >> 10} KiB, wanted at most {most >> 10}"]
    if b"\0" in content or not content:
        return []
    told = []
    if b"\r" in content:
        told.append(f"{name}: carriage returns")
    if not content.endswith(b"\n") or content.endswith(b"\n\n"):
        told.append(f"{name}: wanted exactly one newline at the end")
    for number, line in enumerate(content.splitlines(), 1):
        if line != line.rstrip():
            told.append(f"{name}:{number}: blanks at the end of the line")
    return told


def glossary(text: str) -> dict[str, str]:
    """House words and what the field says, from the table in CONTRIBUTING.md."""
    _, _, table = text.partition(HEADING)
    found = {}
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        house, field = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {word.strip(): field for word in house.split(",")}
    if not found:
        raise ValueError(f"wanted a table under {HEADING!r}, got none")
    return found


def words(name: str, text: str, known: dict[str, str]) -> list[str]:
    """The house words in a file, each with what the field says."""
    told = []
    for number, line in enumerate(text.splitlines(), 1):
        for house, field in known.items():
            if re.search(WORD.format(re.escape(house)), line, re.IGNORECASE):
                told.append(f"{name}:{number}: {house!r}, the field says {field}")
    return told


def hand_set(source: str) -> Iterator[int]:
    """The lines of a test that set a tolerance by hand: atol or rtol as a number, approx's or
    isclose's as a small one, or something that has to be less than a small number or a small number
    of times something. One that takes part in computing it, as an eps does, may be of any size.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                value = number(keyword.value)
                if (value and keyword.arg in TOLERANCES) or (
                    value and keyword.arg in NEARNESS and abs(value) < SMALL
                ):
                    yield keyword.value.lineno
        elif isinstance(node, ast.Compare):
            for one, operator, other in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                if isinstance(operator, (ast.Gt, ast.GtE)):
                    one, other = other, one
                elif not isinstance(operator, (ast.Lt, ast.LtE)):
                    continue
                if number(one) is None and any(0.0 < x < SMALL for x in factors(other)):
                    yield other.lineno


def factors(node: ast.expr) -> Iterator[float]:
    """The numbers that an expression is, or that are factors or terms of it."""
    value = number(node)
    if value is not None:
        yield value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
        yield from factors(node.left)
        yield from factors(node.right)


def number(node: ast.expr) -> float | None:
    """What an expression of numbers alone is; None of any other."""
    if not all(
        isinstance(part, (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop))
        or (isinstance(part, ast.Constant) and isinstance(part.value, (int, float)))
        for part in ast.walk(node)
    ):
        return None
    return float(eval(compile(ast.Expression(node), "", "eval")))


def files(root: Path = workspace.ROOT) -> list[Path]:
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [root / name for name in names.split("\0") if name]
    return [path for path in paths if path.is_file()]


def main() -> int:
    told, known = [], glossary(GLOSSARY.read_text())
    for path in files():
        name = path.relative_to(workspace.ROOT).as_posix()
        told += problems(name, path.read_bytes())
        if path.suffix in (".py", ".md") and path != GLOSSARY:
            told += words(name, path.read_text(), known)
        if path.suffix == ".py" and TESTS.intersection(name.split("/")):
            told += [
                f"{name}:{line}: a tolerance set by hand, wanted one that is computed"
                for line in hand_set(path.read_text(encoding="utf-8"))
            ]
    print("\n".join(told), end="\n" if told else "", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
