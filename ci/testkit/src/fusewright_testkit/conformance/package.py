"""What holds of a whole package: names, version, imports."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import pytest
import torch

from ..fresh import run_python
from .records import Package


@pytest.fixture
def package(request: pytest.FixtureRequest) -> Package:
    return request.module.PACKAGE


def test_public_names_are_what_the_package_offers(package):
    module = importlib.import_module(package.module)
    everywhere = {"Backend", "__version__", "available_backends", "warm_up"}
    assert set(module.__all__) == everywhere | {*package.names.split()}
    assert all(hasattr(module, name) for name in module.__all__)


def test_version_is_that_of_the_distribution(package):
    distribution = package.namespace.replace("_", "-")
    assert importlib.import_module(package.module).__version__ == version(distribution)


def test_import_needs_torch_only_and_works_without_triton(package):
    """Nor does it ask for triton where there is one: that waits for the first call."""
    absent = ("triton", *package.absent)
    run_python(
        "import builtins, sys\n"
        f"sys.modules |= dict.fromkeys({absent})\n"
        "import torch\n"
        "asked, original = set(), builtins.__import__\n"
        "def spied(name, namespace=None, local=None, names=(), level=0):\n"
        "    if level == 0:\n"
        "        asked.add(name.partition('.')[0])\n"
        "    return original(name, namespace, local, names, level)\n"
        "builtins.__import__ = spied\n"
        f"from {package.module} import *\n"
        "builtins.__import__ = original\n"
        f"assert not asked & {{*{absent}}}\n"
        "assert available_backends() == ('reference',)\n" + package.without_triton
    )


def test_no_other_op_is_registered(package):
    found = {name.partition("::") for name in torch._C._dispatch_get_all_op_names()}
    ours = {name for space, _, name in found if space == package.namespace}
    assert ours == {*package.registered.split()}
