"""A planned launch repeats the compiled kernel, and goes through Triton where it may not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fusewright.example._core import launches
from fusewright.example._core.launches import (
    Launch,
    LaunchCall,
    allocate,
    allocator,
    cdiv,
    contiguous_strides,
    contiguous_where,
    is_current,
    launch_in_order,
    layouts,
)
from fusewright_testkit import tune

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Compiled:
    """In the place of Triton's compiled kernel."""

    function, packed_metadata = "function", "m"


class Kernel:
    """Notes which way each launch takes, in the place of a jitted function."""

    def __init__(self):
        self.dispatched, self.repeated, self.warmed = [], [], []
        self.compiled = Compiled()
        self.compiled.run = lambda *args: self.repeated.append(args)

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.dispatched.append((grid, args, options))
            return self.compiled

        return launch

    def warmup(self, *args, grid, **options):
        self.warmed.append((grid, args, options))
        # Launched before both are compiled, it would have been dispatched.
        assert self.dispatched == []
        return SimpleNamespace(result=lambda: self.compiled)


@pytest.fixture
def hooks(monkeypatch):
    """Triton's launch hooks, and torch's current stream, on a machine that may have neither."""
    enter, leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
    monkeypatch.setattr(launches, "launch_hooks", lambda: (enter, leave))
    monkeypatch.setattr(launches, "_current_stream", lambda index: f"stream {index}")
    return enter, leave


def planned(kernel: Kernel, device: torch.device = CUDA) -> Launch:
    return Launch(kernel, (3,), device, (7, 8), dict(num_warps=4), BLOCK=16)


def test_second_launch_goes_straight_to_the_compiled_kernel(hooks):
    kernel, x = Kernel(), torch.ones(4)
    launch = planned(kernel)
    launch((x, None), (0.5,))
    assert kernel.dispatched == [((3, 1, 1), (x, None, 0.5, 7, 8), dict(BLOCK=16, num_warps=4))]
    launch((x, None), (0.5,))
    assert len(kernel.dispatched) == 1
    at = x.data_ptr()
    first = (3, 1, 1, "stream 0", "function", "m", None, None, None, at, None, 0.5, 7, 8, 16)
    assert kernel.repeated == [first]


def test_unaligned_tensor_goes_through_triton_and_is_not_kept(hooks):
    kernel, x = Kernel(), torch.ones(9)
    launch = planned(kernel)
    unaligned = x[1:]
    launch((unaligned,))
    assert launch.compiled is None
    launch((x,))
    launch((unaligned,))
    assert (len(kernel.dispatched), len(kernel.repeated)) == (3, 0)


@pytest.mark.parametrize("which", [0, 1], ids=["enter", "exit"])
def test_launch_with_a_hook_goes_through_triton(hooks, which):
    kernel, x = Kernel(), torch.ones(4)
    launch = planned(kernel)
    launch((x,))
    hooks[which].calls.append(print)
    launch((x,))
    hooks[which].calls.clear()
    launch((x,))
    assert (len(kernel.dispatched), len(kernel.repeated)) == (2, 1)


def test_launch_for_the_interpreter_goes_through_triton(hooks):
    kernel, x = Kernel(), torch.ones(4)
    launch = planned(kernel, CPU)
    launch((x,))
    launch((x,))
    assert (len(kernel.dispatched), len(kernel.repeated)) == (2, 0)


@pytest.mark.parametrize("missing", ["stream", "hooks", "run"])
def test_without_a_private_name_every_launch_goes_through_triton(hooks, monkeypatch, missing):
    kernel, x = Kernel(), torch.ones(4)
    if missing == "stream":
        monkeypatch.setattr(launches, "_current_stream", None)
    elif missing == "hooks":
        monkeypatch.setattr(launches, "launch_hooks", lambda: None)
    else:
        del kernel.compiled.run
        monkeypatch.setattr(launches, "can_rerun", lambda compiled: False)
    launch = planned(kernel)
    launch((x,))
    launch((x,))
    assert (len(kernel.dispatched), len(kernel.repeated)) == (2, 0)


def test_launch_that_a_hook_of_triton_prevents_keeps_no_kernel(hooks):
    kernel, x = Kernel(), torch.ones(4)
    compiled, kernel.compiled = kernel.compiled, None
    launch = planned(kernel)
    launch((x,))
    kernel.compiled = compiled
    launch((x,))
    launch((x,))
    assert (len(kernel.dispatched), len(kernel.repeated)) == (2, 1)


