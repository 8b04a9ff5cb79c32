"""The base of the optimizers whose step a network computes from statistics of each parameter: their
state, the results of a step, and plans that hold until parameters or gradients change their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.backends import KERNEL_DTYPES, Backend, check_backend, decline, uses_triton
from ..checks import check_gradient, check_rate, checked_clipping
from ..contract import Contract, new_results
from ..placement import current, on
from ..step import Step, total_squares
from ..tables import addresses_of, check_eager, layouts_of, same
from .checks import check_learnable, check_state, tensor_obstacle
from .members import Member, Rules, StatisticsPart
from .reference import Statistics, new_statistics

Tensor = torch.Tensor


class StatisticsOptimizer(Contract):
    """The state of a parameter is ``Statistics``, and what a subclass adds to it."""

    copied: tuple[str, ...] = ("backend", "max_grad_norm", "skip_nonfinite")

    def _prepare(
        self, max_grad_norm: float | None, skip_nonfinite: bool | None, backend: Backend
    ) -> None:
        """Before torch's own construction, which adds the parameters."""
        check_backend(backend)
        self.max_grad_norm, self.skip_nonfinite = checked_clipping(max_grad_norm, skip_nonfinite)
        self.backend = backend
        self._forget_plans()

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            check_learnable(p)
        check_rate(group)

    def _forget_plans(self) -> None:
        self._parts: list[tuple[Any, list[int]]] = []
        self._state: list[Any] = []
        self._planned: list[Any] = []

    def _point(self, gradients: Sequence[Tensor | None]) -> None:
        """Pass each part its gradients and the groups' numbers."""
        self._keep_captured([part for part, _ in self._parts])
        for part, places in self._parts:
            with current(part.device):
                its = [g for g in (gradients[place] for place in places) if g is not None]
                part.point(part.gradients_of(its), self.param_groups)

    def _steps(self, found_inf: Tensor | None) -> list[Step]:
        """The step of each part."""
        scale = getattr(self, "grad_scale", None)
        squares = None
        if self.skip_nonfinite:
            squares = total_squares([part for part, _ in self._parts])
        steps = []
        for number, (part, _) in enumerate(self._parts):
            device = part.device
            with current(device):
                results = new_results(device) if number else self._results_on(device)
                inputs = on(device, squares), on(device, scale), on(device, found_inf)
                steps.append(Step(*inputs, *results))
        return steps

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
        return self._new_state(
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        )

    def _plan(self, context: list[Any]) -> list[Tensor | None]:
        """Plan for the parameters, gradients and states as they are, and for all else in
        ``context``, unless the plans fit; returns all gradients.
        """
        flat = self._all_parameters()
        gradients = [p.grad for p in flat]
        present = [g for g in gradients if g is not None]
        try:
            layouts = layouts_of(present)
        except RuntimeError:
            # Sparse gradients have no strides.
            self._check(flat, gradients)
            raise
        planned = [
            addresses_of(flat),
            [(p.dtype, p.shape, p.stride()) for p in flat],
            len(present) == len(flat) or [g is None for g in gradients],
            layouts,
            [group.get("maximize") for group in self.param_groups],
            self.max_grad_norm,
            context,
        ]
        # By identity: users may replace state.
        if planned == self._planned and same(self._all_state(), self._state):
            return gradients
        self._check(flat, gradients)
        members: dict[tuple[torch.device, bool], list[Member]] = {}
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                g = gradients[place]
                if g is not None and self._takes(p):
                    sign = -1.0 if group.get("maximize") else 1.0
                    statistics = self._statistics_of(p)
                    member = Member(place, p.detach(), statistics, number, sign, g.dtype)
                    key = p.device, self._uses_triton(p, g, place)
                    members.setdefault(key, []).append(member)
                place += 1
        self._parts = []
        for (device, with_kernels), some in members.items():
            with current(device):
                part = self._part(some, device, with_kernels)
            self._parts.append((part, [member.place for member in part.members]))
        # With the states that were allocated just now.
        self._state, self._planned = self._all_state(), planned
        return gradients

    def _part(
        self, members: list[Member], device: torch.device, with_kernels: bool
    ) -> StatisticsPart:
        """Members on one device, updated by kernels or in plain torch."""
        raise NotImplementedError

    def _rules(self, network: Any) -> Rules:
        return Rules(network, self.max_grad_norm, len(self.param_groups))

    def _takes(self, p: Tensor) -> bool:
        """Whether a parameter with a gradient takes part."""
        return True

    def _check(self, flat: list[Tensor], gradients: list[Tensor | None]) -> None:
        for p, g in zip(flat, gradients, strict=True):
            if g is not None:
                check_gradient(p, g)

    def _uses_triton(self, p: Tensor, g: Tensor, place: int) -> bool:
        if not uses_triton(p, self.backend):
            return False
        obstacle = self._obstacle(p, place) or tensor_obstacle(p)
        if g.dtype not in KERNEL_DTYPES:
            obstacle = f"the kernels take gradients of float32, bfloat16 and float16, not {g.dtype}"
        if obstacle is not None:
            decline(obstacle, self.backend)
        return obstacle is None

    def _obstacle(self, p: Tensor, place: int) -> str | None:
        """Why the kernels cannot serve what a subclass adds."""
        return None

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


def loss_of(closure: Callable[[], Any]) -> Any:
    """What a closure returns, with gradients."""
    with torch.enable_grad():
        return closure()
