"""The ops of the package as data, so that a property of all of them is tested on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fusewright import mixture_head
from fusewright.mixture_head.common.scale import checked_scale
from fusewright.mixture_head.heads import reference as heads_reference
from fusewright.mixture_head.mixture import reference as mixture_reference
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

Tensors = list[torch.Tensor]
SCALE = dict(scale="log_sigma", log_sigma_range=(-7.0, 5.0), eps=1e-3)


@dataclass(frozen=True)
class HeadOp:
    """One public function of differentiable tensors."""

    name: str
    draw: Callable[..., Tensors]

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return getattr(mixture_head, self.name)(*tensors, **options)

    def kernels(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def reference(
        self, *tensors: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        if self.name == "grouped_heads":
            return heads_reference.grouped_heads(*tensors)
        form = checked_scale(**SCALE | options)
        return getattr(mixture_reference, self.name)(*tensors, mask, **form._asdict())

    def check(self, tensors: Tensors, **options: Any) -> None:
        """Hold the kernels' output and gradients against the yardstick."""
        yardstick = Yardstick(partial(self.reference, **options), tensors)
        yardstick.check(partial(self.kernels, **options))


def mixtures(
    shape: tuple[int, ...] = (6, 5),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    y_dtype: torch.dtype = torch.float32,
) -> Tensors:
    """params ``[*shape, 3]`` and y, all from normal distributions."""
    params = torch.randn(*shape, 3, device=device).to(dtype)
    return [params, (1.5 * torch.randn(shape[:-1], device=device)).to(y_dtype)]


def head_weights(
    shape: tuple[int, ...] = (6, 5),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stored: int = 12,
    heads: int = 2,
) -> Tensors:
    """x ``shape``, and the weights of heads over it."""
    width = shape[-1]
    x = torch.randn(shape, device=device).to(dtype)
    hidden = torch.randn(heads * stored, width, device=device).to(dtype)
    return [x, hidden / max(width, 1) ** 0.5, torch.randn(heads, stored, 3, device=device)]


MIXTURES = {name: HeadOp(name, mixtures) for name in ("mixture_nll", "mixture_log_likelihood")}
OPS = MIXTURES | {"grouped_heads": HeadOp("grouped_heads", head_weights)}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> HeadOp:
    """Each op of the package."""
    return OPS[request.param]


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
    return OPS["mixture_nll"]


@pytest.fixture
def log_likelihood() -> HeadOp:
    return OPS["mixture_log_likelihood"]


@pytest.fixture
def heads() -> HeadOp:
    return OPS["grouped_heads"]


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
