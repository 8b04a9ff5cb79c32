"""mkdocs hook: the packages' own pages become pages of the documentation, nothing is written twice.

``packages/norm/README.md`` is served as ``packages/norm/``, with its changelog, its result files
and examples and a page of its public functions beside it; the decisions get their list.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docs_performance
import public_api
import workspace

# Links from a README up to the root, and from there into docs/.
UP_TO_DOCS = re.compile(r"\]\((?:\.\./)+docs/")
UP_TO_ROOT = re.compile(r"\]\((?:\.\./)+(CONTRIBUTING\.md|LICENSE|README\.md)")
# Links to the README of another part, which is its page.
UP_TO_PART = re.compile(r"\]\(((?:\.\./)+[\w/-]+/)README\.md")
# The front page of the documentation stands for the README of the root.
SERVED_AS = {"README.md": "index.md"}
# What a README says last where signatures are a page beside it.
SIGNATURES = "\n## Signatures\n\nOf all functions and classes: [`{}`](reference.md).\n"
# The folders of docs/ itself; pages of other folders are the parts' own.
OF_DOCS = ("", "models", "decisions", "tutorials")
# In the order in which they are read.
TUTORIALS = ("own-model", "own-table", "long-text", "selection", "optimizers", "many-gpus")
TUTORIALS += ("kernel-package",)


def served(text: str, depth: int) -> str:
    """A README's text with its links set right for a page ``depth`` folders below the root."""
    root = "../" * depth
    text = UP_TO_DOCS.sub(f"]({root}", text)
    text = UP_TO_PART.sub(r"](\1index.md", text)
    return UP_TO_ROOT.sub(lambda m: f"]({root}{SERVED_AS.get(m[1], m[1])}", text)


def of_docs(text: str, depth: int) -> str:
    """The text of a page ``depth`` folders below docs/ with its links set right: what lies beside
    docs/ is served in the same folder as its pages.
    """
    beside = re.compile(rf"\]\((?:\.\./){{{depth + 1}}}(packages/|integration/|CONTRIBUTING\.md)")
    return beside.sub(rf"]({'../' * depth}\1", UP_TO_PART.sub(r"](\1index.md", text))


def reference_page(part: workspace.Project) -> str:
    """The public names of a part, each by the place that defines it.

    By the name that a caller imports, a function would be taken for the module of the same name.
    """
    read = public_api.folder_reader(part.import_folder)
    lines = [f"# {part.import_name}"]
    names = public_api.exported(public_api.parse(read, "__init__.py"))
    for name in (name for name in names if name != "__version__"):
        file, inside = public_api.definition(read, "__init__.py", name)
        module = file.removesuffix("__init__.py").removesuffix(".py").strip("/").split("/")
        lines += ["", "::: " + ".".join(filter(None, [part.import_name, *module, inside]))]
    return "\n".join(lines) + "\n"


def part_pages(part: workspace.Project) -> dict[str, str | Path]:
    """Site path → text, or the file to copy, of one package or of the models."""
    base = part.folder.relative_to(workspace.ROOT).as_posix()
    depth = base.count("/") + 1
    pages: dict[str, str | Path] = {}
    for name, target in {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}.items():
        if (part.folder / name).is_file():
            pages[f"{base}/{target}"] = served((part.folder / name).read_text(), depth)
    if f"{base}/index.md" in pages:
        pages[f"{base}/index.md"] += SIGNATURES.format(part.import_name)
    pages[f"{base}/reference.md"] = reference_page(part)
    files = [*part.folder.glob("results/*.*"), *part.folder.glob("examples/*.*")]
    for path in [part.folder / "LICENSE", *sorted(files)]:
        pages[f"{base}/{path.relative_to(part.folder).as_posix()}"] = path
    return pages


def decisions(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.md"))


def decisions_page(folder: Path) -> str:
    """A list of the decisions, newest last, by their first headings."""
    told = "What was measured or argued before it was chosen, as it was then."
    lines = ["# Decisions", "", told, ""]
    for path in decisions(folder):
        title = re.search(r"^# (.+)$", path.read_text(), re.M)
        lines.append(f"- [{title[1] if title else path.stem}]({path.name})")
    return "\n".join(lines) + "\n"


def parts() -> list[workspace.Project]:
    return workspace.packages() + workspace.integration()


def navigation() -> list[dict]:
    """Packages and pages are found; the decisions are an archive, of which one page is the list."""

    def base(part: workspace.Project) -> str:
        return part.folder.relative_to(workspace.ROOT).as_posix()

    def entry(part: workspace.Project) -> dict:
        pages: list = [f"{base(part)}/index.md"]
        if (part.folder / "results/tables.md").is_file():
            pages.append({"measured times": f"{base(part)}/results/tables.md"})
        if (part.folder / "CHANGELOG.md").is_file():
            pages.append({"changes": f"{base(part)}/CHANGELOG.md"})
        return {part.name: pages}

    def of_folder(name: str) -> list[str]:
        found = sorted((workspace.ROOT / "docs" / name).glob("*.md"))
        return [f"{name}/{path.name}" for path in found if path.name != "index.md"]

    def with_pages(entries: list) -> list:
        return [entries[0], *of_folder("models"), *entries[1:]]

    models = workspace.integration()
    return [
        {"Home": "index.md"},
        {"Tutorials": ["tutorials/index.md", *(f"tutorials/{name}.md" for name in TUTORIALS)]},
        {"Packages": [entry(package) for package in workspace.packages()]},
        {"Models": [page for part in models for page in with_pages(entry(part)[part.name])]},
        {"Reference": [{part.import_name: f"{base(part)}/reference.md"} for part in parts()]},
        {"Performance": ["performance.md", "scaling.md"]},
        {
            "More": [
                {"What is supported": "support.md"},
                {"From other names": "migration.md"},
                {"Other implementations": "implementations.md"},
                {"Contributing": "CONTRIBUTING.md"},
                {"Decisions": ["decisions/index.md"]},
            ]
        },
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Public functions are read from the source folders; the navigation follows what is there."""
    python = config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})
    python["paths"] = [str(part.source) for part in parts()]
    python["options"]["extensions"] = [str(workspace.ROOT / "ci/docs_signatures.py")]

    config.repo_url = workspace.repository() or None
    config.nav = navigation()
    return config


# Before mkdocstrings' own on_config, which takes the paths.
on_config.mkdocs_priority = 100


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    folder, _, name = page.file.src_uri.rpartition("/")
    if name == "tables.md":
        # Numbers are not searched for.
        page.meta["search"] = {"exclude": True}
    if page.is_homepage:
        # Its side bar would name it alone.
        page.meta["hide"] = ["navigation"]
    if folder not in OF_DOCS:
        return markdown
    (models,) = workspace.integration()
    made = docs_performance.with_made(markdown, workspace.packages(), models.folder)
    return of_docs(made, depth=int(folder != ""))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    root = workspace.ROOT
    pages: dict[str, str | Path] = {
        "CONTRIBUTING.md": root / "CONTRIBUTING.md",
        "LICENSE": root / "LICENSE",
        "decisions/index.md": decisions_page(root / "docs/decisions"),
    }
    for part in parts():
        pages |= part_pages(part)
    for name, content in pages.items():
        if isinstance(content, Path):
            files.append(File.generated(config, name, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, name, content=content))
    return files
