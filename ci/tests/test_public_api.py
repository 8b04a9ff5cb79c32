"""The public surface is read without importing, and a change is breaking or adding."""

from __future__ import annotations

import public_api
import pytest

PACKAGE = {
    "__init__.py": (
        "from . import reference\n"
        "from .norms import RMSNorm, rms_norm as norm\n"
        "from ._tables import LIMIT\n"
        "__all__ = ['LIMIT', 'RMSNorm', 'norm', 'reference']\n"
    ),
    "norms/__init__.py": "from .forward import rms_norm\nfrom .module import RMSNorm\n",
    "norms/forward.py": "def rms_norm(x: Tensor, w=None, *, eps: float = 1e-6) -> Tensor: ...\n",
    "norms/module.py": (
        "class RMSNorm(torch.nn.RMSNorm):\n"
        "    offset: float\n"
        "    def __init__(self, width: int) -> None: ...\n"
        "    def forward(self, x: Tensor) -> Tensor: ...\n"
        "    def _private(self): ...\n"
    ),
    "reference.py": "from .norms import RMSNorm\ndef rms_norm(x): ...\ndef _helper(x): ...\n",
    "_tables.py": "LIMIT = 65536\n",
}


def shown(files: dict[str, str]) -> dict[str, str]:
    return {name: str(what) for name, what in public_api.surface(files.get).items()}


def test_names_are_followed_to_where_they_are_defined():
    assert shown(PACKAGE) == {
        "LIMIT": "value",
        "RMSNorm": "class (torch.nn.RMSNorm)",
        "RMSNorm.__init__": "def (self, width: int) -> None",
        "RMSNorm.forward": "def (self, x: Tensor) -> Tensor",
        "RMSNorm.offset": "field float",
        "norm": "def (x: Tensor, w = None, *, eps: float = 1e-06) -> Tensor",
        "reference": "module",
        "reference.rms_norm": "def (x)",
    }


def test_a_name_from_a_missing_module_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"that __init__.py imports"):
        public_api.surface({"__init__.py": "from .gone import f\n__all__ = ['f']\n"}.get)


def compare(old: str, new: str) -> tuple[int, int]:
    def read(code: str) -> public_api.Surface:
        return public_api.surface({"__init__.py": code}.get)

    breaking, adding = public_api.difference(read(old), read(new))
    return len(breaking), len(adding)


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("def f(x): ...", "def f(x): ...", (0, 0)),
        ("def f(x): ...", "def f(x):\n    return -x", (0, 0)),
        ("def f(x): ...", "def g(x): ...", (1, 1)),
        ("def f(x): ...", "def f(x): ...\ndef g(x): ...", (0, 1)),
        ("def f(x): ...", "def f(x, *, eps=1): ...", (0, 1)),
        ("def f(x): ...", "def f(x, w=None): ...", (0, 1)),
        ("def f(x): ...", "def f(x, w): ...", (1, 0)),
        ("def f(x, *, a=1): ...", "def f(x, *, b=1, a=1): ...", (0, 1)),
        ("def f(x, *, eps=1): ...", "def f(x, *, eps=2): ...", (1, 0)),
        ("def f(x, *, eps=1): ...", "def f(x): ...", (1, 0)),
        ("def f(x, w): ...", "def f(w, x): ...", (1, 0)),
        ("def f(x) -> A: ...", "def f(x) -> B: ...", (1, 0)),
        ("class A: ...", "class A(B): ...", (1, 0)),
        ("class A:\n    def f(self): ...", "class A: ...", (1, 0)),
    ],
)
def test_a_change_breaks_or_adds(old, new, counts):
    assert compare(old, new) == counts
