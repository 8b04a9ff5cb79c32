from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from torch import Tensor

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

SMALL = TransformerNPConfig(
    x_width=3, width=16, layers=3, heads=2, feed_forward_width=21, components=4
)


@pytest.fixture
def small() -> Callable[..., TransformerNP]:
    """A model of three layers, fields of its config changed by name."""

    def make(*, backend: str = "reference", dtype: torch.dtype = torch.float32, **changes):
        return TransformerNP(replace(SMALL, **changes), backend=backend).to(dtype)

    return make


@pytest.fixture
def rows() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """x_context, y_context, x_target, y_target, drawn from a normal distribution."""

    def make(batch: int, context: int, targets: int, *, dtype=torch.float32, y_width: int = 1):
        shapes = (
            (batch, context, SMALL.x_width),
            (batch, context, y_width),
            (batch, targets, SMALL.x_width),
            (batch, targets, y_width),
        )
        return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)

    return make


@pytest.fixture
def assert_same_but_for_rounding() -> Callable[..., None]:
    """Two orders of the same fp64 sums: apart by no more than one rounding per term.

    The longest path through the small model sums fewer than 2^10 products, forward and backward
    together, and so do the oracles of the data; where these solve equations, a rounding grows by up
    to the condition number of the matrix. Errors are relative to the largest value of the sequence
    (all gradients of one loss), since single ones cancel: the query's gradient under one key is
    exactly zero.
    """

    def check(values: Sequence[Tensor], expected: Sequence[Tensor], condition: float = 1.0) -> None:
        largest = max(float(e.detach().abs().max()) for e in expected)
        bound = 2**10 * torch.finfo(torch.float64).eps * condition * largest
        for value, e in zip(values, expected, strict=True):
            assert value.shape == e.shape
            assert value.dtype == e.dtype == torch.float64
            assert (value - e).abs().max() <= bound

    return check
