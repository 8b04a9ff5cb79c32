"""A package as the ``kernels`` library loads it, from the same source as its wheel.

    python ci/hub.py norm FOLDER

writes into FOLDER what a repository of kernels holds: build/torch-cpu and build/torch-cuda, each
the package with metadata.json; its licence; and a page. What packages/NAME/hub holds stands beside
the package's own modules: layers.py has classes whose forward passes ``kernelize`` puts in place of
others, functions.py such functions as other programs look up in a repository.

The id of a build is the name of its module and the namespace of its ops. It is made of what the
files hold: builds that differ, and the wheel, live in one process; a copy of a build is that build.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import workspace

BACKENDS = ("cpu", "cuda")
HUB = "hub"
INIT = "__init__.py"
# As the library spells it.
LICENSE = "apache-2.0"
# A build is no distribution.
VERSION = "__version__ = installed_version(__name__)\n"
ADDED = {
    "functions.py": """
from . import functions
from .functions import *

__all__ += functions.__all__
""",
    "layers.py": """
from . import layers

__all__ += ["layers"]
""",
}
PAGE = """\
---
license: {license}
tags: [kernel]
---

# {name}

{description}.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/{name}", version={version}, trust_remote_code=True)
print(kernel.__all__)
```

Python 3.11, torch 2.11 and Triton 3.6 or later. Release {release} of the package `{name}`{address}.
"""


def contents(part: workspace.Project) -> dict[str, bytes]:
    """What a build holds beside metadata, by its name there.

    Raises:
        ValueError: the package's ``__init__`` does not say its version as those of all packages do.
    """
    found = {}
    for folder in (part.import_folder, part.folder / HUB):
        if folder.is_dir():
            found |= {p.relative_to(folder).as_posix(): p.read_bytes() for p in files(folder)}
    text = found[INIT].decode()
    if text.count(VERSION) != 1:
        raise ValueError(f"wanted {VERSION.strip()!r} once in {part.import_folder / INIT}")
    text = text.replace(VERSION, f'__version__ = "{part.version}"\n')
    added = "".join(lines for name, lines in ADDED.items() if name in found)
    found[INIT] = (text + added).encode()
    return dict(sorted(found.items()))


def files(folder: Path) -> Iterator[Path]:
    """Every file below a folder, through symbolic links too, but for bytecode."""
    for path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(path, name) for name in names)


def identity(part: workspace.Project, backend: str, found: dict[str, bytes]) -> str:
    """A build's name, which is a module's and a namespace's."""
    digest = hashlib.sha256()
    for name, content in found.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return f"_{part.namespace}_{backend}_{digest.hexdigest()[:12]}"


def metadata(
    part: workspace.Project, backend: str, found: dict[str, bytes], address: str
) -> dict[str, object]:
    """What the library reads before it imports a build."""
    told: dict[str, object] = {
        "name": part.distribution,
        "id": identity(part, backend, found),
        "version": kernel_version(part),
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {
                name: base64.b64encode(hashlib.sha256(content).digest()).decode()
                for name, content in found.items()
            },
        },
    }
    return told | ({"source": address} if address else {})


def kernel_version(part: workspace.Project) -> int:
    """Of a repository of kernels: what may break is in another; 0 promises nothing."""
    return int(part.version.partition(".")[0])


def write(part: workspace.Project, folder: Path, root: Path = workspace.ROOT) -> None:
    """
    Raises:
        ValueError: as `contents`; nothing is written then.
        FileExistsError: the folder is there already.
    """
    found, address = contents(part), workspace.repository(root)
    folder.mkdir(parents=True)
    for backend in BACKENDS:
        build = folder / "build" / f"torch-{backend}"
        for name, content in found.items():
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            (build / name).write_bytes(content)
        text = json.dumps(metadata(part, backend, found, address), indent=2)
        (build / "metadata.json").write_text(text + "\n")
    shutil.copy(part.folder / "LICENSE", folder)
    page = PAGE.format(
        license=LICENSE,
        name=part.distribution,
        description=part.description,
        version=kernel_version(part),
        release=part.version,
        address=f", {address}" if address else "",
    )
    (folder / "README.md").write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(workspace.find(arguments.name), arguments.folder)


if __name__ == "__main__":
    main()
