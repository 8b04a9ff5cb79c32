"""The training of a controller's weights by Adam: along the hypergradient, which the chain rule
carries through the controller, or by a proxy that looks at the losses alone.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.backends import Backend
from ..adamw.adamw import AdamW
from .nested_controller import NestedController

Tensor = torch.Tensor
# Of the proxy: how many losses it records, the least improvement, and the weight of |m - 1| where
# there is none.
RECORDS, IMPROVEMENT, EXPLORATION = 10, 1e-3, 0.1


class ControllerTraining:
    """Updates a controller's weights by Adam, its gradients clipped to a norm of 1; gradients that
    are not finite update nothing.

    Attributes:
        optimizer: AdamW over the controller's parameters, with no decay.
        losses: the proxy's records, the oldest first; NaN where there is no record yet.
        last: the multipliers of its last record.
    """

    def __init__(
        self, controller: NestedController, groups: int, meta_lr: float, backend: Backend
    ) -> None:
        self.controller = controller
        options: dict[str, Any] = dict(weight_decay=0.0, max_grad_norm=1.0, backend=backend)
        self.optimizer: Any = AdamW(controller.parameters(), meta_lr, **options)
        weight = controller.linears[0].weight
        none = float("nan")
        self.losses = torch.full((RECORDS,), none, dtype=weight.dtype, device=weight.device)
        self.last = torch.ones(groups, dtype=weight.dtype, device=weight.device)

    def follow(self, statistics: Tensor, gradient: Tensor, skipped: Tensor) -> None:
        """A step against dL/dm, ``[groups]``, unless the optimizer's step was skipped."""
        with torch.enable_grad():
            m = self.controller(statistics)
        self._move(m, gradient.to(m.dtype), skipped)

    def follow_proxy(self, statistics: Tensor, loss: Tensor, skipped: Tensor) -> None:
        """A step of the proxy, which looks at no gradient of a loss. While there are fewer than ten
        records it descends mean (m - 1)^2; then, where losses fell over them, mean (m - m_last)^2,
        else mean (m - 1)^2 - 0.1 mean |m - 1|. The loss is recorded after the step.
        """
        with torch.enable_grad():
            m = self.controller(statistics)
            near = (m - 1.0).square().mean()
            unchanged = (m - self.last).square().mean()
            exploring = near - EXPLORATION * (m - 1.0).abs().mean()
            falls = self.losses[0] - self.losses[-1] > IMPROVEMENT
            value = torch.where(falls, unchanged, exploring)
            value = torch.where(self.losses[0].isnan(), near, value)
        self._move(value, torch.ones_like(value), skipped)
        recorded = torch.cat([self.losses[1:], loss.reshape(1)])
        self.losses.copy_(torch.where(skipped, self.losses, recorded))
        self.last.copy_(torch.where(skipped, self.last, m.detach()))

    def _move(self, value: Tensor, gradient: Tensor, skipped: Tensor) -> None:
        weights = list(self.controller.parameters())
        gradients = torch.autograd.grad(value, weights, gradient)
        self.optimizer.found_inf = skipped.float()
        for weight, g in zip(weights, gradients, strict=True):
            weight.grad = g
        self.optimizer.step()
        del self.optimizer.found_inf
        for weight in weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "last": self.last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses.copy_(state["losses"])
        # Groups that were added since have 1.
        self.last[: len(state["last"])].copy_(state["last"])
