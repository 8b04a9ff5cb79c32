"""Cases in words: ``params=36387456 tensors=116`` is 36 M parameters in 116 tensors."""

from __future__ import annotations

from collections.abc import Mapping

# What the names of most cases count; a benchmark's WORDS say what they count there, and by "no k"
# what a case without k is.
WORDS = {
    "B": "batch {}",
    "T": "{} tokens",
    "tokens": "{} tokens",
    "Nq": "{} queries",
    "M": "{} keys",
    "H": "{} heads",
    "heads": "{} heads",
    "D": "head width {}",
    "dim": "width {}",
    "hidden": "{} hidden units",
    "layers": "{} layers",
    "rows": "{} rows",
    "cols": "{} columns",
    "outputs": "{} outputs",
    "params": "{} parameters",
    "tensors": "{} tensors",
}
LARGE = ((10**9, "B"), (10**6, "M"))


def number(text: str) -> str:
    """A size as one says it: 36 M, 1.1 B, 16,384; what is no number as it is."""
    if not text.isdigit():
        return text
    for unit, letter in LARGE:
        if int(text) >= unit:
            size = int(text) / unit
            return f"{size:.1f} {letter}" if size < 10 else f"{size:.0f} {letter}"
    return f"{int(text):,}"


def pairs_of(case: str) -> dict[str, str]:
    """Sizes by their names, in order."""
    return dict(word.split("=") for word in case.split())


def in_words(pairs: Mapping[str, str], words: Mapping[str, str]) -> str:
    told = {**WORDS, **words}
    return ", ".join(told.get(name, f"{name} {{}}").format(number(x)) for name, x in pairs.items())


def common_words(cases: list[str], words: Mapping[str, str]) -> str:
    """What is the same in all cases; of one case alone nothing."""
    first, *others = map(pairs_of, cases)
    same = {name: x for name, x in first.items() if all(p.get(name) == x for p in others)}
    return in_words(same, words) if others else ""


def case_in_words(case: str, cases: list[str], words: Mapping[str, str]) -> str:
    """What is not the same in all cases, or that the case lacks what the others have; of one case
    alone all.
    """
    every, mine = [pairs_of(each) for each in cases], pairs_of(case)
    if len(cases) == 1:
        return in_words(mine, words)
    own = {name: x for name, x in mine.items() if any(p.get(name) != x for p in every)}
    if own:
        return in_words(own, words)
    lacks = dict.fromkeys(name for pairs in every for name in pairs if name not in mine)
    return ", ".join(words.get(f"no {name}", f"no {name}") for name in lacks)
