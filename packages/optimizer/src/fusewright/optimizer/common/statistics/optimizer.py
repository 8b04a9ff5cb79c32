"""The base of the optimizers whose step a network computes from statistics of each parameter: their
state, the results of a step, and plans that hold until parameters or gradients change their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checks import check_rate
from ..planned_optimizer import PlannedOptimizer
from ..tables import check_eager
from .checks import check_learnable, check_state, tensor_obstacle
from .members import Member, Rules
from .reference import Statistics, new_statistics, on_meta

Tensor = torch.Tensor


class StatisticsOptimizer(PlannedOptimizer):
    """The state of a parameter is ``Statistics``, and what a subclass adds to it."""

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            check_learnable(p)
        check_rate(group)

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        for loaded, group in zip(saved["param_groups"], self.param_groups, strict=True):
            check_rate(loaded)
            for number, p in zip(loaded["params"], group["params"], strict=True):
                check_state(saved["state"].get(number, {}), self._meta_state(p), number)
        return saved

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            if state:
                for name, new in self._new_state(p.detach()).items():
                    self.state[p][name] = new.copy_(torch.as_tensor(state[name]))

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step."""
        return new_statistics(p)._asdict()

    def _meta_state(self, p: Tensor) -> dict[str, Tensor]:
        """Shapes and strides of a parameter's state."""
        return self._new_state(on_meta(p))

    def _plan(self, *context: Any) -> list[Tensor | None]:
        formats = [(p.dtype, p.shape, p.stride()) for p in self._all_parameters()]
        signs = [group.get("maximize") for group in self.param_groups]
        return super()._plan(formats, signs, *context)

    def _member(self, p: Tensor, g: Tensor, place: int, number: int, mesh: int) -> Member | None:
        sign = -1.0 if self.param_groups[number].get("maximize") else 1.0
        return Member(place, p.detach(), self._statistics_of(p), number, sign, g.dtype)

    def _squared(self, member: Member) -> Sequence[torch.dtype]:
        return (member.statistics.square.dtype,)

    def _obstacle(self, member: Member) -> str | None:
        return tensor_obstacle(member.p)

    def _network(self) -> Any:
        """What makes the updates."""
        raise NotImplementedError

    def _rules(self, members: list[Any]) -> Rules:
        return Rules(self._network(), self.max_grad_norm, len(self.param_groups))

    def _statistics_of(self, p: Tensor) -> Statistics:
        state = self.state[p]
        if not state:
            check_eager(p.device, "a parameter's statistics were to be made")
            state.update(self._new_state(p.detach()))
        wanted = self._meta_state(p)
        fits = state.keys() == wanted.keys() and all(
            (x.dtype, x.device, x.stride()) == (y.dtype, p.device, y.stride())
            for x, y in ((state[name], wanted[name]) for name in wanted)
        )
        if not fits:
            # Users may have replaced it, or the parameter's memory.
            places = [place for place, q in enumerate(self._all_parameters()) if q is p]
            check_state(state, wanted, places[0])
            converted = self._new_state(p.detach())
            for name, new in converted.items():
                new.copy_(state[name])
            state.update(converted)
        return Statistics(*(state[name] for name in Statistics._fields))
