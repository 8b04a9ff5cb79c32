"""Whether a package may be released as it is: tag, changelog, API and times against the last one.

    python ci/release_check.py norm                    before tagging
    python ci/release_check.py norm --tag norm-v0.3.0  by the release workflow, on the tag
    python ci/release_check.py --package-of norm-v0.3.0    prints norm

What breaks a caller wants a new major version (a new minor one below 1.0), what adds wants a new
minor one. A public name that is gone was deprecated in an earlier entry of the changelog. What is
slower than in the last release's result files is named in the changelog.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import performance
import public_api
import workspace

Version = tuple[int, int, int]
HEADING = re.compile(r"^## \[?(?P<version>\d+\.\d+\.\d+)\]?(?P<rest>.*)$", re.M)
CORE = workspace.core().relative_to(workspace.ROOT).as_posix()
DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")


def parse_version(text: str) -> Version:
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"wanted a version X.Y.Z, got {text!r}")
    return tuple(map(int, match.groups()))


def git(*arguments: str) -> str:
    command = ["git", "-C", str(workspace.ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def last_release(name: str, below: Version, tags: list[str]) -> str | None:
    """The tag of the highest version below the given one."""
    found = {}
    for tag in tags:
        if (match := re.fullmatch(rf"{re.escape(name)}-v(\d+\.\d+\.\d+)", tag)) is not None:
            found[parse_version(match[1])] = tag
    older = [version for version in found if version < below]
    return found[max(older)] if older else None


def package_of(tag: str, packages: list[workspace.Project]) -> str:
    """The package that a tag releases; the models are private and are not released."""
    names = [package.name for package in packages]
    name, _, version = tag.rpartition("-v")
    if name not in names or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"wanted NAME-vX.Y.Z with one of {', '.join(names)}, got {tag!r}")
    return name


def is_released(changelog: str) -> bool:
    """Whether a changelog has a dated entry."""
    return any(DATE.search(heading["rest"]) for heading in HEADING.finditer(changelog))


def changelog_problems(text: str, version: str, core_changed: bool = False) -> list[str]:
    """The newest entry must be this version's, dated, and say something; of the core too, a line
    "- Core: ...", where that changed since the last release.
    """
    headings = list(HEADING.finditer(text))
    if not headings or headings[0]["version"] != version:
        newest = headings[0]["version"] if headings else "none"
        return [f"wanted {version} as CHANGELOG.md's newest entry, got {newest}"]
    end = headings[1].start() if len(headings) > 1 else len(text)
    told = []
    if not DATE.search(headings[0]["rest"]):
        told.append(f"wanted a date in CHANGELOG.md's heading of {version}, got none")
    if not re.search(r"^\s*[-*] ", text[headings[0].end() : end], re.M):
        told.append(f"wanted at least one line about {version} in CHANGELOG.md, got none")
    if core_changed and not re.search(r"^- Core: ", text[headings[0].end() : end], re.M):
        told.append(f'wanted a line "- Core: ..." about {version} in CHANGELOG.md, got none')
    return told


def version_problems(
    old: Version, new: Version, breaking: list[str], adding: list[str]
) -> list[str]:
    """Whether the step from ``old`` to ``new`` is large enough for what changed."""
    if breaking:
        wanted = (old[0] + 1, 0, 0) if old[0] else (0, old[1] + 1, 0)
    elif adding:
        wanted = (old[0], old[1] + 1, 0)
    else:
        wanted = (old[0], old[1], old[2] + 1)
    if new >= wanted:
        return []
    show = ".".join
    got, least = show(map(str, new)), show(map(str, wanted))
    return [f"wanted at least version {least} for these changes, got {got}"]


def entries(changelog: str) -> list[str]:
    """The text of each version's entry, newest first."""
    starts = [heading.end() for heading in HEADING.finditer(changelog)]
    ends = [heading.start() for heading in HEADING.finditer(changelog)][1:]
    return [changelog[a:b] for a, b in zip(starts, [*ends, len(changelog)], strict=True)]


def named_under(heading: str, texts: list[str]) -> set[str]:
    """What stands in backticks below "### heading" of these entries."""
    sections = [re.findall(rf"^### {heading}\n(.*?)(?=^#|\Z)", text, re.M | re.S) for text in texts]
    return {name for found in sections for text in found for name in re.findall(r"`([\w.]+)", text)}


