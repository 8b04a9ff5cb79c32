"""The README's table comes from the packages; the small rules for text are told one by one."""

from __future__ import annotations

import check_text
import pytest
import readme
import workspace


def test_table_names_what_computes(repository):
    (project,) = [p for p in workspace.packages(repository) if p.name == "norm"]
    (project.import_folder / "__init__.py").write_text(
        "__all__ = ['RMSNorm', 'Results', 'available_backends', 'rms_norm']\n"
        "def available_backends(): ...\ndef rms_norm(x): ...\nclass RMSNorm: ...\n"
        "class Results(NamedTuple): ...\n"
    )
    row = readme.table([project]).splitlines()[-1]
    link = "[fusewright-norm](packages/norm/README.md)"
    assert row == f"| {link} | about fusewright-norm | `rms_norm`, `RMSNorm` | 0.1.0 |"


def test_picture_is_the_first_that_a_package_has(repository):
    projects = workspace.packages(repository)
    assert readme.picture(projects) == ""
    results = projects[1].folder / "results"
    results.mkdir()
    for name in ("h200.png", "a100.png", "h200.csv"):
        (results / name).write_text("")
    link = "![fusewright-norm: a100](packages/norm/results/a100.png)"
    assert readme.picture(projects) == f"\n\n{link}"


# What a package's README says, in this order: ten questions of a user, after what runs first.
ANSWERS = (
    "<!-- install: ",
    "```sh\npip install ",
    "```python\n",
    "## Operations\n",
    "how to fall back.**",
    "## Numerics\n",
    "**Dtypes.**",
    "**Saved for ",
    "**Determinism.**",
    "**NaN and infinity",
    "## Support and limits\n",
    "## Times\n",
    "**To time it**",
    "**To add a case**",
    "**Eager ",
    "**Slower than**",
    "<!-- results:begin -->",
    "## Formulas and papers\n",
    " to cite",
)


FOLDERS = [readme.TEMPLATE, *(package.folder for package in workspace.packages())]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_readme_of_a_package_answers_in_one_order(folder):
    text = (folder / "README.md").read_text()
    places = [text.find(answer) for answer in ANSWERS]
    assert -1 not in places, ANSWERS[places.index(-1)]
    assert places == sorted(places)


def test_only_the_part_between_the_marks_is_replaced():
    for marks in (readme.PACKAGES, readme.INSTALL):
        text = f"above\n{marks[0]}\nold\n{marks[1]}\nbelow\n"
        assert readme.with_made(text, marks, "new") == text.replace("old", "new")
        with pytest.raises(ValueError, match="wanted the marks"):
            readme.with_made("no marks", marks, "new")


UNRELEASED = """\
```sh
pip install ./packages/norm                                             # from a clone
pip install --no-index --find-links dist/wheelhouse fusewright-norm     # by `nox -s wheelhouse`
```

No release is on an index yet; one brings `pip install fusewright-norm`."""
RELEASED = [
    "pip install fusewright-norm",
    "pip install ./packages/norm # from a clone",
    'pip install "./packages/norm[fla]" # and fla-core beside it',
    'pip install "git+https://example.org/ours#subdirectory=packages/norm" # without a clone',
    "pip install --no-index --find-links dist/wheelhouse fusewright-norm # by `nox -s wheelhouse`",
]


def test_install_lines_are_those_that_work_today(repository):
    norm = workspace.find("norm", repository)
    changelog = norm.folder / "CHANGELOG.md"
    changelog.write_text("## 0.1.0 - unreleased\n\n- First.\n")
    assert readme.install(norm, "") == UNRELEASED
    changelog.write_text("## 0.2.0 - unreleased\n\n## 0.1.0 - 2026-11-21\n\n- First.\n")
    text = (norm.folder / "pyproject.toml").read_text()
    extras = '[project.optional-dependencies]\nfla = ["fla-core>=0.6"]\ntriton = ["triton>=3.6"]\n'
    (norm.folder / "pyproject.toml").write_text(text + extras)
    norm = workspace.load(norm.folder)
    begin, *lines, end = readme.install(norm, "https://example.org/ours").splitlines()
    assert (begin, end) == ("```sh", "```")
    assert [" ".join(line.split()) for line in lines] == RELEASED


