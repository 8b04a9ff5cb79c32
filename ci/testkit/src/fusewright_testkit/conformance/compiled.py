"""Every kernel compiles for every supported GPU, without a spill and within its shared memory. A
package's module states LAUNCHES, from functions of its launches.py to the kernels that they launch,
and EVERY, those that launch each line of the tables.
"""

from __future__ import annotations

import re

import pytest

from ..compiled import QUICK, SHARED_KIB, compiled_in_a_process


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"launches", "every"} & {*metafunc.fixturenames}:
        metafunc.parametrize(name, getattr(metafunc.module, name.upper()))


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_kernel_compiles_without_a_spill(launches, capability, request):
    printed = compiled_in_a_process(request.path.parent, launches, capability)
    kernels = request.module.LAUNCHES[launches].split()
    assert [name for name in kernels if not re.search(rf"\b{name}_kernel\b", printed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(every, capability, request):
    compiled_in_a_process(request.path.parent, every, capability)
