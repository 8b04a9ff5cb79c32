"""The contract that every built wheel of this repository keeps.

    python ci/check_wheel.py DIST_FOLDER packages/norm [integration …]

checks the wheel of each named part. A package's wheel holds ``fusewright/<package>/`` and its
metadata and nothing else: no file that two wheels would share, no tests, no requirement on a
sibling. Its ``_core`` holds the files of ``packages/_core``, byte for byte.
"""

from __future__ import annotations

import argparse
import email
import sys
import zipfile
from pathlib import Path

import workspace

# Newer metadata is refused by the publish action.
NEWEST_METADATA = (2, 4)


def file_problems(project: workspace.Project, names: list[str]) -> list[str]:
    """Which files the wheel has that it should not have, and lacks that it should have."""
    stem = f"{project.distribution.replace('-', '_')}-{project.version}.dist-info/"
    code = project.import_name.replace(".", "/") + "/"
    told = [f"holds {n}, outside {code}" for n in names if not n.startswith((code, stem))]
    told += [f"holds the test {n}" for n in names if is_test(n)]
    wanted = [f"{code}__init__.py", f"{code}py.typed", f"{stem}licenses/LICENSE"]
    return told + [f"lacks {n}" for n in wanted if n not in names]


def core_problems(project: workspace.Project, wheel: zipfile.ZipFile) -> list[str]:
    """Which files of the core the wheel lacks, or holds with another text."""
    core = workspace.core(project.folder.parent.parent)
    if not project.is_package or not core.is_dir():
        return []
    prefix = project.import_name.replace(".", "/") + "/_core/"
    wanted = {prefix + path.name: path.read_bytes() for path in core.glob("*.py")}
    held = {name: wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)}
    told = [f"lacks {name}" for name in sorted(wanted.keys() - held.keys())]
    told += [
        f"holds {name}, which is not in packages/_core" for name in held.keys() - wanted.keys()
    ]
    same = held.keys() & wanted.keys()
    return told + [f"holds another text of {n}" for n in sorted(same) if held[n] != wanted[n]]


def is_test(name: str) -> bool:
    parts = Path(name).parts
    return "tests" in parts or parts[-1].startswith(("test_", "conftest"))


def metadata_problems(project: workspace.Project, text: str) -> list[str]:
    """What METADATA says that it should not say."""
    message = email.message_from_string(text)
    told = []
    for key, wanted in {"Name": project.distribution, "Version": project.version}.items():
        if message[key] != wanted:
            told.append(f"has {key} {message[key]}, wanted {wanted}")
    if tuple(map(int, message["Metadata-Version"].split("."))) > NEWEST_METADATA:
        told.append(f"has metadata {message['Metadata-Version']}, wanted at most 2.4")
    requirements = message.get_all("Requires-Dist", [])
    ours = [r for r in requirements if workspace.is_ours(workspace.requirement_name(r))]
    if project.is_package:
        told += [f"requires its sibling {r}" for r in ours]
    else:
        told += [f"requires {r} without a range" for r in ours if not (">=" in r and "<" in r)]
        if "Private :: Do Not Upload" not in message.get_all("Classifier", []):
            told.append("lacks the classifier Private :: Do Not Upload")
    return told


def problems(project: workspace.Project, folder: Path) -> list[str]:
    """Everything that breaks the contract; the wheel is looked up in ``folder``."""
    stem = project.distribution.replace("-", "_")
    wheels = [path.name for path in sorted(folder.glob(f"{stem}-*.whl"))]
    wanted = project.wheel
    if wheels != [wanted]:
        return [f"wanted {wanted}, got {', '.join(wheels) or 'no wheel'}"]
    with zipfile.ZipFile(folder / wanted) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"{stem}-{project.version}.dist-info/METADATA").decode()
        told = core_problems(project, wheel)
    told += file_problems(project, names) + metadata_problems(project, metadata)
    return [f"{wanted} {problem}" for problem in told]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    projects = [workspace.find(name) for name in arguments.names]
    told = [problem for project in projects for problem in problems(project, arguments.folder)]
    for problem in told:
        print(f"check_wheel: {problem}", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
