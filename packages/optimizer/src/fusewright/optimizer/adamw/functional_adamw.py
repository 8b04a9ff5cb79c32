r"""AdamW as functions of trees of tensors, for steps that are themselves differentiated.

    state = init(params)
    updates, state = update(gradients, state, params)
    params = apply(params, updates)

With g the gradient and t the count of steps, the formula of ``AdamW``:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2
    update = -lr wd p - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

Nothing is written in place: gradients pass through steps to gradients, parameters, state and every
number that is a tensor, and torch.func's transforms apply. Where v' is zero, so is the derivative
of its root. Arithmetic is in the tensors' own dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ..common.checks import check_number

Tensor = torch.Tensor
Number = float | Tensor


class AdamWState(NamedTuple):
    """What a step passes on to the next one.

    Attributes:
        step: how many were taken, 0-d fp32.
        exp_avg, exp_avg_sq: trees like the parameters'.
    """

    step: Tensor
    exp_avg: Any
    exp_avg_sq: Any


class FunctionalAdamW(NamedTuple):
    """AdamW whose steps are functions.

    Attributes:
        lr, betas, eps, weight_decay: numbers, or tensors of one, which gradients reach.
        maximize: ascend.
    """

    lr: Number = 1e-3
    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 1e-2
    maximize: bool = False

    def init(self, params: Any) -> AdamWState:
        """The state before the first step.

        Args:
            params: a tree (list, tuple, dict or tensor) of floating tensors.

        Raises:
            ValueError: a number of the optimizer is out of its range.
        """
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, getattr(self, name))
        for place, beta in enumerate(self.betas):
            check_number(f"betas[{place}]", beta, below=1.0)
        zeros = tree_map(torch.zeros_like, params)
        return AdamWState(torch.zeros(()), zeros, tree_map(torch.zeros_like, params))

    def update(self, gradients: Any, state: AdamWState, params: Any) -> tuple[Any, AdamWState]:
        """What a step adds to the parameters, and the state after it.

        Args:
            gradients, params: trees of one form.
            state: of ``init`` or of the step before.
        """
        beta1, beta2 = self.betas
        t = state.step + 1.0
        sign = -1.0 if self.maximize else 1.0
        exp_avg = tree_map(
            lambda m, g: m + (1.0 - beta1) * (sign * g - m), state.exp_avg, gradients
        )
        exp_avg_sq = tree_map(
            lambda v, g: beta2 * v + (1.0 - beta2) * g * g, state.exp_avg_sq, gradients
        )

        def of_tensor(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            # Of the step's count only powers are taken: in fp64, whatever the tensors are in.
            wide = t.to(p.device, torch.float64)
            bias1, bias2 = ((1.0 - beta**wide).to(p.dtype) for beta in self.betas)
            root = safe_root(v / bias2) + self.eps
            return -self.lr * (self.weight_decay * p + m / (bias1 * root))

        updates = tree_map(of_tensor, params, exp_avg, exp_avg_sq)
        return updates, AdamWState(t, exp_avg, exp_avg_sq)

    def apply(self, params: Any, updates: Any) -> Any:
        """The parameters after the step."""
        return tree_map(torch.add, params, updates)


def safe_root(x: Tensor) -> Tensor:
    """sqrt, with a derivative of zero at zero."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0 * x)
