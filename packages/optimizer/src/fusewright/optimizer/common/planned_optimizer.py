"""The optimizers that move parameters in parts, each planned once: until parameters, gradients or
states change their memory, their layouts or the options that a plan depends on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._core.backends import KERNEL_DTYPES, Backend, check_backend, decline, uses_triton
from .checks import check_gradient, checked_clipping
from .contract import Contract, new_results
from .placement import current, is_distributed, local, mesh_of, on, placed_like
from .step import Step, norm_bound, total_squares
from .tables import addresses_of, layouts_of, same

Tensor = torch.Tensor


class PlannedOptimizer(Contract):
    """A subclass says what its members and its parts are."""

    copied: tuple[str, ...] = ("backend", "max_grad_norm", "skip_nonfinite")
    # Of parts: in plain torch, and by kernels.
    _kinds: Any

    def _prepare(
        self, max_grad_norm: float | None, skip_nonfinite: bool | None, backend: Backend
    ) -> None:
        """Before torch's own construction, which adds the parameters."""
        check_backend(backend)
        self.max_grad_norm: float | None
        self.skip_nonfinite: bool
        self.max_grad_norm, self.skip_nonfinite = checked_clipping(max_grad_norm, skip_nonfinite)
        self.backend = backend
        self._forget_plans()

    def _squared(self, member: Any) -> Sequence[torch.dtype]:
        """The dtypes in which a step stores squares of this member's gradients."""
        raise NotImplementedError

    def _member(self, p: Tensor, g: Tensor, place: int, number: int, mesh: int) -> Any:
        """A parameter with a gradient as a step takes it, of this group and of one of the meshes;
        None where it takes no part.
        """
        raise NotImplementedError

    def _obstacle(self, member: Any) -> str | None:
        """Why the kernels cannot serve a member."""
        raise NotImplementedError

    def _apart(self, member: Any) -> Any:
        """Members that differ in it are parts of their own."""
        return None

    def _rules(self, members: list[Any]) -> Any:
        """What holds of all members of a part."""
        raise NotImplementedError

    def _part(self, members: list[Any], device: torch.device, with_kernels: bool) -> Any:
        """Members on one device, moved by kernels or in plain torch."""
        return self._kinds[with_kernels](members, self._rules(members), device)

    def _forget_plans(self) -> None:
        # With the places of their members among all parameters; a range where a part has all.
        self._parts: list[tuple[Any, Sequence[int]]] = []
        self._flat: list[Tensor] = []
        self._state: list[Any] = []
        self._sharded = False
        self._norm_below = math.inf
        # What the parts were planned for.
        self._planned: list[Any] = []

    def _plan(self, *context: Any) -> list[Tensor | None]:
        """Plan for the parameters, gradients and states as they are, and for all else in
        ``context``, unless the plans fit; returns all gradients.
        """
        flat = self._all_parameters()
        # By identity: users may replace parameters and state.
        if not same(flat, self._flat):
            self._flat, self._planned = flat, []
            self._sharded = any(map(is_distributed, flat))
        gradients = [p.grad for p in flat]
        if self._sharded:
            gradients = list(map(placed_like, gradients, flat))
        present = [g for g in gradients if g is not None]
        try:
            layouts = layouts_of(present)
        except RuntimeError:
            # Sparse gradients have no strides.
            self._check(gradients)
            raise
        planned = [
            addresses_of(map(local, flat) if self._sharded else flat),
            list(map(Tensor.numel, flat)),
            # A parameter may move to a neighbouring group.
            [len(group["params"]) for group in self.param_groups],
            len(present) == len(flat) or [g is None for g in gradients],
            layouts,
            self.max_grad_norm,
            context,
        ]
        if planned == self._planned and same(self._all_state(), self._state):
            return gradients
        self._check(gradients)
        members: dict[tuple[torch.device, bool, Any], list[Any]] = {}
        for member in self._members(gradients):
            key = member.p.device, self._uses_triton(member), self._apart(member)
            members.setdefault(key, []).append(member)
        self._parts = []
        for (device, with_kernels, _), some in members.items():
            with current(device):
                part = self._part(some, device, with_kernels)
            places, all_places = [member.place for member in part.members], range(len(flat))
            self._parts.append((part, all_places if places == [*all_places] else places))
        moved = itertools.chain.from_iterable(part.members for part, _ in self._parts)
        self._norm_below = norm_bound(itertools.chain.from_iterable(map(self._squared, moved)))
        # With the states that were allocated just now.
        self._state, self._planned = self._all_state(), planned
        return gradients

    def _members(self, gradients: list[Tensor | None]) -> Iterator[Any]:
        """Of the parameters that take part."""
        # In the order of the parameters, which is the same in every process.
        meshes: list[Any] = [None]
        numbers = [k for k, group in enumerate(self.param_groups) for _ in group["params"]]
        for place, (p, g, number) in enumerate(zip(self._flat, gradients, numbers, strict=True)):
            if g is not None:
                if mesh_of(p) not in meshes:
                    meshes.append(mesh_of(p))
                member = self._member(p, g, place, number, meshes.index(mesh_of(p)))
                if member is not None:
                    yield member

    def _uses_triton(self, member: Any) -> bool:
        if not uses_triton(member.p, self.backend):
            return False
        obstacle = self._obstacle(member)
        if member.gradient not in KERNEL_DTYPES:
            wanted = "the kernels take gradients of float32, bfloat16 and float16"
            obstacle = f"{wanted}, not {member.gradient}"
        if obstacle is not None:
            decline(obstacle, self.backend)
        return obstacle is None

    def _check(self, gradients: list[Tensor | None]) -> None:
        for p, g in zip(self._flat, gradients, strict=True):
            if g is not None:
                check_gradient(p, g)

    def _point(self, gradients: list[Tensor | None]) -> None:
        """Pass each part its gradients and the groups' numbers."""
        self._keep_captured([part for part, _ in self._parts])
        for part, places in self._parts:
            has_all = isinstance(places, range)
            its: list[Any] = gradients if has_all else [gradients[place] for place in places]
            with current(part.device):
                # A call less where nothing is copied.
                its = its if part.plain else part.gradients_of(its)
                part.point(its, self.param_groups)

    def _steps(self, found_inf: Tensor | None) -> list[tuple[Any, Step]]:
        """Each part with its step."""
        scale = getattr(self, "grad_scale", None)
        squares = None
        if self.skip_nonfinite:
            squares = total_squares([part for part, _ in self._parts])
        steps: list[tuple[Any, Step]] = []
        for part, _ in self._parts:
            device = part.device
            results = new_results(device) if steps else self._results_on(device)
            here = [None if x is None else on(device, x) for x in (squares, scale, found_inf)]
            steps.append((part, Step(here[0], here[1], here[2], *results, self._norm_below)))
        return steps