def deprecation_problems(changelog: str, breaking: list[str]) -> list[str]:
    """Which public names are gone that no earlier entry deprecated."""
    announced = named_under("Deprecated", entries(changelog)[1:])
    gone = [line.split()[1].rstrip(":") for line in breaking if line.startswith("removed ")]
    return [
        f"wanted `{name}` under Deprecated of an earlier entry of CHANGELOG.md before it goes"
        for name in gone
        if not announced & {name, name.partition(".")[0]}
    ]


def slower_problems(changelog: str, changes: list[performance.Change]) -> list[str]:
    """Which operations are slower that the newest entry does not name."""
    told = named_under("Slower", entries(changelog)[:1])
    return [
        f"wanted `{change.row.op}` under Slower of CHANGELOG.md's newest entry: {change}"
        for change in changes
        if change.slower and change.row.op not in told
    ]


def tagged_times(tag: str, project: workspace.Project) -> dict[performance.Row, performance.Time]:
    folder = (project.folder / "results").relative_to(workspace.ROOT).as_posix()
    paths = git("ls-tree", "-r", "--name-only", tag, "--", folder).splitlines()
    names = {path: path.rpartition("/")[2] for path in paths if path.endswith(".csv")}
    return performance.rows({name: git("show", f"{tag}:{path}") for path, name in names.items()})


def tagged_reader(tag: str, project: workspace.Project) -> public_api.Reader:
    folder = project.import_folder.relative_to(workspace.ROOT).as_posix()
    names = set(git("ls-tree", "-r", "--name-only", tag, "--", folder, CORE).splitlines())

    def read(name: str) -> str | None:
        # git follows no link: what a package carries as _core stands at its own place.
        path = f"{CORE}/{name[6:]}" if name.startswith("_core/") else f"{folder}/{name}"
        return git("show", f"{tag}:{path}") if path in names else None

    return read


def check(project: workspace.Project, tag: str | None) -> list[str]:
    """Prints the API's changes; returns what speaks against the release."""
    told = []
    if tag is not None and tag != project.tag:
        told.append(f"wanted the tag {project.tag}, got {tag}")
    if not workspace.repository(workspace.ROOT):
        told.append("wanted the repository's address in the root pyproject.toml, got none")
    tags = git("tag", "--list", f"{project.name}-v*").splitlines()
    version = parse_version(project.version)
    last = last_release(project.name, version, tags)
    if tag is None and project.tag in tags:
        told.append(f"{project.tag} is released already: raise the version")
        last = project.tag
    core_changed = last is not None and bool(git("diff", "--name-only", last, "--", CORE))
    changelog = (project.folder / "CHANGELOG.md").read_text()
    told += changelog_problems(changelog, project.version, core_changed)
    if last is None:
        print(f"{project.tag}: the first release")
        return told
    old = public_api.surface(tagged_reader(last, project))
    breaking, adding = public_api.difference(
        old, public_api.surface(public_api.folder_reader(project.import_folder))
    )
    print(f"{project.tag} against {last}: {len(breaking)} breaking, {len(adding)} adding")
    print("".join(f"  {line}\n" for line in breaking + adding), end="")
    told += deprecation_problems(changelog, breaking)
    now = {path.name: path.read_text() for path in project.folder.glob("results/*.csv")}
    changes = performance.changes(tagged_times(last, project), performance.rows(now))
    moved = [change for change in changes if change.slower or change.faster]
    print(f"{len(changes)} times were measured at both, {len(moved)} of them moved")
    print("".join(f"  {change}\n" for change in moved), end="")
    told += slower_problems(changelog, changes)
    before = parse_version(last.removeprefix(f"{project.name}-v"))
    return told + version_problems(before, version, breaking, adding)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?")
    which.add_argument("--package-of", metavar="TAG")
    parser.add_argument("--tag")
    arguments = parser.parse_args()
    if arguments.package_of:
        print(package_of(arguments.package_of, workspace.packages()))
        return 0
    told = check(workspace.find(arguments.name), arguments.tag)
    for problem in told:
        print(f"release_check: {problem}", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
