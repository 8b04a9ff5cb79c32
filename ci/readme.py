"""What the READMEs say of the packages, made from the packages themselves.

python ci/readme.py --check     fails where a README says something else
python ci/readme.py --write

In the root README the table of packages and its picture, in that of each part how it is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import public_api
import release_check
import workspace

TEMPLATE = workspace.ROOT / "ci/template"
ROOT_README = workspace.ROOT / "README.md"
PACKAGES = "<!-- packages: made by ci/readme.py -->", "<!-- end of packages -->"
INSTALL = "<!-- install: made by ci/readme.py -->", "<!-- end of install -->"
# Where `nox -s wheelhouse` puts the wheels of all parts.
WHEELHOUSE = "dist/wheelhouse"


def operations(project: workspace.Project) -> list[str]:
    """The public functions that compute something, then the classes, by their order in
    ``__all__``.
    """
    read = public_api.folder_reader(project.import_folder)
    found = public_api.surface(read)
    names = public_api.exported(public_api.parse(read, "__init__.py"))
    # What is in every package says nothing about one.
    everywhere = {"available_backends", "warm_up"}
    functions = [n for n in names if found[n].what == "def" and n not in everywhere]
    # A tuple with names is what a function returns.
    kinds = {n: found[n].what for n in names if found[n].what.startswith("class")}
    return functions + [n for n, kind in kinds.items() if kind != "class (NamedTuple)"]


def table(projects: list[workspace.Project]) -> str:
    lines = ["| package | computes | functions and classes | version |", "|---|---|---|---|"]
    for project in projects:
        functions = ", ".join(f"`{name}`" for name in operations(project))
        link = f"[{project.distribution}](packages/{project.name}/README.md)"
        lines.append(f"| {link} | {project.description} | {functions} | {project.version} |")
    return "\n".join(lines)


def picture(projects: list[workspace.Project]) -> str:
    """A link to the first result picture of the first package that has one."""
    for project in projects:
        for path in sorted(project.folder.glob("results/*.png")):
            place = f"packages/{project.name}/results/{path.name}"
            return f"\n\n![{project.distribution}: {path.stem}]({place})"
    return ""


def install(part: workspace.Project, repository: str) -> str:
    """The commands that install a part, and for a package the one that a release brings.

    Args:
        part: a package is released once its changelog has a dated entry; the models, which need
            packages beside them, never are.
        repository: the address to clone from, or "".
    """
    word = part.distribution.removeprefix(f"{workspace.FAMILY}-")
    folder = f"./packages/{word}"
    served = f"--no-index --find-links {WHEELHOUSE} {part.distribution}"
    from_wheels = (served, "by `nox -s wheelhouse`")
    if part.siblings:
        # No package's name begins as _core does.
        return shell([("./packages/[a-z]* ./integration", "from a clone"), from_wheels])
    released = release_check.is_released((part.folder / "CHANGELOG.md").read_text())
    lines = [(part.distribution, "")] if released else []
    lines.append((folder, "from a clone"))
    for extra in sorted(part.extras.keys() - {"triton"}):
        beside = ", ".join(map(workspace.requirement_name, part.extras[extra]))
        lines.append((f'"{folder}[{extra}]"', f"and {beside} beside it"))
    if repository:
        lines.append((f'"git+{repository}#subdirectory=packages/{word}"', "without a clone"))
    commands = shell([*lines, from_wheels])
    promise = f"No release is on an index yet; one brings `pip install {part.distribution}`."
    return commands if released else f"{commands}\n\n{promise}"


def shell(lines: list[tuple[str, str]]) -> str:
    """A block of calls of ``pip install``, each with its comment."""
    width = max(len(what) for what, _ in lines)
    commented = [f"{what:{width}}     # {why}" if why else what for what, why in lines]
    told = [f"pip install {line}" for line in commented]
    return "\n".join(["```sh", *told, "```"])


def with_made(text: str, marks: tuple[str, str], new: str) -> str:
    """``text`` with the part between the two marks replaced."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"wanted the marks {' and '.join(marks)} in a README.md, got none")
    return f"{before}{begin}\n{new}\n{end}{after}"


def made() -> dict[Path, str]:
    """Each README with what it should say."""
    packages, repository = workspace.packages(), workspace.repository()
    front = table(packages) + picture(packages)
    found = {ROOT_README: with_made(ROOT_README.read_text(), PACKAGES, front)}
    for part in [*packages, *workspace.integration(), workspace.load(TEMPLATE)]:
        path = part.folder / "README.md"
        found[path] = with_made(path.read_text(), INSTALL, install(part, repository))
    return found


def write() -> None:
    for path, text in made().items():
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true")
    which.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write()
        return 0
    behind = [path for path, text in made().items() if path.read_text() != text]
    for path in behind:
        name = path.relative_to(workspace.ROOT)
        print(f"{name} is behind the packages: python ci/readme.py --write", file=sys.stderr)
    return bool(behind)


if __name__ == "__main__":
    sys.exit(main())
