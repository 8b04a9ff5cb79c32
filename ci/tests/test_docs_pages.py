"""The documentation takes the parts' own pages and sets their links right."""

from __future__ import annotations

from types import SimpleNamespace

import docs_pages
import pytest
import release_check
import workspace


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[why](../../docs/decisions/0001-a.md)", "[why](../../decisions/0001-a.md)"),
        ("[how](../../CONTRIBUTING.md)", "[how](../../CONTRIBUTING.md)"),
        ("[what](../../README.md)", "[what](../../index.md)"),
        ("[beside](../norm/README.md#use)", "[beside](../norm/index.md#use)"),
        ("![times](results/h200.png)", "![times](results/h200.png)"),
    ],
)
def test_links_of_a_readme_fit_its_page(text, wanted):
    assert docs_pages.served(text, depth=2) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("![times](../../integration/results/a.png)", "![times](../integration/results/a.png)"),
        ("[rows](../../packages/norm/results/a.csv)", "[rows](../packages/norm/results/a.csv)"),
        (
            "[memory](../../packages/memory-mlp/README.md)",
            "[memory](../packages/memory-mlp/index.md)",
        ),
        ("[why](../decisions/0001-a.md)", "[why](../decisions/0001-a.md)"),
        ("[beside](training.md)", "[beside](training.md)"),
        ("[how](../../CONTRIBUTING.md#times)", "[how](../CONTRIBUTING.md#times)"),
    ],
)
def test_links_of_a_page_in_a_folder_of_docs_fit_where_it_is_served(text, wanted):
    assert docs_pages.of_docs(text, depth=1) == wanted


def test_links_of_a_page_in_docs_itself_fit_where_it_is_served():
    text = "[rows](../integration/results/a.csv), [b](../packages/norm/README.md#use), [c](c.md)"
    wanted = "[rows](integration/results/a.csv), [b](packages/norm/index.md#use), [c](c.md)"
    assert docs_pages.of_docs(text, depth=0) == wanted


def test_part_brings_its_pages_and_result_files(repository, monkeypatch):
    monkeypatch.setattr(workspace, "ROOT", repository)
    norm = workspace.find("norm", repository)
    (norm.folder / "README.md").write_text("# norm\n")
    (norm.folder / "results").mkdir()
    (norm.folder / "results/h200.csv").write_text("op\n")
    assert docs_pages.part_pages(norm) == {
        "packages/norm/index.md": "# norm\n" + docs_pages.SIGNATURES.format("fusewright.norm"),
        "packages/norm/reference.md": "# fusewright.norm\n",
        "packages/norm/LICENSE": norm.folder / "LICENSE",
        "packages/norm/results/h200.csv": norm.folder / "results/h200.csv",
    }


def test_public_names_are_documented_from_where_they_are_defined(repository):
    norm = workspace.find("norm", repository)
    for name, code in {
        "__init__.py": "from . import reference\nfrom .scale import scale, Scale as Module\n"
        "def available(): ...\n"
        "__all__ = ['Module', '__version__', 'available', 'reference', 'scale']\n",
        "scale/__init__.py": "from ._module import Scale\ndef scale(x): ...\n",
        "scale/_module.py": "class Scale: ...\n",
        "reference.py": "def scale(x): ...\n",
    }.items():
        path = norm.import_folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    assert docs_pages.reference_page(norm).splitlines()[2::2] == [
        "::: fusewright.norm.scale._module.Scale",
        "::: fusewright.norm.available",
        "::: fusewright.norm.reference",
        "::: fusewright.norm.scale.scale",
    ]


def test_decisions_are_listed_by_their_headings_in_order(tmp_path):
    (tmp_path / "0002-b.md").write_text("# Second\n\ntext\n")
    (tmp_path / "0001-a.md").write_text("# First\n")
    (tmp_path / "0001-a.csv").write_text("# not a page\n")
    title, _, told, *rest = docs_pages.decisions_page(tmp_path).splitlines()
    assert title == "# Decisions"
    assert told
    assert rest == ["", "- [First](0001-a.md)", "- [Second](0002-b.md)"]


def pages_of(entries) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(entries, str):
        return [entries]
    inside = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in inside for page in pages_of(entry)]


def test_every_page_is_in_the_navigation_but_for_the_archive():
    found = pages_of(docs_pages.navigation())
    docs = workspace.ROOT / "docs"
    written = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    wanted = {page for page in written if not page.startswith("decisions/")}
    assert len(set(found)) == len(found)
    assert wanted <= set(found)
    assert [page for page in found if page.startswith("decisions/")] == ["decisions/index.md"]
    assert {f"packages/{p.name}/reference.md" for p in workspace.packages()} <= set(found)


def test_repository_is_linked_where_one_is_said(repository, monkeypatch):
    monkeypatch.setattr(workspace, "repository", lambda: "https://example.org/ours")
    config = SimpleNamespace(plugins={"mkdocstrings": handlers({"options": {}})})
    assert docs_pages.on_config(config).repo_url == "https://example.org/ours"
    monkeypatch.setattr(workspace, "repository", lambda: "")
    assert docs_pages.on_config(config).repo_url is None


def test_home_says_that_nothing_is_released_as_long_as_nothing_is():
    changes = [(part.folder / "CHANGELOG.md").read_text() for part in workspace.packages()]
    released = any(map(release_check.is_released, changes))
    home = (workspace.ROOT / "docs/index.md").read_text()
    assert ("No release is on an index yet." in home) == (not released)


def handlers(python: dict) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(handlers={"python": python}))


def test_numbers_are_left_out_of_the_search():
    for uri, excluded in (("packages/norm/results/tables.md", True), ("support.md", False)):
        file = SimpleNamespace(src_uri=uri)
        page = SimpleNamespace(file=file, meta={}, is_homepage=False)
        docs_pages.on_page_markdown("text", page=page)
        assert ("search" in page.meta) == excluded
