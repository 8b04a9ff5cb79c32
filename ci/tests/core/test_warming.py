"""A warm-up compiles what a function launches, side by side, runs none of it, and leaves no trace
but the kernels.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from fusewright.example import scale, warm_up
from fusewright.example._core import launches, warming
from fusewright.example.elementwise.scale import _scale

# Forward and backward of one size in fp32 and in bf16: two kernels, in a process that compiles for
# a GPU that is not there. Prints how many kernels a warm-up found, and what the compiler is asked
# for later.
FOR_A_GPU = """
import sys, torch, triton
from fusewright_testkit.compiled import Driver
from triton.runtime import driver

driver.set_active(Driver(90))
found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append(cache_hit)

from fusewright.example import scale, warm_up
from fusewright.example._core import backends, launches
from fusewright.example.elementwise import scale as module
from fusewright.example.elementwise.scale import _scale

backends.known_obstacle.cache_clear()
module.uses_triton = lambda x, backend: True
_scale.on_cpu = _scale.on_cuda
_scale.inference[False] = _scale.on_cuda


def both(x, y):
    return scale(x, 3.0), scale(y, 3.0)


x = torch.ones(64, requires_grad=True)
inputs = x, x.detach().bfloat16().requires_grad_()
print(warm_up(both, *inputs), found)
found.clear()
print(warm_up(both, *inputs), found)
"""


@pytest.fixture
def compiled_for_a_gpu(run_python, tmp_path):
    """The lines that a process prints whose Triton is not the interpreter, and whose cache is the
    test's.
    """
    cached = (
        "import os\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        f"os.environ['TRITON_CACHE_DIR'] = {str(tmp_path)!r}\n"
    )
    return lambda code: run_python(cached + code).splitlines()


def test_warm_up_fills_the_cache_of_this_process_and_of_later_ones(compiled_for_a_gpu, tmp_path):
    first, again = compiled_for_a_gpu(FOR_A_GPU)
    assert (first, again) == ("2 [False, False]", "2 []")
    assert len([*tmp_path.rglob("scale_kernel.cubin")]) == 2
    assert compiled_for_a_gpu(FOR_A_GPU) == ["2 [True, True]", "2 []"]


def test_kernels_are_compiled_side_by_side(compiled_for_a_gpu):
    """Each waits, when it has begun, for the other to have begun."""
    meeting = (
        "import threading, triton.compiler\n"
        "compile, meeting = triton.compiler.compile, threading.Barrier(2)\n"
        "def compile_together(*args, **options):\n"
        "    meeting.wait(timeout=60)\n"
        "    return compile(*args, **options)\n"
        "triton.compiler.compile = compile_together\n"
    )
    code = FOR_A_GPU.replace("warm_up(both, *inputs)", "warm_up(both, *inputs, threads=2)", 1)
    assert compiled_for_a_gpu(meeting + code)[0] == "2 [False, False]"


# Two launches on a GPU that is not there, of which torch is told what there is.
ON_A_GPU = """
import contextlib, torch
from fusewright_testkit.compiled import Driver
from triton.runtime import driver
gpu = Driver(90)
driver.set_active(gpu)
torch.cuda.device = lambda index: contextlib.nullcontext()
torch.cuda.is_current_stream_capturing = lambda: False
from fusewright.example import warm_up
from fusewright.example._core import launches
from fusewright.example.elementwise import kernels
launches._current_stream = lambda index: 0
device, a = torch.device('cuda', 0), torch.ones(64)
first, second, third = (
    launches.Launch(kernels.scale_kernel, (3,), device, (64,), dict(num_warps=4), BLOCK=block)
    for block in (64, 128, 256)
)
def function(*some):
    launches.launch_in_order(*(launches.LaunchCall(x, (a, a), (2.0,)) for x in some))
