"""What a release of a package is built from: its folder, as an index and what it links to want it.

    python ci/release_files.py norm FOLDER
    python ci/release_files.py norm FOLDER --repository https://example.org/ours     to try it

writes into FOLDER a copy of the package whose README.md has absolute links, at the release's tag,
whose pyproject.toml has project.urls, and which holds the core as files. ``python -m build FOLDER``
makes a source distribution of it, and the wheel from that.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import workspace

# Where a link of Markdown goes, without blanks or a title.
TARGET = re.compile(r"\]\(([^()\s]+)\)")
PICTURES = {".png", ".svg", ".jpg"}
# Tests want the testkit, and results are of the repository.
LEFT = shutil.ignore_patterns("tests", "results", "__pycache__")


def absolute(text: str, folder: Path, repository: str, tag: str, root: Path) -> str:
    """A page of ``folder`` whose links to files of the repository go to it, at the tag."""

    def link(match: re.Match) -> str:
        path, mark, place = match[1].partition("#")
        file = (folder / path).resolve()
        # A place on the page itself, an address, or brackets in code.
        if not path or not file.exists():
            return match[0]
        way = "raw" if file.suffix in PICTURES else "tree" if file.is_dir() else "blob"
        inside = file.relative_to(root.resolve()).as_posix()
        return f"]({repository}/{way}/{tag}/{inside}{mark}{place})"

    return TARGET.sub(link, text)


def urls(part: workspace.Project, repository: str) -> dict[str, str]:
    """``project.urls``, by the names that an index knows."""
    here = f"packages/{part.name}"
    return {
        "Homepage": repository,
        "Source": f"{repository}/tree/{part.tag}/{here}",
        "Changelog": f"{repository}/blob/{part.tag}/{here}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def stage(
    part: workspace.Project, folder: Path, repository: str, root: Path = workspace.ROOT
) -> workspace.Project:
    """Writes the copy and returns it.

    Raises:
        ValueError: there is no address; nothing is written then.
        FileExistsError: the folder is there already.
    """
    if not repository:
        raise ValueError("wanted the repository's address in the root pyproject.toml, got none")
    shutil.copytree(part.folder, folder, ignore=LEFT)
    page = folder / "README.md"
    page.write_text(absolute(page.read_text(), part.folder, repository, part.tag, root))
    lines = [f"{name} = {json.dumps(url)}" for name, url in urls(part, repository).items()]
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n".join(["\n[project.urls]", *lines, ""]))
    return workspace.load(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", default=workspace.repository())
    arguments = parser.parse_args()
    stage(workspace.find(arguments.name), arguments.folder, arguments.repository.rstrip("/"))


if __name__ == "__main__":
    main()
