"""Arrows between modules go one way; each way of going wrong is told."""

from __future__ import annotations

import imports
import pytest
import workspace

GOOD = {
    "__init__.py": "from .family.op import op\n__all__ = ['op']\n",
    "family/__init__.py": "",
    "family/op.py": "from . import launch, reference\nfrom .._core import registration\n",
    "family/launch.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import kernels\n"
        'else:\n    kernels = lazy_module(__package__, "kernels")\n'
        "from .._core import launches\n"
    ),
    "family/kernels.py": "import triton\nfrom ..common.tiles import f\n",
    "family/reference.py": "import torch\n",
    "common/__init__.py": "",
    "common/tiles.py": "import triton.language as tl\n",
    "_core/__init__.py": "",
    "_core/registration.py": "import torch\n",
    "_core/launches.py": "import torch\n",
}


@pytest.fixture
def told(repository):
    """What is told of norm with these modules."""
    norm = workspace.find("norm", repository)

    def of(**files: str) -> list[str]:
        for name, text in {**GOOD, **files}.items():
            path = norm.import_folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return imports.problems(norm)

    return of


@pytest.mark.parametrize(
    "part", [*workspace.packages(), *workspace.integration()], ids=lambda part: part.name
)
def test_arrows_of_the_repository_go_one_way(part):
    assert imports.problems(part) == []


def test_a_package_of_this_shape_is_good(told):
    assert told() == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("family/kernels.py", "from . import launch\n", "family.kernels imports itself"),
        ("family/launch.py", "from .op import op\n", "family.launch (launch) reaches family.op"),
        (
            "family/launch.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .op import op\n",
            "family.launch (launch) reaches family.op (operation)",
        ),
        ("family/reference.py", "def f():\n    from . import launch\n", "(reference) reaches"),
        ("common/tiles.py", "from ..family import reference\n", "common.tiles (common) reaches"),
        ("_core/launches.py", "from ..common import tiles\n", "_core.launches (core) reaches"),
        ("family/op.py", "from fusewright.gsa import indexer_topk\n", "imports fusewright.gsa"),
        ("family/op.py", "import fusewright.gsa\n", "family.op imports fusewright.gsa"),
        ("family/op.py", "from .missing import name\n", "imports family.missing, which is not"),
        ("family/launch.py", "import triton\n", "family.launch (launch) imports triton"),
    ],
)
def test_an_arrow_that_goes_the_wrong_way_is_told(told, file, text, problem):
    assert any(problem in line for line in told(**{file: text}))


def test_a_circle_between_folders_is_told(told):
    found = told(
        **{
            "other/__init__.py": "",
            "other/rows.py": "from ..family import reference\n",
            "family/op.py": "from ..other import rows\n",
            "family/reference.py": "",
            "other/more.py": "from ..family.op import op\n",
        }
    )
    assert "folder family imports itself, through others" in found
