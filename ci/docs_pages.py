"""mkdocs hook: the packages' own pages become pages of the documentation, nothing is written twice.

``packages/norm/README.md`` is served as ``packages/norm/``, with its changelog, its result files
and a page of its public functions beside it; the decisions get their list.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import workspace

# Links from a README to files that only the repository has, and from it up into docs/.
UP_TO_DOCS = re.compile(r"\]\((?:\.\./)+docs/")
UP_TO_ROOT = re.compile(r"\]\((?:\.\./)+(CONTRIBUTING\.md|LICENSE)")


def served(text: str, depth: int) -> str:
    """A README's text with its links set right for a page ``depth`` folders below the root."""
    root = "../" * depth
    return UP_TO_ROOT.sub(rf"]({root}\1", UP_TO_DOCS.sub(f"]({root}", text))


def part_pages(part: workspace.Project) -> dict[str, str | Path]:
    """Site path → text, or the file to copy, of one package or of the models."""
    base = part.folder.relative_to(workspace.ROOT).as_posix()
    depth = base.count("/") + 1
    pages: dict[str, str | Path] = {}
    for name, target in {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}.items():
        if (part.folder / name).is_file():
            pages[f"{base}/{target}"] = served((part.folder / name).read_text(), depth)
    pages[f"{base}/reference.md"] = f"# {part.import_name}\n\n::: {part.import_name}\n"
    for path in [part.folder / "LICENSE", *sorted(part.folder.glob("results/*.*"))]:
        pages[f"{base}/{path.relative_to(part.folder).as_posix()}"] = path
    return pages


def decisions(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.md"))


def decisions_page(folder: Path) -> str:
    """A list of the decisions, newest last, by their first headings."""
    lines = ["# Decisions", ""]
    for path in decisions(folder):
        title = re.search(r"^# (.+)$", path.read_text(), re.M)
        lines.append(f"- [{title[1] if title else path.stem}]({path.name})")
    return "\n".join(lines) + "\n"


def parts() -> list[workspace.Project]:
    return workspace.packages() + workspace.integration()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Public functions are read from the source folders; the navigation follows the packages."""
    python = config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})
    python["paths"] = [str(part.source) for part in parts()]

    def entry(part: workspace.Project) -> dict:
        base = part.folder.relative_to(workspace.ROOT).as_posix()
        pages = [f"{base}/index.md", {"functions": f"{base}/reference.md"}]
        if (part.folder / "CHANGELOG.md").is_file():
            pages.append({"changes": f"{base}/CHANGELOG.md"})
        return {part.name: pages}

    written = decisions(workspace.ROOT / "docs/decisions")
    config.nav = [
        {"fusewright": "index.md"},
        {"Packages": [entry(package) for package in workspace.packages()]},
        *[{"Models": entry(models)["integration"]} for models in workspace.integration()],
        {"Decisions": ["decisions/index.md", *(f"decisions/{path.name}" for path in written)]},
        {"Contributing": "CONTRIBUTING.md"},
    ]
    return config


# Before mkdocstrings' own on_config, which takes the paths.
on_config.mkdocs_priority = 100


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
