"""The pytest plugin of the fusewright packages: interpreter, seed, poison, kinds and tiers.

Without a GPU the Triton kernels run in the interpreter, which must be chosen before triton is first
imported.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import pathlib
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch.utils import _device

# Its tests are collected in the packages' modules.
pytest.register_assert_rewrite("fusewright_testkit.conformance")

HAS_GPU = torch.cuda.is_available()
# Of a parameter of a test that is sampled with more than MANY values one in SAMPLE is quick.
MANY, SAMPLE = 10, 5
# Of sixteen processes beside a large test.
MOST_GPU_MEMORY = 6 << 30
# What a process keeps from one test to the next.
KEPT_GPU_MEMORY = 512 << 20
LOCK = pathlib.Path(tempfile.gettempdir(), f"fusewright-large-tests-{os.getuid()}.lock")
# So many that two kernels seldom share one.
COMPILE_LOCKS = 1024
# Modules imported since the last time that make it worth a second to look past what they hold.
MANY_MODULES = 300
CACHED = type(functools.cache(len))
# When the garbage collector begins: tracing makes a million objects, and few of them are cycles.
THRESHOLDS = 50_000, 20, 20
# How many modules the garbage collector looks past.
frozen_modules = 0
# The modules of launches that are watched, by name, when there were so many modules.
watched: dict[str, ModuleType] = {}
looked_through = 0
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes minutes; left out unless asked for with -m")
    config.addinivalue_line(
        "markers", "sampled: but for as few cases as have every value of its parameters, slow"
    )
    config.addinivalue_line("markers", "large: holds gigabytes of the GPU; one at a time")
    # The packages' plans keep what allocates their memory: it is poisoned before any plan is made,
    # for the whole run.
    guards = torch._C._dynamo.guards
    # A default device knows functions that allocate by what they are when it first looks.
    _device._device_constructors()
    for name in ("_empty_strided_cpu", "_empty_strided_cuda"):
        setattr(guards, name, poisoned(getattr(guards, name)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Importing makes a million objects and drops few: nothing for the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        # On a GPU what a cycle holds may be memory of the GPU.
        if not HAS_GPU:
            gc.set_threshold(*THRESHOLDS)


# Before pytest looks at marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("-m")
    mark_samples(items)
    # A test of the suite that is asked of none of a package's operations.
    items[:] = [item for item in items if "[NOTSET" not in item.name]
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow; ask for it with -m slow"))


def mark_samples(items: list[pytest.Item]) -> None:
    """Of each test that is sampled, have the cases be slow but for a few."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for some in cases.values():
        kept = sample_of(some)
        for item in some:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def sample_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """So few cases of a test that each value of its parameters is in one; of a parameter that has
    many, one value in SAMPLE. The cases' names decide among equal ones, so that they are the same
    in every run.
    """
    left = sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))
    wanted = wanted_of(left)
    kept = []
    while left and (wanted or not kept):
        most = max(left, key=lambda item: len(values_of(item) & wanted))
        left.remove(most)
        kept.append(most)
        wanted -= values_of(most)
    return kept


