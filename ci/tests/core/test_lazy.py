"""A lazy module imports at the first use of a name, and an inspection is no use."""

from __future__ import annotations

import inspect
import sys

import pytest
from fusewright.example._core.lazy import lazy_module


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "lazily_imported").mkdir()
    (tmp_path / "lazily_imported/__init__.py").write_text("")
    (tmp_path / "lazily_imported/inner.py").write_text("value = [1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield lazy_module("lazily_imported", "inner")
    for name in ("lazily_imported", "lazily_imported.inner"):
        sys.modules.pop(name, None)


def imported() -> bool:
    return "lazily_imported.inner" in sys.modules


def test_first_use_of_a_name_imports(module):
    assert not imported()
    assert module.value == [1]
    assert imported()
    assert module.value is sys.modules["lazily_imported.inner"].value


def test_a_patched_name_is_seen(module, monkeypatch):
    module.value  # noqa: B018
    monkeypatch.setattr(sys.modules["lazily_imported.inner"], "value", 2)
    assert module.value == 2


def test_inspection_imports_nothing(module):
    inspect.getmodule(module)
    assert not hasattr(module, "__file__")
    assert not hasattr(module, "__path__")
    assert not imported()


def test_a_name_that_is_not_there_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="missing"):
        module.missing  # noqa: B018


def test_importing_a_package_leaves_triton_alone(run_python):
    run_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.example\nfrom fusewright.example.elementwise import launch\n"
        "assert ('triton' in sys.modules) == before\n"
        "assert 'fusewright.example.elementwise.kernels' not in sys.modules\n"
    )
