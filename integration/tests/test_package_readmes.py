"""The lines of code at the head of each package's README, and those of a model's page, run as they
stand, on a CPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("packages/*/README.md"))

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not READMES, reason="packages/ is not beside these tests")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_first_code_of_the_readme_runs(readme):
    torch.manual_seed(0)
    install, code, *_ = re.findall(r"^```(\w+)\n(.*?)^```", readme.read_text(), re.M | re.DOTALL)
    assert (install[0], code[0]) == ("sh", "python")
    assert f"pip install ./packages/{readme.parent.name} " in install[1]
    exec(compile(code[1], str(readme), "exec"), {})


def test_code_of_the_page_of_transformer_np_runs():
    torch.manual_seed(0)
    page = ROOT / "docs/models/transformer-np.md"
    known: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.DOTALL):
        exec(compile(code, str(page), "exec"), known)
    assert known["draws"].shape == (5, 10)
    assert known["params"].shape == (4, 50, 1, 10, 3)
