"""Without any one of torch's and Triton's private names calls are right, and one warning says
so.
"""

from __future__ import annotations

import pytest
from fusewright.example._core import internals

# Imports the package in a torch whose module lacks a name, as the core sees it; torch itself keeps
# it. Warnings go into a list; a filter of the test's own would forget which were shown before.
WITHOUT = """
import importlib, sys, warnings
import torch

class Lacking:
    def __init__(self, whole, name):
        self.whole, self.name = whole, name

    def __getattr__(self, name):
        if name == self.name:
            raise AttributeError(name)
        return getattr(self.whole, name)

whole_import = importlib.import_module

def lacking_import(module, package=None):
    whole = whole_import(module, package)
    return Lacking(whole, {name!r}) if module == {module!r} else whole

ours = []
warnings.showwarning = lambda message, *_: "fusewright" in str(message) and ours.append(message)
importlib.import_module = lacking_import
from fusewright.example import scale
importlib.import_module = whole_import
"""
# Outputs and both gradients, of the kernels and of the reference.
CALLS = """
x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)

def check(call):
    y = call(x)
    assert y.tolist() == [0.5, -1.0, 1.5], y
    (dx,) = torch.autograd.grad(y, x, torch.tensor([1.0, 2.0, 4.0]), create_graph=True)
    assert dx.tolist() == [0.5, 1.0, 2.0], dx

for backend in ("triton", "reference"):
    call = lambda x: scale(x, 0.5, backend=backend)
    check(call)
    with torch.no_grad():
        assert call(x).tolist() == [0.5, -1.0, 1.5]
    dy = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(call(x), x, dy, create_graph=True)
    (ddy,) = torch.autograd.grad(dx, dy, torch.ones(3))
    assert ddy.tolist() == [0.5, 0.5, 0.5]
"""
COMPILED = (
    "call = lambda x: scale(x, 0.5, backend='triton')\n"
    "check(torch.compile(call, fullgraph=True, backend='aot_eager'))\n"
)
NAMES = (*internals.REGISTRATION, *internals.LAYERS, *internals.LAUNCHES)


def without(module: str, name: str) -> str:
    return WITHOUT.replace("{name!r}", repr(name)).replace("{module!r}", repr(module))


def test_nothing_is_missing_in_the_torch_that_is_tested():
    assert [name for name, found in internals.FOUND.items() if found is None] == []
    assert internals.REGISTERS_AUTOGRAD


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda text: text)
def test_without_a_name_calls_and_gradients_are_right_and_one_warning_names_it(
    run_python, module, name
):
    told = run_python(without(module, name) + CALLS + "print(*ours, sep='\\n')")
    (line,) = told.splitlines()
    assert f"{module}.{name}" in line


def test_without_a_name_of_registration_compiled_calls_are_right(run_python):
    run_python(without(*internals.REGISTRATION[0]) + CALLS + COMPILED)


def test_without_a_name_of_registration_transforms_raise(run_python):
    module, name = internals.REGISTRATION[0]
    run_python(
        without(module, name) + "total = lambda x: scale(x, 0.5, backend='triton').sum()\n"
        "try:\n    torch.func.grad(total)(torch.ones(3))\n"
        "except RuntimeError as error:\n    assert 'setup_context' in str(error), error\n"
        "else:\n    raise AssertionError('a transform of the kernels passed without a word')\n"
    )


def test_without_a_name_of_registration_forward_mode_raises(run_python):
    module, name = internals.REGISTRATION[0]
    run_python(
        without(module, name) + "from torch.autograd import forward_ad\n"
        "with forward_ad.dual_level(), torch.no_grad():\n"
        "    x = forward_ad.make_dual(torch.ones(3), torch.ones(3))\n"
        "    try:\n        scale(x, 0.5, backend='triton')\n"
        "    except (RuntimeError, NotImplementedError) as error:\n        pass\n"
        "    else:\n        raise AssertionError('a tangent was dropped without a word')\n"
    )


def test_two_packages_warn_once(run_python):
    """Each package has its own copy of the core."""
    module, name = internals.REGISTRATION[0]
    second = (
        "import pathlib, tempfile\n"
        "import fusewright.example._core as core\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "(folder / 'fusewright/second').mkdir(parents=True)\n"
        "here = pathlib.Path(core.__file__).parent\n"
        "(folder / 'fusewright/second/_core').symlink_to(here)\n"
        "sys.path.append(str(folder))\n"
        "importlib.import_module = lacking_import\n"
        "from fusewright.second._core import internals, registration\n"
        "importlib.import_module = whole_import\n"
        "assert internals.FOUND[{name!r}] is None\n"
        "assert registration.NAMESPACE == 'fusewright_second'\n"
    ).replace("{name!r}", repr(name))
    told = run_python(without(module, name) + second + "print(len(ours))")
    assert told.strip() == "1"


def test_hooks_of_a_triton_without_them_are_none(monkeypatch):
    class Bare:
        runtime = object()

    monkeypatch.setattr(internals.importlib, "import_module", lambda name: Bare)
    internals.launch_hooks.cache_clear()
    with pytest.warns(RuntimeWarning, match="launch_enter_hook"):
        assert internals.launch_hooks() is None
    internals.launch_hooks.cache_clear()


@pytest.mark.parametrize("name", internals.COMPILED_KERNEL)
def test_a_compiled_kernel_that_lacks_a_name_is_not_run_again(name):
    class Compiled:
        run = function = packed_metadata = None

    assert internals.can_rerun(Compiled())
    delattr(Compiled, name)
    with pytest.warns(RuntimeWarning, match=name):
        assert not internals.can_rerun(Compiled())


def test_launcher_of_a_kernel_that_lacks_a_name_is_left_to_the_load():
    with pytest.warns(RuntimeWarning, match="launcher_cls"):
        internals.build_launcher(object())