def wanted_of(cases: list[pytest.Item]) -> set[tuple[str, int]]:
    """The values that some case is to have."""
    found: dict[str, dict[tuple[str, int], None]] = defaultdict(dict)
    for item in cases:
        for value in values_of(item):
            found[value[0]][value] = None
    return {
        value
        for values in found.values()
        for value in list(values)[: None if len(values) <= MANY else -(-len(values) // SAMPLE)]
    }


def values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """Of each parameter of a case, by name, its value, which all cases that have it share."""
    called = getattr(item, "callspec", None)
    return set() if called is None else {(name, id(x)) for name, x in called.params.items()}


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Test ids spell sizes and dtypes: ``rows3-cols100-bfloat16``, ``3x5x700``."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, int) and not isinstance(val, bool):
        return f"{argname}{val}"
    if isinstance(val, tuple) and val and all(isinstance(length, int) for length in val):
        return "x".join(map(str, val))
    return None


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers whatever ran before it."""
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        # torch.manual_seed writes its callers down three times, for GPUs that may come.
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=not HAS_GPU)
def quicker_interpreter() -> Iterator[None]:
    """Triton's interpreter without what it does again and again to no end."""
    from . import interpreter

    with interpreter.quicker():
        yield


@pytest.fixture(scope="session", autouse=HAS_GPU)
def kernels_compiled_once() -> Iterator[None]:
    """Processes that want one kernel at one time compile it once: the others wait and read it from
    Triton's cache. Tests of one operation start side by side, and compiling is most of their time.
    """
    import triton.compiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.compiler, "compile", one_at_a_time(triton.compiler.compile))
        yield


def one_at_a_time(compile, folder: pathlib.Path = LOCK.parent):
    """A ``triton.compile`` that no two processes are in for equal kernels. Triton looks into its
    cache when it has begun.
    """

    def compile_alone(src, target=None, options=None, **others):
        kernel = src.hash() if hasattr(src, "hash") else str(src)
        number = zlib.crc32(f"{kernel} {target} {options}".encode()) % COMPILE_LOCKS
        with alone(folder / f"fusewright-compile-{os.getuid()}-{number}.lock"):
            return compile(src, target=target, options=options, **others)

    return compile_alone


@pytest.fixture(autouse=True)
def launches_of_one_kind() -> None:
    """A launch keeps the kernel that it compiled first, and a GPU would read tensors of another
    kind as those: a plan that is kept under too short a key fails here, where nothing is compiled.
    """
    watch_launches()


def watch_launches() -> None:
    """Have all launches of the packages that are imported watched. Going through thousands of
    modules takes milliseconds: where there are as many as before, and the watched ones are still
    these, there are no others.
    """
    global looked_through
    same = all(sys.modules.get(name) is module for name, module in watched.items())
    if same and len(sys.modules) == looked_through:
        return
    looked_through = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name.startswith("fusewright.") and name.endswith("._core.launches"):
            watched[name] = module
            launch = module.Launch
            if not hasattr(launch.__call__, "__wrapped__"):
                launch.__call__ = of_one_kind(launch.__call__)


def of_one_kind(call):
    @functools.wraps(call)
    def call_of_one_kind(launch, tensors, floats=(), described=()):
        bases = [x.base for x in described]
        kind = (
            *((x.dtype, x.shape, x.stride()) for x in bases),
            *(None if x is None else x.dtype for x in tensors),
        )
        first = launch.__dict__.setdefault("first_kind", kind)
        assert first == kind, f"{launch.kernel} was launched for {first}, and then for {kind}"
        return call(launch, tensors, floats, described)

    return call_of_one_kind


@pytest.fixture(autouse=not HAS_GPU)
def modules_left_alone() -> None:
    """The garbage collector looks past what imported modules hold, a million objects, which it went
    through at each of its full collections.
    """
    global frozen_modules
    if len(sys.modules) > frozen_modules + MANY_MODULES:
        frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No launch planned before the test, and none of its own kept: for tests that change tables."""
    forget_plans()
    yield
    forget_plans()


def forget_plans() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("fusewright."):
            for function in vars(module).values():
                if type(function) is CACHED and function.__name__.endswith("_plan"):
                    function.cache_clear()


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run in several processes on one GPU. Those marked large hold their memory one at a
    time; any other may take MOST_GPU_MEMORY beside what is there when it begins. Each gives back
    what it held, but for what its fixtures and a failure's traceback hold until the next begins.
    """
    large = request.node.get_closest_marker("large") is not None
    with alone() if large else nullcontext():
        if HAS_GPU:
            give_back_memory()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
        yield
        if HAS_GPU:
            taken = torch.cuda.max_memory_reserved() - before
            give_back_memory()
            if not large and taken > MOST_GPU_MEMORY:
                pytest.fail(f"took {taken / 2**30:.1f} GiB of the GPU's memory: mark it large")


def give_back_memory() -> None:
    if torch.cuda.memory_reserved() > KEPT_GPU_MEMORY:
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def alone(path: pathlib.Path = LOCK) -> Iterator[None]:
    """Wait until no other process of this machine is in here."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Closing the file gives the lock back, also where the process dies.
        yield


@pytest.fixture
def device() -> str:
    """Where the kernels of this run live: the GPU, or the CPU under the interpreter."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN, so that an output that nothing wrote cannot pass for a result."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(allocate):
    def allocate_and_poison(*args, **kwargs):
        fresh = allocate(*args, **kwargs)
        # Traced and meta tensors hold no numbers, and a fill would become a part of the traced
        # graph.
        real = type(fresh) is torch.Tensor and fresh.device.type != "meta"
        if real and fresh.is_floating_point() and not torch.compiler.is_compiling():
            fresh.detach().fill_(float("nan"))
        return fresh

    return allocate_and_poison
