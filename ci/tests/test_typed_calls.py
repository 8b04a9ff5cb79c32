"""Both type checkers' answers are read, and a call that is open is told by its module."""

from __future__ import annotations

import pytest
import typed_calls
import workspace

MYPY = """\
calls.py:3: note: Revealed type is "def (*args: Any, **kwargs: Any) -> Any"
calls.py:4: note: Revealed type is "def (x: torch._tensor.Tensor) -> torch._tensor.Tensor"
"""
BASEDPYRIGHT = """\
  calls.py:3:17 - information: Type of "module.__call__" is "(x: Tensor) -> Tensor"
  calls.py:4:17 - information: Type of "module.forward" is "(x: Tensor) -> Tensor"
"""


def test_an_open_call_is_told_and_a_typed_one_passes():
    (told,) = typed_calls.problems(MYPY, ["RMSNorm"])
    assert told.startswith("RMSNorm is called as def (*args: Any, **kwargs: Any) -> Any, wanted")
    assert typed_calls.problems(BASEDPYRIGHT, ["RMSNorm"]) == []


def test_no_answer_is_an_error():
    with pytest.raises(ValueError, match="wanted the types of 4 methods"):
        typed_calls.problems(MYPY, ["RMSNorm", "LayerNorm"])


def test_modules_are_found_where_they_are_defined(repository):
    norm = workspace.find("norm", repository)
    (norm.import_folder / "rows.py").write_text(
        "class RMSNorm(nn.Module):\n    def forward(self, x): ...\n"
        "class _RMSNorm(Derivative):\n    @staticmethod\n    def forward(ctx, x): ...\n"
        "class Run:\n    def forward(self, x): ...\n"
    )
    names = typed_calls.modules(norm)
    assert names == ["fusewright.norm.rows.RMSNorm"]
    first, function, *asked = typed_calls.program(names).splitlines()
    assert (first, function) == (
        "import fusewright.norm.rows",
        "def of_0(module: fusewright.norm.rows.RMSNorm) -> None:",
    )
    assert [line.strip() for line in asked] == [
        "reveal_type(module.__call__)",
        "reveal_type(module.forward)",
    ]
