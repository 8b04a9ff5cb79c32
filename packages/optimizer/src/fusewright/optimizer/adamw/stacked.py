"""AdamW for stacks: the parameters of one shape that other optimizers update by AdamW.

The state ``exp_avg``, ``exp_avg_sq`` and ``step`` of a stack has the parameters along its first
axis; a parameter group calls betas and eps ``adam_betas`` and ``adam_eps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..common.contract import new_results
from ..common.step import Step
from ..common.tables import addresses_of, layouts_of
from . import launch
from .members import BatchKey, Member, Rules
from .reference import step_of

Tensor = torch.Tensor
# A step gets its group, so that there is one.
RULES = Rules(groups=1, decoupled=True, rounding="nearest", seed=0, max_grad_norm=None)


class StackedAdamW:
    """The launches for one stack.

    Args:
        views: the state of each parameter, by name.
    """

    def __init__(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        self.views = views
        # What the part was planned for.
        self.planned: list[Any] = []
        self.results = new_results(views["step"][0].device)

    def move(
        self,
        params: Sequence[Tensor],
        gradients: list[Tensor],
        sign: float,
        scale: Tensor | None,
        group: dict[str, Any],
        skips: Tensor | None,
    ) -> None:
        """Take the step, unless it is skipped."""
        planned = [sign, addresses_of(params), layouts_of(gradients)]
        if planned != self.planned:
            views, first = self.views, params[0]
            key = BatchKey(first.dtype, gradients[0].dtype, torch.float32, False, False, 0)
            state = views["exp_avg"], views["exp_avg_sq"], views["step"]
            members = [
                Member(place, p.detach(), (m, v, None, None), t, 0, sign, key, None)
                for place, (p, m, v, t) in enumerate(zip(params, *state, strict=True))
            ]
            self.part = launch.KernelPart(members, RULES, first.device)
            self.planned = planned
        part = self.part
        betas, eps = group["adam_betas"], group["adam_eps"]
        part.point(part.gradients_of(gradients), [{**group, "betas": betas, "eps": eps}])
        found_inf = None if skips is None else skips.float()
        part.move(Step(None, scale, found_inf, *self.results))
        part.gradients = []


def stacked_adamw(
    p: Tensor, g: Tensor, state: Mapping[str, Tensor], group: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A stack ``[parameters, ...]`` and its state after a step along g, in plain torch."""
    (beta1, beta2), lr = group["adam_betas"], group["lr"]
    t = state["step"] + 1.0
    m = torch.lerp(state["exp_avg"], g, 1.0 - beta1)
    v = beta2 * state["exp_avg_sq"] + (1.0 - beta2) * g * g
    wide_t = t.double().view(-1, *[1] * (p.dim() - 1))
    step = step_of(m, v, wide_t, lr, (beta1, beta2), group["adam_eps"])
    new = (1.0 - lr * group["weight_decay"]) * p - step
    return new, {"exp_avg": m, "exp_avg_sq": v, "step": t}
