"""Sizes and layouts of operands, what is refused, and which backend serves."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..yardstick import as_tuple
from . import layouts
from .cases import over
from .package import package  # noqa: F401
from .records import everything, is_float, ramp, same_bits

F32, F64 = torch.float32, torch.float64


@pytest.fixture
def backends(package):  # noqa: F811
    """The package's own choice of backends, as it was before anything was said."""
    module = importlib.import_module(f"{package.module}._core.backends")
    known = module.known_obstacle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WARNED", set())
        known.cache_clear()
        yield module
    known.cache_clear()


@over("empty")
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nothing_in_nothing_out(op, sizes, backend, device):
    """Gradients of what is not empty, as of weights, are zeros."""
    leaves = op.leaves(sizes, F32, device)
    found = everything(partial(op.public, backend=backend), leaves)
    expected = everything(op.reference, leaves)
    assert not any(g.any() for g in found[-sum(map(is_float, leaves)) :])
    assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in expected]
    assert same_bits(found, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", layouts.EVERY, ids=lambda layout: layout.__name__)
def test_strides_change_no_bit_and_outputs_are_contiguous(op, layout, device):
    tensors = op.sample(op.strided or op.small, op.low, device)
    strided = [layout(x) if is_float(x) and x.ndim else x for x in tensors]

    def arranged(tensors, arrange):
        leaves = [x.detach().requires_grad_() if is_float(x) else x for x in tensors]
        outputs = as_tuple(op.kernels(*leaves))
        upstream = [layout(ramp(y)) if y.ndim else ramp(y) for y in outputs if y.requires_grad]
        assert all(y.is_contiguous() for y in outputs)
        return everything(lambda *_: outputs, leaves, [arrange(g) for g in upstream])

    contiguous = [x if x is None else x.contiguous() for x in strided]
    found, expected = arranged(strided, lambda g: g), arranged(contiguous, torch.Tensor.contiguous)
    assert same_bits(found, expected)
    assert all(y.is_contiguous() for y in as_tuple(op.reference(*strided)))


@pytest.mark.filterwarnings("error")
def test_meta_tensors_get_shapes_and_dtypes(op):
    tensors = op.sample(op.small, op.low, "cpu")
    found = as_tuple(op.public(*(x if x is None else x.to("meta") for x in tensors)))
    expected = as_tuple(op.reference(*tensors))
    assert all(y.is_meta for y in found)
    assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in expected]


class NothingRuns(TorchDispatchMode):
    """Fail at the first operation on a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran before the input was refused")


def test_refused_input_touches_no_memory(op, device):
    """Each operand in turn as a list, of whole numbers, sparse, elsewhere, and too wide."""
    tensors = op.sample(op.small, F32, device)
    for place, x in enumerate(tensors):
        if not is_float(x):
            continue
        wrong = [
            ([1.0], TypeError, "got list"),
            (x.int(), TypeError, "int32"),
        ]
        if x.ndim:
            wrong.append((x.to_sparse(), TypeError, "strided tensor"))
        if place:
            wrong.append((x.to("meta"), ValueError, "got .*meta"))
            wrong.append((F.pad(x, (0, 1)) if x.ndim else x[None], ValueError, "got"))
        for other, error, message in wrong:
            given = [*tensors[:place], other, *tensors[place + 1 :]]
            with NothingRuns(), pytest.raises(error, match=message):
                op.kernels(*given)
    with NothingRuns(), pytest.raises(ValueError, match="got 'cuda'"):
        op.public(*tensors, backend="cuda")


def test_auto_is_the_reference_on_the_cpu(op):
    leaves = op.leaves(op.small, F32, "cpu")
    found, expected = (
        everything(partial(op.public, backend=name), leaves) for name in ("auto", "reference")
    )
    assert same_bits(found, expected)


def test_kernels_take_no_fp64_and_say_so(op, device):
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        op.kernels(*op.sample(op.small, F64, device))


def test_kernels_on_the_cpu_without_the_interpreter_say_so(op, backends, monkeypatch):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        op.kernels(*op.sample(op.small, F32, "cpu"))


def of_any_build():
    """torch without CUDA refuses some of what references do with fake tensors on a GPU."""
    return contextlib.suppress(RuntimeError, AssertionError)


def test_auto_names_the_reason_for_the_reference_once(op, backends, monkeypatch):
    monkeypatch.setattr(backends, "known_obstacle", lambda device, dtype: "no such GPU")
    tensors = op.sample(op.small, F32, "cpu")
    with FakeTensorMode():
        on_gpu = [
            x if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors
        ]
        with pytest.warns(RuntimeWarning, match="no such GPU"), of_any_build():
            op.public(*on_gpu)
        with warnings.catch_warnings(), of_any_build():
            warnings.simplefilter("error")
            op.public(*on_gpu)


@pytest.mark.gpu
def test_auto_takes_the_reference_for_fp64_and_says_so(op, backends):
    tensors = op.sample(op.small, F64, "cuda")
    with pytest.warns(RuntimeWarning, match=r"not torch\.float64"):
        found = as_tuple(op.public(*tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.public(*tensors)
    assert same_bits(found, as_tuple(op.reference(*tensors)))


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused(op):
    *tensors, last = op.sample(op.small, F32, "cuda")
    if not tensors:
        pytest.skip("takes one tensor")
    with pytest.raises(ValueError, match=r"cuda:0.*got.*cpu"):
        op.public(*tensors, last.cpu())
