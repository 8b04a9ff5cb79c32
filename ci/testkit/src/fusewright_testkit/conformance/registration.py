"""Registered ops under torch's own check, each called as the operation and autograd call it."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .package import package  # noqa: F401
from .records import everything


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


def test_registered_ops_pass_opcheck(form, package, device):  # noqa: F811
    leaves = form.leaves(form.small, torch.float32, device)
    with Calls(package.namespace) as found:
        everything(form.kernels, leaves, create_graph=True)
    assert found.calls
    for func, args in found.calls:
        torch.library.opcheck(func, args, test_utils=form.opchecks(func.name()))
