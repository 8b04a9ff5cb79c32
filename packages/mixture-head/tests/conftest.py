"""What the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .operations import MIXTURES, OPERATIONS, HeadOp, Tensors, head_weights, mixtures

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=OPERATIONS)
def op(request: pytest.FixtureRequest) -> HeadOp:
    """Each op of the package."""
    return OPERATIONS[request.param]


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest) -> HeadOp:
    """The mean and the rows of the log-likelihood."""
    return MIXTURES[request.param]


@pytest.fixture(params=["log_sigma", "softplus"])
def scale(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def nll() -> HeadOp:
    return OPERATIONS["mixture_nll"]


@pytest.fixture
def log_likelihood() -> HeadOp:
    return OPERATIONS["mixture_log_likelihood"]


@pytest.fixture
def heads() -> HeadOp:
    return OPERATIONS["grouped_heads"]


@pytest.fixture
def recomputing_heads() -> HeadOp:
    return OPERATIONS["grouped_heads-recompute"]


@pytest.fixture
def draw_mixtures() -> Callable[..., Tensors]:
    return mixtures


@pytest.fixture
def draw_heads() -> Callable[..., Tensors]:
    return head_weights


@pytest.fixture
def values_and_gradients() -> Callable[..., Tensors]:
    """The value of a function of params and y, and the gradients of its sum."""

    def of(call: Callable, params: torch.Tensor, y: torch.Tensor) -> Tensors:
        leaves = [x.detach().clone().requires_grad_() for x in (params, y)]
        value = call(*leaves)
        return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

    return of
