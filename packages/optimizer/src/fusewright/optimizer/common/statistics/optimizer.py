"""The base of the optimizers whose step a network computes from statistics of each parameter: their
state, the results of a step, and plans that hold until parameters or gradients change their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checks import check_elements, check_rate
from ..placement import is_distributed, local, mesh_of, placed_like, placement_of
from ..planned_optimizer import PlannedOptimizer
from ..sharding import check_rows
from ..tables import check_eager
from .checks import check_state, tensor_obstacle
from .members import Member, Rules
from .reference import Statistics, new_statistics, on_meta

Tensor = torch.Tensor


class StatisticsOptimizer(PlannedOptimizer):
    """The state of a parameter is ``Statistics``, and what a subclass adds to it."""

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            check_elements("a parameter", p)
            check_rows(p)
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
                    self.state[p][name] = new.copy_(like(state[name], new))

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step."""
        return new_statistics(p)._asdict()

    def _meta_state(self, p: Tensor) -> dict[str, Tensor]:
        """Shapes, strides and placements of a parameter's state."""
        return self._new_state(on_meta(p))

    def _plan(self, *context: Any) -> list[Tensor | None]:
        formats = [(p.dtype, p.shape, p.stride()) for p in self._all_parameters()]
        signs = [group.get("maximize") for group in self.param_groups]
        return super()._plan(formats, signs, *context)

    def _member(self, p: Tensor, g: Tensor, place: int, number: int, mesh: int) -> Member | None:
        sign = -1.0 if self.param_groups[number].get("maximize") else 1.0
        statistics = Statistics(*map(local, self._statistics_of(p)))
        memory, mesh_of_p = local(p.detach()), mesh_of(p)
        return Member(place, memory, statistics, number, sign, g.dtype, p.shape, mesh_of_p)

    def _squared(self, member: Member) -> Sequence[torch.dtype]:
        return (member.statistics.square.dtype,)

    def _obstacle(self, member: Member) -> str | None:
        if member.is_sharded:
            return "the kernels take whole parameters, not shards"
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
            (x.dtype, x.device, x.stride(), placement_of(x))
            == (y.dtype, p.device, y.stride(), placement_of(y))
            for x, y in ((state[name], wanted[name]) for name in wanted)
        )
        if not fits:
            # Users may have replaced it, or the parameter's memory.
            places = [place for place, q in enumerate(self._all_parameters()) if q is p]
            check_state(state, wanted, places[0])
            converted = self._new_state(p.detach())
            for name, new in converted.items():
                new.copy_(like(state[name], new))
            state.update(converted)
        return Statistics(*(state[name] for name in Statistics._fields))


def like(value: Any, new: Tensor) -> Tensor:
    """A piece of state that was loaded, placed as the new one; of a whole tensor, which then every
    process has, a shard.
    """
    value = torch.as_tensor(value)
    if not is_distributed(new) or is_distributed(value):
        return placed_like(value, new)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(new, DTensor)
    value = value.to(new.device)
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
