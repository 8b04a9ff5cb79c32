r"""How a loss depends on the multipliers of the learning rates, exactly, through one step:

    p' = p - lr_g d    lr_g = base_lr_g m_g    dL/dm_g = -base_lr_g <grad L(p'), d>_g

where <,>_g sums over the parameters of group g. AdamW's direction follows from its state after the
step and the parameters p' that it led to, so nothing is kept for it:

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    d = u + wd p = (u + wd p') / (1 - lr_g wd)

L is any loss at p': one of held-out data, or that of the next batch (Baydin et al., Online Learning
Rate Adaptation with Hypergradient Descent, arXiv 1703.04782). The chain goes on through the
controller to its weights, which Adam moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._backends import Backend
from .adamw import AdamW
from .nested_controller import NestedController

Tensor = torch.Tensor
# Of the parameter, its place among all and its group's: how it has been moved, per learning rate.
Direction = Callable[[Tensor, int], Tensor | None]
# The proxy's: losses that it looks back on, what counts as improvement, and what it pays for
# standing apart from 1 where there is none.
RECORDS, IMPROVEMENT, RESTLESSNESS = 10, 1e-3, 0.1


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def adamw_direction(p: Tensor, state: dict[str, Any], group: dict[str, Any], lr: Tensor) -> Tensor:
    """d of AdamW's last step, in fp32 or fp64.

    Args:
        p: the parameter after the step.
        state: of the parameter, after the step: exp_avg, exp_avg_sq and step.
        group: with betas, eps and weight_decay.
        lr: that the step was taken with, 0-d.
    """
    m, v, t = wide(state["exp_avg"]), wide(state["exp_avg_sq"]), state["step"].double()
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    root = v.sqrt() * (1.0 - beta2**t).rsqrt().to(v.dtype) + group["eps"]
    u = m / root / (1.0 - beta1**t).to(v.dtype)
    return (u + decay * wide(p)) / (1.0 - lr.double() * decay).to(v.dtype)


def dots_by_group(
    groups: Sequence[dict[str, Any]], gradients: Sequence[Tensor | None], direction: Direction
) -> Tensor:
    """<grad L, d> of each group, ``[groups]`` in fp64, without waiting for the device.

    Args:
        groups: of parameters, as an optimizer has them.
        gradients: of L at the parameters after the step, in their order; None counts as zero.
        direction: gives d of a parameter and its group's place, None where it was not moved.
    """
    given = iter(gradients)
    found = []
    for number, group in enumerate(groups):
        shares = []
        for p in group["params"]:
            g = next(given)
            d = None if g is None else direction(p, number)
            if g is not None and d is not None:
                shares.append((wide(g) * d).sum(dtype=torch.float64))
        zero = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)
        found.append(torch.stack(shares).sum() if shares else zero)
    return torch.stack(found)


class ControllerTraining:
    """Moves a controller's weights by Adam, its gradients clipped to a norm of 1; what is not
    finite moves nothing.

    Attributes:
        optimizer: AdamW over the controller's parameters, with no decay.
        losses: the proxy's records, the oldest first; NaN where there is none yet.
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
        """A step against dL/dm, ``[groups]``, none where the step that it is of was skipped."""
        with torch.enable_grad():
            m = self.controller(statistics)
        self._move(m, gradient.to(m.dtype), skipped)

    def follow_proxy(self, statistics: Tensor, loss: Tensor, skipped: Tensor) -> None:
        """A step of the proxy, which looks at no gradient of a loss: while there are fewer than ten
        records mean (m - 1)^2; then, where losses fell over them, mean (m - m_last)^2, else mean
        (m - 1)^2 - 0.1 mean |m - 1|. This step's record comes after it.
        """
        with torch.enable_grad():
            m = self.controller(statistics)
            near = (m - 1.0).square().mean()
            kept = (m - self.last).square().mean()
            restless = near - RESTLESSNESS * (m - 1.0).abs().mean()
            falls = self.losses[0] - self.losses[-1] > IMPROVEMENT
            value = torch.where(falls, kept, restless)
            value = torch.where(self.losses[0].isnan(), near, value)
        self._move(value, torch.ones_like(value), skipped)
        recorded = torch.cat([self.losses[1:], loss.reshape(1)])
        self.losses.copy_(torch.where(skipped, self.losses, recorded))
        self.last.copy_(torch.where(skipped, self.last, m.detach()))

    def _move(self, value: Tensor, gradient: Tensor, skipped: Tensor) -> None:
        weights = list(self.controller.parameters())
        found = torch.autograd.grad(value, weights, gradient)
        self.optimizer.found_inf = skipped.float()
        for weight, g in zip(weights, found, strict=True):
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
        # Of groups that were added since it is 1.
        self.last[: len(state["last"])].copy_(state["last"])