def called_in_order(monkeypatch, device=CUDA, launched=None):
    """A function of two launches, and their kernels; one of them may have been launched before."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launches, "load", lambda wanted: loaded.append(wanted))
    loaded, kernels, x = [], (Kernel(), Kernel()), torch.ones(4)
    planned_launches = [planned(kernel, device) for kernel in kernels]
    if launched is not None:
        planned_launches[launched].keep(kernels[launched].compiled)

    def call():
        first, second = planned_launches
        launch_in_order(LaunchCall(first, (x,)), LaunchCall(second, (x, None), (0.5,)))

    return call, kernels, loaded


def test_kernels_of_a_first_call_are_compiled_and_loaded_before_the_first_is_launched(
    hooks, monkeypatch
):
    call, (first, second), loaded = called_in_order(monkeypatch)
    for times in (1, 2):
        call()
        assert [len(kernel.warmed) for kernel in (first, second)] == [1, 1]
        assert [len(kernel.dispatched) for kernel in (first, second)] == [1, 1]
        assert [len(kernel.repeated) for kernel in (first, second)] == [times - 1] * 2
    assert first.warmed == first.dispatched
    assert second.warmed == second.dispatched
    assert {wanted.kernel for wanted in loaded} == {first.compiled, second.compiled}
    assert {wanted.device_index for wanted in loaded} == {0}


def test_kernel_that_another_thread_has_launched_runs_in_its_turn_alone(hooks, monkeypatch):
    call, (_, second), _ = called_in_order(monkeypatch, launched=1)
    call()
    assert (len(second.dispatched), len(second.repeated)) == (0, 1)


def test_tuner_keeps_each_launch_of_a_first_call_once(hooks, monkeypatch):
    call, _, _ = called_in_order(monkeypatch)
    with tune.kept_calls(()) as calls:
        call()
    assert len(calls) == 2


def test_kernels_that_are_interpreted_or_captured_are_not_compiled_side_by_side(hooks, monkeypatch):
    call, (first, second), _ = called_in_order(monkeypatch, CPU)
    call()
    assert (first.warmed, len(first.dispatched), len(second.dispatched)) == ([], 1, 1)
    call, (first, second), _ = called_in_order(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call()
    assert (first.warmed, len(first.dispatched), len(second.dispatched)) == ([], 1, 1)


def test_kernels_of_another_device_are_not_compiled_beside_those_of_the_first(hooks):
    kernels, x, wanted = (Kernel(), Kernel()), torch.ones(4), []
    with launches.compilations(wanted):
        for index, kernel in enumerate(kernels):
            planned(kernel, torch.device("cuda", index))((x,))
    assert [len(kernel.warmed) for kernel in kernels] == [1, 0]
    assert [len(kernel.dispatched) for kernel in kernels] == [0, 0]
    assert [one.device_index for one in wanted] == [0]


@pytest.mark.parametrize("fast", [True, False], ids=["compilers", "torch.empty"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)], ids=str)
def test_allocator_gives_contiguous_tensors(monkeypatch, shape, fast):
    if not fast:
        monkeypatch.setattr(launches, "FOUND", {})
    x = allocator(shape, torch.bfloat16, CPU)()
    assert (x.shape, x.dtype, x.device) == (shape, torch.bfloat16, CPU)
    assert x.is_contiguous()


def test_nothing_is_allocated_where_nothing_is_planned():
    assert allocate(None) is None
    assert allocate(allocator((2,), torch.float32, CPU)).shape == (2,)


def test_layouts_are_dtypes_strides_and_absences():
    x = torch.ones(3, 4, dtype=torch.float16).T
    assert layouts(x, None) == ((torch.float16, (1, 4)), None)


def test_operands_are_copied_where_a_plan_says_so():
    x, y = torch.ones(3, 4).T, torch.ones(3, 4).T
    a, b, c = contiguous_where((x, y, None), (True, False, True))
    assert a.is_contiguous()
    assert torch.equal(a, x)
    assert b is y
    assert c is None


def test_strides_of_contiguous_shapes_and_counts_of_blocks():
    for shape in ((), (3,), (2, 5, 7)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert is_current(CPU)