"""


def test_each_kernel_has_the_launcher_that_was_made_for_it(compiled_for_a_gpu):
    """Where all launchers are one module, filled in by the last that was imported, as in triton
    3.6. Two threads that import at one time meet before they read theirs.
    """
    code = (
        f"{ON_A_GPU}"
        "import functools, os, threading\n"
        "os.cpu_count = lambda: 2\n"
        "meeting, module = threading.Barrier(2), threading.Event()\n"
        "def launched(kernel, *args):\n"
        "    pass\n"
        "def make(source, metadata):\n"
        "    module.launch = functools.partial(launched, metadata.hash)\n"
        "    try:\n"
        "        meeting.wait(timeout=1.0)\n"
        "    except threading.BrokenBarrierError:\n"
        "        meeting.reset()\n"
        "    return module.launch\n"
        "gpu.launcher_cls = make\n"
        "function(first, second)\n"
        "print([x.compiled.run.args == (x.compiled.metadata.hash,) for x in (first, second)])\n"
    )
    assert compiled_for_a_gpu(code) == ["[True, True]"]


def test_launches_that_have_run_do_not_run_in_a_warm_up_and_do_after_it(compiled_for_a_gpu):
    """Straight to the compiled kernel, as on a GPU."""
    code = (
        f"{ON_A_GPU}"
        "def function(*some):\n"
        "    launches.launch_in_order(*(launches.LaunchCall(x, (a, a), (2.0,)) for x in some))\n"
        "    print(len(gpu.ran), [x.compiled is not None for x in some])\n"
        "function(first, second)\n"
        "function(first, second)\n"
        "print(warm_up(function, first, third))\n"
        "function(first, third)\n"
    )
    assert compiled_for_a_gpu(code) == [
        "2 [True, True]",
        "4 [True, True]",
        "4 [True, False]",
        "2",
        "6 [True, True]",
    ]


def test_kernel_that_does_not_compile_is_told_of_and_leaves_the_next_call_alone(compiled_for_a_gpu):
    code = FOR_A_GPU.partition("print(")[0] + (
        "from fusewright.example.elementwise import launch\n"
        "launch.SCALE = launch.SCALE._replace(block=1000)\n"
        "try:\n"
        "    warm_up(both, *inputs)\n"
        "except Exception as error:\n"
        "    print('power of 2' in str(error))\n"
        "launch.scale_plan.cache_clear()\n"
        "launch.SCALE = launch.SCALE._replace(block=1024)\n"
        "print(warm_up(both, *inputs))\n"
    )
    assert compiled_for_a_gpu(code) == ["True", "2"]


def test_without_tritons_pool_one_kernel_is_compiled_after_the_other(compiled_for_a_gpu):
    code = (
        "import triton, warnings\n"
        "del triton.AsyncCompileMode\n"
        "warned = warnings.catch_warnings(record=True).__enter__()\n"
        "warnings.simplefilter('always')\n"
        f"{FOR_A_GPU}"
        "print(['lacks a private name' in str(x.message) for x in warned])\n"
    )
    lines = compiled_for_a_gpu(code)
    assert lines == ["2 [False, False]", "2 []", "[True, True]"]


@dataclass
class Output:
    y: torch.Tensor


def test_nothing_runs_and_what_is_returned_meanwhile_is_zeros():
    x = torch.ones(5, requires_grad=True)
    seen, gradients = [], []

    def function(x):
        y = scale(x, 3.0, backend="triton")
        y.register_hook(gradients.append)
        with torch.no_grad():
            seen.extend([y.clone(), scale(x, 3.0, backend="triton")])
        return {"all": [Output(scale(y, 2.0, backend="triton"))], "beside": None}

    assert warm_up(function, x) == 0
    assert all(torch.equal(y, torch.zeros(5)) for y in (*seen, *gradients))
    assert len(gradients) == 1
    assert x.grad is None
    assert torch.equal(scale(x, 3.0, backend="triton"), torch.full((5,), 3.0))


def test_backward_pass_is_left_out_where_it_is_not_asked_for():
    gradients = []

    def function(x):
        y = scale(x, 3.0, backend="triton")
        y.register_hook(gradients.append)
        return y

    x = torch.ones(5, requires_grad=True)
    warm_up(function, x, backward=False)
    with torch.no_grad():
        warm_up(lambda: scale(x, 3.0, backend="triton"))
    assert gradients == []
    warm_up(function, x)
    assert len(gradients) == 1


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(5))
        self.weight = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        self.calls += 1
        self.last = torch.nn.functional.dropout(scale(x * self.weight, 2.0, backend="triton"))
        return self.last


def test_buffers_random_numbers_and_gradients_are_afterwards_as_they_were():
    model = Model()
    last, state = model.last, torch.get_rng_state()
    warm_up(model, torch.ones(5))
    assert model.last is last
    assert model.calls == 0
    assert torch.equal(last, torch.zeros(5))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.weight.grad is None


@pytest.mark.parametrize("called", [False, True], ids=["called", "called-in-inference"])
@pytest.mark.parametrize("made", [False, True], ids=["made", "made-in-inference"])
@pytest.mark.parametrize("shape", [(5,), (4, 5)], ids=["whole", "expanded"])
def test_buffers_of_any_memory_are_kept(shape, made, called):
    model = Model()
    with torch.inference_mode(made):
        model.register_buffer("other", torch.ones(5).expand(shape))
    other = model.other
    with torch.inference_mode(called):
        warm_up(model, torch.ones(5))
    assert model.other is other
    assert other.eq(1).all()


def test_operand_that_a_launcher_returns_keeps_its_numbers():
    x = torch.ones(5)
    launcher = warming.zeros_of(lambda x: (x.view(5, 1), None, torch.ones(2)))
    with launches.compilations([]):
        y, _, z = launcher(x)
    assert torch.equal(x, torch.ones(5))
    assert torch.equal(z, torch.zeros(2))
    assert torch.equal(launcher(x)[2], torch.ones(2))
    assert y.data_ptr() == x.data_ptr()


def test_other_threads_compute_meanwhile():
    found = []

    def function(x):
        thread = threading.Thread(target=lambda: found.append(scale(x, 3.0, backend="triton")))
        thread.start()
        thread.join()
        return scale(x, 3.0, backend="triton")

    warm_up(function, torch.ones(5))
    assert torch.equal(found[0], torch.full((5,), 3.0))


def test_function_that_raises_leaves_no_trace():
    before = _scale.on_cuda, _scale.on_cpu, _scale.inference

    def function(x):
        scale(x, 3.0, backend="triton")
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        warm_up(function, torch.ones(5))
    assert (_scale.on_cuda, _scale.on_cpu, _scale.inference) == before
    assert launches.compiling.wanted is None
    assert torch.equal(scale(torch.ones(2), 3.0, backend="triton"), torch.full((2,), 3.0))
    assert warm_up(lambda x: scale(x, 3.0, backend="triton"), torch.ones(5)) == 0


def test_reference_computes_where_it_serves():
    found = []
    warm_up(lambda x: found.append(scale(x, 3.0, backend="reference")), torch.ones(5))
    assert torch.equal(found[0], torch.full((5,), 3.0))


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (TypeError, "function must be callable, got Tensor", (torch.ones(2),), {}),
        (ValueError, "threads must be at least 1, got 0", (print,), dict(threads=0)),
        (TypeError, "threads must be a whole number, got float", (print,), dict(threads=1.5)),
    ],
)
def test_bad_input_is_told_of_before_anything_is_called(error, message, arguments, options, capsys):
    with pytest.raises(error, match=message):
        warm_up(*arguments, **options)
    assert capsys.readouterr().out == ""


def test_without_triton_nothing_is_called(monkeypatch):
    monkeypatch.setattr(warming, "has_triton", lambda: False)
    called = []
    assert warm_up(called.append, 1) == 0
    assert called == []


def test_every_packages_copy_takes_part(monkeypatch):
    # Of a package, and of a build of one that a library loaded under a name of its own.
    ours = ("fusewright.a_b._core.warming", "_fusewright_a_b_cpu_0123._core.warming")
    others = ("fusewright.a_b._core.warmings", "other._core.warming")
    for name in (*ours, *others):
        monkeypatch.setitem(sys.modules, name, warming)
    found = warming.copies()
    assert found.count(warming) == 3