def test_install_line_of_the_models_names_every_package(repository):
    (models,) = workspace.integration(repository)
    (repository / "packages/_core").mkdir()
    first = readme.install(models, "").splitlines()[1]
    folders, whole = first.removeprefix("pip install ").partition("#")[0].split()
    assert sorted(repository.glob(folders)) == [p.folder for p in workspace.packages(repository)]
    assert (repository / whole).samefile(models.folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"good\n", None),
        (b"", None),
        (b"\0 \n\n", None),
        (b"a\r\nb\r\n", "a.md: carriage returns"),
        (b"a", "exactly one newline"),
        (b"a\n\n", "exactly one newline"),
        (b"a\nb \n", "a.md:2: blanks"),
        (b"a" * (check_text.LARGEST + 1), "wanted at most 1024"),
    ],
    ids=[
        "good",
        "empty",
        "binary",
        "carriage-return",
        "no-newline",
        "two-newlines",
        "blank",
        "large",
    ],
)
def test_text_keeps_the_small_rules(content, problem):
    told = check_text.problems("a.md", content)
    assert told == [] if problem is None else problem in told[0]


def test_weights_may_have_5_megabytes():
    most = check_text.LARGEST_WEIGHTS
    assert check_text.problems("model.safetensors", b"\0" * most) == []
    (told,) = check_text.problems("model.safetensors", b"\0" * (most + 1))
    assert "wanted at most 4882" in told


GLOSSARY = f"""\
text
{check_text.HEADING}
|---|---|
| gadget, gadgets | GPU |
| oddly | again |

more | text
"""


def test_house_words_are_read_from_the_table():
    known = check_text.glossary(GLOSSARY)
    assert known == {"gadget": "GPU", "gadgets": "GPU", "oddly": "again"}
    with pytest.raises(ValueError, match="wanted a table"):
        check_text.glossary("no table")


def test_house_words_are_found_in_names_and_prose_and_not_inside_words():
    known = check_text.glossary(GLOSSARY)
    text = "def gadget_of(x): ...\nxgadgets gadgetry\n# A Gadget\nmade oddly.\n"
    assert check_text.words("a.py", text, known) == [
        "a.py:1: 'gadget', the field says GPU",
        "a.py:3: 'gadget', the field says GPU",
        "a.py:4: 'oddly', the field says again",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "assert_close(x, y, rtol=1e-5, atol=0.0)",
        "assert_close(x, y, rtol=0, atol=4 * 2 * 2.0**-20)",
        "near = dict(atol=0.02)",
        "assert x == pytest.approx(y, rel=1e-6)",
        "assert math.isclose(x, y, abs_tol=1e-9)",
        "assert (x - y).abs().max() < 1e-9",
        "assert 1e-9 >= abs(x - y)",
        "assert (x - y).norm() <= 1e-3 * y.norm()",
        "assert x <= y + 1e-3",
    ],
)
def test_tolerance_set_by_hand_is_told_by_its_line(line):
    assert list(check_text.hand_set(f"import math\n\n{line}\n")) == [3]


@pytest.mark.parametrize(
    "line",
    [
        "assert_close(x, y, rtol=0.0, atol=0.0)",
        "assert_close(x, y, rtol=0.0, atol=2**10 * torch.finfo(x.dtype).eps)",
        "assert x == pytest.approx(y, rel=8 * EPS)",
        "assert abs(x - y) <= terms * eps * y",
        "assert losses[-1] < 0.3 * losses[0]",
        "assert x.abs().min() > 1e-9",
        "x = optimizer(lr=1e-3, eps=1e-8)",
    ],
)
def test_computed_tolerances_and_properties_are_none_set_by_hand(line):
    assert list(check_text.hand_set(line)) == []


def test_tolerances_are_looked_for_in_tests_alone(tmp_path, monkeypatch, capsys):
    for folder in ("tests", "tests/core", "conformance", "src"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "near.py").write_text("assert_close(x, y, atol=1e-3)\n")
    monkeypatch.setattr(check_text.workspace, "ROOT", tmp_path)
    monkeypatch.setattr(check_text, "files", lambda: sorted(tmp_path.rglob("*.py")))
    assert check_text.main() == 1
    told = [
        line.partition(":1: a tolerance set by hand")[0]
        for line in capsys.readouterr().err.splitlines()
    ]
    assert told == ["conformance/near.py", "tests/core/near.py", "tests/near.py"]
