"""A build for the kernels library holds a package's own files, and is named by what they hold."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import hub
import pytest
import workspace


@pytest.fixture
def norm(repository) -> workspace.Project:
    """With one module, a file that is none, and layers."""
    part = workspace.find("norm", repository)
    init = "from .version import installed_version\n\n__version__ = installed_version(__name__)\n"
    (part.import_folder / "__init__.py").write_text(init + '\n__all__ = ["f"]\n')
    (part.import_folder / "weights.pt").write_bytes(b"\0\1")
    for folder in ("__pycache__", "common"):
        (part.import_folder / folder).mkdir()
    (part.import_folder / "__pycache__/a.pyc").write_bytes(b"")
    (part.folder / "shared").mkdir()
    (part.folder / "shared/checks.py").write_text("")
    (part.import_folder / "_core").symlink_to(part.folder / "shared")
    (part.folder / "hub").mkdir()
    (part.folder / "hub/layers.py").write_text("class RMSNorm: pass\n")
    return part


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_build_holds_the_packages_files_and_its_layers(norm, backend, tmp_path, repository):
    hub.write(norm, tmp_path / "out", repository)
    found = files(tmp_path / f"out/build/torch-{backend}")
    told = json.loads(found.pop("metadata.json"))
    assert sorted(found) == [
        "__init__.py",
        "_core/checks.py",
        "layers.py",
        "py.typed",
        "weights.pt",
    ]
    assert found["weights.pt"] == b"\0\1"
    init = found["__init__.py"].decode()
    assert '__version__ = "0.1.0"\n' in init
    assert init.endswith('\nfrom . import layers\n\n__all__ += ["layers"]\n')
    assert told["backend"] == {"type": backend}
    assert (told["name"], told["version"], told["python-depends"]) == ("fusewright-norm", 0, [])
    assert told["source"] == "https://example.org/ours"
    assert told["digest"]["files"] == {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in found.items()
    }
    assert (tmp_path / "out/LICENSE").read_text() == "as you like\n"
    assert (tmp_path / "out/README.md").read_text().startswith("---\nlicense: apache-2.0\n")


def test_id_is_a_name_of_python_that_changes_with_what_files_hold_and_are_called(norm):
    def name(backend: str = "cpu") -> str:
        return hub.identity(norm, backend, hub.contents(norm))

    names = [name(), name("cuda")]
    assert name() == names[0]
    (norm.import_folder / "weights.pt").write_bytes(b"\0\2")
    names.append(name())
    (norm.import_folder / "weights.pt").rename(norm.import_folder / "other.pt")
    names.append(name())
    (norm.folder / "hub/layers.py").write_text("")
    names.append(name())
    assert len(set(names)) == len(names)
    assert all(each.isidentifier() and each.startswith("_fusewright_norm_c") for each in names)


def test_package_without_the_usual_version_is_refused_and_nothing_written(
    norm, tmp_path, repository
):
    (norm.import_folder / "__init__.py").write_text('__version__ = "1"\n')
    with pytest.raises(ValueError, match=r"wanted '__version__ = .*' once in .*__init__\.py"):
        hub.write(norm, tmp_path / "out", repository)
    assert not (tmp_path / "out").exists()


def test_folder_that_is_there_is_not_written_into(norm, tmp_path, repository):
    with pytest.raises(FileExistsError):
        hub.write(norm, tmp_path, repository)


@pytest.mark.parametrize("package", workspace.packages(), ids=lambda package: package.name)
def test_every_package_can_be_written(package):
    found = hub.contents(package)
    assert {"__init__.py", "_core/registration.py"} <= set(found)
    for name, lines in hub.ADDED.items():
        assert (lines in found["__init__.py"].decode()) == (package.folder / "hub" / name).exists()
