"""Says no unless the running environment holds exactly the wheels of ours that it should.

    python ci/check_env.py packages/norm          that package and the testkit
    python ci/check_env.py packages/norm --alone  that package alone; its public modules import
    python ci/check_env.py integration            every package, the models and the testkit
    python ci/check_env.py … --served             installed by name, from a folder of wheels alone

Each must have been installed from a local wheel file and be imported from where it was installed,
so that neither an index nor the source tree can stand in for what was built.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import pkgutil
import sys
from collections.abc import Container
from pathlib import Path

import workspace

# What the names of modules in Triton begin with.
KERNELS = "kernels", "tiles"


def installed() -> dict[str, importlib.metadata.Distribution]:
    """The distributions of this repository that the running Python sees."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = workspace.requirement_name(distribution.metadata["Name"])
        if workspace.is_ours(name):
            found.setdefault(name, distribution)
    return found


def origin_problem(distribution: importlib.metadata.Distribution) -> str:
    """Why this distribution does not count as a local wheel; empty when it does."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return "came from an index, wanted a local wheel file"
    url = json.loads(text)["url"]
    if not (url.startswith("file://") and url.endswith(".whl")):
        return f"came from {url}, wanted a local wheel file"
    return ""


def location_problem(import_name: str, distribution: importlib.metadata.Distribution) -> str:
    """Where the import would come from instead of the installed files; empty when it is those."""
    wanted = Path(str(distribution.locate_file(import_name.replace(".", "/")))).resolve()
    spec = importlib.util.find_spec(import_name)
    places = [Path(p).resolve() for p in (spec and spec.submodule_search_locations) or ()]
    return "" if places == [wanted] else f"is imported from {places}, wanted {wanted}"


def problems(expected: dict[str, str], served: bool = False) -> list[str]:
    """What speaks against the environment.

    Args:
        expected: the import name of each wanted distribution.
        served: pip found the wheels in a folder that it was pointed at, by their names, and so
            noted no origin.
    """
    found = installed()
    told = [f"{name} is installed and should not be" for name in sorted(found.keys() - expected)]
    told += [f"{name} is not installed" for name in sorted(expected.keys() - found)]
    for name in sorted(found.keys() & expected):
        origin = "" if served else origin_problem(found[name])
        for problem in (origin, location_problem(expected[name], found[name])):
            if problem:
                told.append(f"{name} {problem}")
    return told


def import_public_modules(
    import_name: str, optional: Container[str] = ()
) -> tuple[list[str], list[str]]:
    """Imports every module of a part whose name has no leading underscore.

    Args:
        import_name: the part's.
        optional: the modules that its extras bring.

    Returns:
        Names of those imported, and of those that want what is not installed and need not be:
        kernels want Triton, which is missing beside torch for CPUs, some modules want an extra. The
        part itself must import without.
    """
    package = importlib.import_module(import_name)
    names, wanting = [import_name], []
    for module in pkgutil.walk_packages(package.__path__, f"{import_name}."):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        kernels = module.name.rpartition(".")[2].startswith(KERNELS)
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if not (kernels if missing == "triton" else missing in optional):
                raise
            wanting.append(module.name)
        else:
            names.append(module.name)
    return names, wanting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument(
        "--alone", action="store_true", help="no testkit; import every public module"
    )
    parser.add_argument("--served", action="store_true", help="by name, from a folder of wheels")
    arguments = parser.parse_args()
    project = workspace.find(arguments.name)
    wanted = workspace.needed_for(project)
    if not arguments.alone:
        wanted.append(workspace.kit())
    told = problems({each.distribution: each.import_name for each in wanted}, arguments.served)
    for problem in told:
        print(f"check_env: {problem}", file=sys.stderr)
    if not told:
        print("check_env:", ", ".join(f"{each.distribution} {each.version}" for each in wanted))
    if not told and arguments.alone:
        extras = map(workspace.requirement_name, itertools.chain(*project.extras.values()))
        optional = {name.replace("-", "_") for name in extras}
        imported, wanting = import_public_modules(project.import_name, optional)
        print("check_env: imports", ", ".join(imported))
        if wanting:
            print("check_env: without Triton or an extra does not import", ", ".join(wanting))
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
