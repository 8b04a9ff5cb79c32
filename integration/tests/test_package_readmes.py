"""The lines of code at the head of each package's README, those of the documentation's home, and
those of a model's page, run as they stand, on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fusewright_testkit.pages import FENCE, python_blocks

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("packages/*/README.md"))

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not READMES, reason="packages/ is not beside these tests")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_first_code_of_the_readme_runs(readme):
    torch.manual_seed(0)
    install, code, *_ = FENCE.finditer(readme.read_text())
    assert (install["language"], code["language"]) == ("sh", "python")
    assert f"pip install ./packages/{readme.parent.name} " in install["body"]
    exec(compile(code["body"], str(readme), "exec"), {})


def executed(page: Path) -> dict:
    """What the code of a page knows at its end."""
    torch.manual_seed(0)
    known: dict = {}
    for code in python_blocks(page.read_text()):
        exec(compile(code, str(page), "exec"), known)
    return known


def test_code_of_the_home_of_the_documentation_runs():
    known = executed(ROOT / "docs/index.md")
    assert known["norm"].weight.grad.isfinite().all()


def test_code_of_the_page_of_transformer_np_runs():
    known = executed(ROOT / "docs/models/transformer-np.md")
    assert known["draws"].shape == (5, 10)
    assert known["params"].shape == (4, 50, 1, 10, 3)
