"""The package table and the picture of the root README, made from the packages themselves.

python ci/readme.py --check     fails where README.md says something else
python ci/readme.py --write
"""

from __future__ import annotations

import argparse
import sys

import public_api
import workspace

README = workspace.ROOT / "README.md"
BEGIN, END = "<!-- packages: made by ci/readme.py -->", "<!-- end of packages -->"


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


def made(projects: list[workspace.Project]) -> str:
    return table(projects) + picture(projects)


def with_made(text: str, new: str) -> str:
    """``text`` with the part between the two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"wanted the marks {BEGIN} and {END} in README.md, got none")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def write() -> None:
    README.write_text(with_made(README.read_text(), made(workspace.packages())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true")
    which.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text()
    if arguments.write:
        write()
    elif text != with_made(text, made(workspace.packages())):
        print("README.md is behind the packages: python ci/readme.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
