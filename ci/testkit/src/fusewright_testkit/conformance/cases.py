"""Which operations, sizes and dtypes a test of the suite is run on."""

from __future__ import annotations

import pytest

from .records import Operation, Sizes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``op`` is run on each operation, one that takes ``form`` on each form too,
    one with ``op`` and ``sizes`` on those of its ``over``.
    """
    asked = {"op", "form"} & {*metafunc.fixturenames}
    if not asked:
        return
    (name,) = asked
    operations = [*metafunc.module.OPERATIONS.values()]
    if name == "form":
        operations += getattr(metafunc.module, "FORMS", {}).values()
    function = metafunc.function
    operations = [op for op in operations if holds(op, function)]
    over = getattr(function, "over", None)
    if over is None:
        metafunc.parametrize(name, operations, ids=[op.name for op in operations])
        return
    cases = [(op, sizes) for op in operations for sizes in getattr(op, over)]
    if "dtype" not in metafunc.fixturenames:
        ids = [f"{op.name}-{spelled(sizes)}" for op, sizes in cases]
        metafunc.parametrize("op, sizes", cases, ids=ids)
        return
    full = [(op, sizes, dtype) for op, sizes in cases for dtype in op.gpu_dtypes]
    ids = [f"{op.name}-{spelled(sizes)}-{str(dtype)[6:]}" for op, sizes, dtype in full]
    metafunc.parametrize("op, sizes, dtype", full, ids=ids)


def over(sizes: str):
    """Decorator: the test is run on each of these sizes of an operation."""

    def decorated(function):
        function.over = sizes
        return function

    return decorated


def holds(op: Operation, function) -> bool:
    """Whether a test is asked of an operation."""
    group = function.__module__.rpartition(".")[2]
    return function.__name__ not in op.exempt and group not in op.exempt


def spelled(sizes: Sizes) -> str:
    """``2x300x8``; of heads that are shared ``2x300x2-6``."""
    parts = ("-".join(map(str, n)) or "none" if isinstance(n, tuple) else str(n) for n in sizes)
    return "x".join(parts)
