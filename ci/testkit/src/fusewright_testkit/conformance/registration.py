"""Registered ops under torch's own check, each called as the operation and autograd call it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .package import package  # noqa: F401
from .records import OPCHECKS, everything

# Torch's check that traces an op, and its derivative where an operand asks for one.
TRACE = OPCHECKS[-1]


class Calls(TorchDispatchMode):
    """Calls of a namespace's ops, with copies of the operands that ask for the gradients that those
    asked for.
    """

    def __init__(self, namespace: str):
        super().__init__()
        self.namespace, self.calls = namespace, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == self.namespace:
            self.calls.append((func, [copied(x) for x in args]))
        return func(*args, **(kwargs or {}))


def copied(x):
    if not isinstance(x, torch.Tensor):
        return x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach()).requires_grad_(x.requires_grad)


def calls_of(form, namespace, device):
    leaves = form.leaves(form.small, torch.float32, device)
    with Calls(namespace) as found:
        everything(form.kernels, leaves, create_graph=True)
    assert found.calls
    return found.calls


def test_registered_ops_pass_opcheck(form, package, device):  # noqa: F811
    for func, args in calls_of(form, package.namespace, device):
        checks = [check for check in form.opchecks(func.name()) if check != TRACE]
        torch.library.opcheck(func, args, test_utils=checks)
        if func.name().endswith("_backward"):
            torch.library.opcheck(func, without_gradients(args), test_utils=checks)


@pytest.mark.sampled
def test_registered_ops_are_traced(form, package, device):  # noqa: F811
    for func, args in calls_of(form, package.namespace, device):
        if TRACE in form.opchecks(func.name()):
            # As autograd calls it, without a derivative of its own: to trace that takes long.
            once = without_gradients(args) if func.name().endswith("_backward") else args
            torch.library.opcheck(func, once, test_utils=TRACE)


def without_gradients(args):
    """What autograd hands a backward op."""
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in args]


@pytest.mark.slow
def test_derivatives_of_backward_ops_are_traced(form, package, device):  # noqa: F811
    for func, args in calls_of(form, package.namespace, device):
        if func.name().endswith("_backward") and TRACE in form.opchecks(func.name()):
            torch.library.opcheck(func, args, test_utils=TRACE)
