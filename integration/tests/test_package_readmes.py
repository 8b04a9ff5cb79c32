"""The lines of code at the head of each package's README run as they stand, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
READMES = sorted(PACKAGES.glob("*/README.md"))

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not READMES, reason="packages/ is not beside these tests")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_first_code_of_the_readme_runs(readme):
    torch.manual_seed(0)
    install, code, *_ = re.findall(r"^```(\w+)\n(.*?)^```", readme.read_text(), re.M | re.DOTALL)
    assert (install[0], code[0]) == ("sh", "python")
    assert f"pip install fusewright-{readme.parent.name}\n" in install[1]
    exec(compile(code[1], str(readme), "exec"), {})
