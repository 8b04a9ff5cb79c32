"""sinkhorn_knopp in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Every step is computed in fp32 (in fp64 for fp64 inputs) and the result rounded once. The backward
pass stands here for the derivative of the op, first and second.
"""

from __future__ import annotations

import math

import torch

from .._core.precision import wide

# In the linear domain of sinkhorn_knopp an element so far below its row's maximum is zero: fp32
# could hold it, but not in full precision through the steps that follow.
LOWEST_LOGIT = -70.0


def sinkhorn_knopp(
    x: torch.Tensor, iterations: int, eps: float, domain: str = "linear"
) -> torch.Tensor:
    """exp(x), its rows and then its columns divided by their sums, ``iterations`` times over."""
    *_, logs = sinkhorn_steps(x, iterations, eps, domain)
    return logs.exp().to(x.dtype).contiguous()


def sinkhorn_steps(x: torch.Tensor, iterations: int, eps: float, domain: str) -> list[torch.Tensor]:
    """The logarithms of the matrices after each step, rows and columns in turn.

    In logarithms in the linear domain too, whose step M / (sum(M) + eps) is L - log(sum(exp(L)) +
    eps): the derivatives of that divide by nothing.
    """
    x = wide(x)
    if domain == "linear" and x.shape[-1]:
        x = x.masked_fill(x - x.amax(-1, keepdim=True) < LOWEST_LOGIT, -math.inf)
    logs = torch.log_softmax(x, -1)
    steps = [logs]
    for step in range(1, 2 * iterations):
        axis = axis_of(step)
        if domain == "linear":
            sums = (logs.exp().sum(axis, keepdim=True) + eps).log()
        else:
            sums = logs.logsumexp(axis, keepdim=True)
        logs = logs - sums
        steps.append(logs)
    return steps


def sinkhorn_knopp_backward(
    dy: torch.Tensor, x: torch.Tensor, iterations: int, eps: float, domain: str
) -> torch.Tensor:
    """dx of sinkhorn_knopp, back through every step."""
    steps = [logs.exp() for logs in sinkhorn_steps(x, iterations, eps, domain)]
    grad = wide(dy) * steps[-1]
    for step in reversed(range(2 * iterations)):
        grad = grad - steps[step] * grad.sum(axis_of(step), keepdim=True)
    return grad.to(x.dtype).contiguous()


def axis_of(step: int) -> int:
    """Even steps of sinkhorn_knopp divide rows, odd ones columns."""
    return -2 if step % 2 else -1
