"""What the optimizers share whose step a network makes from statistics of each parameter: their
state, the results of a step, and plans that hold as long as parameters and gradients lie where they
did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._adamw_state import new_results
from ._backends import KERNEL_DTYPES, Backend, check_backend, decline, uses_triton
from ._checks import check_gradient, check_number, check_options
from ._contract import Contract
from ._learned_checks import check_learnable, check_state, tensor_obstacle
from ._learned_parts import LearnedRules, Moved, Moving
from ._members import Step, current, on
from ._parts import total_squares
from ._tables import addresses_of, check_eager, kinds_of, same
from .learned_features import Statistics, new_statistics

Tensor = torch.Tensor


class StatisticsOptimizer(Contract):
    """Optimizers whose state of a parameter is ``learned_features.Statistics``, and what a subclass
    adds.
    """

    copied: tuple[str, ...] = ("backend", "max_grad_norm", "skip_nonfinite")

    def _prepare(
        self, max_grad_norm: float | None, skip_nonfinite: bool | None, backend: Backend
    ) -> None:
        """Before torch's own construction, which adds the parameters."""
        check_backend(backend)
        check_options(max_grad_norm, skip_nonfinite, None, "nearest", 0)
        self.backend = backend
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.skip_nonfinite = (
            max_grad_norm is not None if skip_nonfinite is None else skip_nonfinite
        )
        self._forget_plans()

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            check_learnable(p)
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])

    def _forget_plans(self) -> None:
        self._parts: list[tuple[Moving, list[int]]] = []
        self._state: list[Any] = []
        self._seen: list[Any] = []

    def _point(self, gradients: Sequence[Tensor | None]) -> None:
        """Have each part see its gradients and the groups' numbers."""
        self._keep_captured([part for part, _ in self._parts])
        for part, places in self._parts:
            with current(part.device):
                mine = [g for g in (gradients[place] for place in places) if g is not None]
                part.point(part.gradients_of(mine), self.param_groups)

    def _steps(self, found: Tensor | None) -> list[Step]:
        """What each part decides by, and writes its results to."""
        scale = getattr(self, "grad_scale", None)
        squares = None
        if self.skip_nonfinite:
            squares = total_squares([part for part, _ in self._parts])
        steps = []
        for number, (part, _) in enumerate(self._parts):
            device = part.device
            with current(device):
                results = new_results(device) if number else self._results_on(device)
                given = on(device, squares), on(device, scale), on(device, found)
                steps.append(Step(*given, *results))
        return steps

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        for given, group in zip(saved["param_groups"], self.param_groups, strict=True):
            check_number("lr", given["lr"])
            check_number("weight_decay", given["weight_decay"])
            for number, p in zip(given["params"], group["params"], strict=True):
                check_state(saved["state"].get(number, {}), self._meta_state(p), number)
        return saved

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            if state:
                for name, fresh in self._new_state(p.detach()).items():
                    self.state[p][name] = fresh.copy_(torch.as_tensor(state[name]))

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step."""
        return new_statistics(p)._asdict()

    def _meta_state(self, p: Tensor) -> dict[str, Tensor]:
        """Shapes and strides of a parameter's state."""
        return self._new_state(
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        )

    def _plan(self, context: list[Any]) -> list[Tensor | None]:
        """Make sure that the plans are of these parameters, gradients and states, and of what else
        they depend on; returns all gradients.
        """
        flat = self._all_parameters()
        gradients = [p.grad for p in flat]
        given = [g for g in gradients if g is not None]
        try:
            kinds = kinds_of(given)
        except RuntimeError:
            # Sparse ones have no strides.
            self._check(flat, gradients)
            raise
        # What addresses and launches were planned for.
        seen = [
            addresses_of(flat),
            [(p.dtype, p.shape, p.stride()) for p in flat],
            len(given) == len(flat) or [g is None for g in gradients],
            kinds,
            [group.get("maximize") for group in self.param_groups],
            self.max_grad_norm,
            context,
        ]
        # By identity: others may put state in the place of this.
        if seen == self._seen and same(self._all_state(), self._state):
            return gradients
        self._check(flat, gradients)
        found: dict[tuple[torch.device, bool], list[Moved]] = {}
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                g = gradients[place]
                if g is not None and self._takes(p):
                    sign = -1.0 if group.get("maximize") else 1.0
                    member = Moved(place, p.detach(), self._statistics_of(p), number, sign, g.dtype)
                    key = p.device, self._uses_triton(p, g, place)
                    found.setdefault(key, []).append(member)
                place += 1
        self._parts = []
        for (device, with_kernels), members in found.items():
            with current(device):
                part = self._part(members, device, with_kernels)
            self._parts.append((part, [member.place for member in part.members]))
        # With the states that have just been made.
        self._state, self._seen = self._all_state(), seen
        return gradients

    def _part(self, members: list[Moved], device: torch.device, with_kernels: bool) -> Moving:
        """Members on one device, moved by kernels or in plain torch."""
        raise NotImplementedError

    def _rules(self, network: Any) -> LearnedRules:
        return LearnedRules(network, self.max_grad_norm, len(self.param_groups))

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
        """What of a subclass the kernels cannot serve."""
        return None

    def _statistics_of(self, p: Tensor) -> Statistics:
        state = self.state[p]
        if not state:
            check_eager(p.device, "a parameter's statistics were to be made")
            state.update(self._new_state(p.detach()))
        wanted = self._meta_state(p)
        same = state.keys() == wanted.keys() and all(
            (x.dtype, x.device, x.stride()) == (y.dtype, p.device, y.stride())
            for x, y in ((state[name], wanted[name]) for name in wanted)
        )
        if not same:
            # Others may have put it there, or given the parameter other memory since.
            places = [place for place, q in enumerate(self._all_parameters()) if q is p]
            check_state(state, wanted, places[0])
            fresh = self._new_state(p.detach())
            for name, new in fresh.items():
                new.copy_(state[name])
            state.update(fresh)
        return Statistics(*(state[name] for name in Statistics._fields))


def loss_of(closure: Callable[[], Any]) -> Any:
    """What a closure computes, with gradients."""
    with torch.enable_grad():
        return closure()
