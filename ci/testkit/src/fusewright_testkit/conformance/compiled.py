"""Every kernel compiles for every supported GPU, without a spill and within its shared memory. A
package's module states LAUNCHES, from functions of its launches.py to the kernels that they launch;
EVERY, those that launch each line of the tables; and TABLES, those that are asked whether they do.
"""

from __future__ import annotations

import re

import pytest

from ..compiled import QUICK, SHARED_KIB, as_on_a_gpu, compiled_in_a_process
from ..fresh import run_python

# One with lines of its own and much shared memory, one without such lines.
OF_ALL_LINES = (90, 80)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"launches", "every", "tables"} & {*metafunc.fixturenames}:
        metafunc.parametrize(name, getattr(metafunc.module, name.upper(), ()))


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_kernel_compiles_without_a_spill(launches, capability, request):
    printed = compiled_in_a_process(request.path.parent, launches, capability)
    kernels = request.module.LAUNCHES[launches].split()
    assert [name for name in kernels if not re.search(rf"\b{name}_kernel\b", printed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(every, capability, request):
    compiled_in_a_process(request.path.parent, every, capability)


def test_every_line_of_the_tables_is_launched(tables, request):
    """On one GPU or another: a line that none takes is compiled by no test, and serves no call."""
    untaken = [
        run_python(
            f"{as_on_a_gpu(request.path.parent, capability)}"
            "from fusewright_testkit.compiled import untaken_lines\n"
            f"print(*untaken_lines({tables!r}), sep='\\n')\n"
        )
        for capability in OF_ALL_LINES
    ]
    assert set.intersection(*({*text.splitlines()} for text in untaken)) - {""} == set()
