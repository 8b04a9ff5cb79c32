"""Optimizers that move parameters of one shape together.

Parameters of one shape, dtype and group are a stack: each piece of their state is one tensor, of
which the parameters' own are views, and a step stacks their gradients. So the layers of a model
take few launches, and their matrix products are batched.

Whether a step is taken is decided on the device, and everything is selected by that there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ._adamw_state import keep_rate_on_device
from ._backends import Backend, check_backend, without_autocast
from ._checks import check_gradient, check_number
from ._contract import Contract
from ._members import current, on
from ._parts import total_squares
from ._stack import Stack, check_parameter, check_state, factor_of
from ._tables import check_eager, same
from .grad_norm import parts_of

Tensor = torch.Tensor
# Elements of a stack at most: a step needs a few times that beside the state.
STACKED = 1 << 26


class StackedOptimizer(Contract):
    """What the optimizers of this kind share: groups, state dicts, skipping and the order of a
    step.

    A subclass says what state a parameter begins with, and how a stack is moved.
    """

    copied = "skip_nonfinite", "backend"
    # A step whose gradients' norm is not below it is no step.
    norm_below = torch.inf

    def __init__(
        self,
        params: Iterable,
        defaults: dict[str, Any],
        skip_nonfinite: bool,
        backend: Backend = "auto",
    ) -> None:
        check_backend(backend)
        self.skip_nonfinite, self.backend = skip_nonfinite, backend
        self._forget_plans()
        super().__init__(params, defaults)

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise where a group's options are out of their range."""
        raise NotImplementedError

    def _fresh(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        """The state that a parameter begins with."""
        raise NotImplementedError

    def _check_stacks(self, stacks: list[Stack]) -> None:
        """Raise where one cannot be moved, before any is."""

    def _begin(self, groups: list[dict[str, Any]]) -> None:
        """Called with the groups that a step is about to move."""

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        """Move a stack along its gradients, unless the device says that the step is skipped."""
        raise NotImplementedError

    def _move_stack(
        self,
        stack: Stack,
        sign: float,
        scale: Tensor | None,
        group: dict[str, Any],
        skips: Tensor | None,
    ) -> None:
        """Move a stack whose gradients times the sign, over the scale, are those meant."""
        self._move(stack, stack.gradients(factor_of(sign, scale)), group, skips)

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            check_parameter(p)
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])
        self._check_options(group)
        keep_rate_on_device(group)

    def _forget_plans(self) -> None:
        self._stacks: list[Stack] = []
        self._flat: list[Tensor] = []
        self._kinds: list[tuple[torch.dtype, torch.device, torch.Size]] = []

    def _members(self) -> Iterator[tuple[int, int, Tensor]]:
        """The place of each parameter, the number of its group, and it."""
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                yield place, number, p
                place += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stacks = self._plan()
        if not stacks:
            self._nothing_moved()
            return loss
        self._check_stacks(stacks)
        self._keep_captured(stacks)
        skips = self._decide()
        scale = getattr(self, "grad_scale", None)
        numbers = sorted({stack.number for stack in stacks})
        self._begin([self.param_groups[number] for number in numbers])
        for stack in stacks:
            group, device = self.param_groups[stack.number], stack.device
            sign = -1.0 if group["maximize"] else 1.0
            with current(device), without_autocast(device):
                self._move_stack(stack, sign, on(device, scale), group, on(device, skips))
        return loss

    def _decide(self) -> Tensor | None:
        """Whether this step is skipped, where anything could make it so."""
        norm, skipped, count = self._last()
        gradients = [p.grad for p in self._flat if p.grad is not None]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        skips = None
        if found is not None:
            # Of several devices with one, a scaler adds them up.
            skips = on(skipped.device, found).reshape(()) > 0.0
        if self.skip_nonfinite:
            total = total_squares(parts_of(gradients, self.backend)).sum().sqrt()
            total = on(norm.device, total)
            if scale is not None:
                total = total / on(norm.device, scale).abs().reshape(())
            norm.copy_(total)
            # False for NaN too.
            strange = ~(total < self.norm_below)
            skips = strange if skips is None else skips | strange
        if skips is None:
            skipped.zero_()
        else:
            skipped.copy_(skips)
            count.add_(skips)
        return skips

    def _plan(self) -> list[Stack]:
        """The stacks of the parameters that have gradients."""
        members = [member for member in self._members() if member[2].grad is not None]
        flat = [p for _, _, p in members]
        for p in flat:
            assert p.grad is not None
            check_gradient(p, p.grad)
        kinds = [(p.dtype, p.device, p.shape) for p in flat]
        # By identity: others may put parameters in the place of a group's.
        known = same(flat, self._flat) and kinds == self._kinds
        if known and all(map(self._holds, self._stacks)):
            return self._stacks
        found: dict[tuple, list[tuple[int, Tensor]]] = {}
        for p in flat[:1]:
            check_eager(p.device, "state was to be stacked")
        for place, number, p in members:
            found.setdefault((number, p.shape, p.dtype, p.device), []).append((place, p))
        states = {p: self._state_of(p, self.param_groups[number], k) for k, number, p in members}
        self._stacks = []
        for (number, shape, _, device), some in found.items():
            most = max(1, STACKED // max(1, shape.numel()))
            for start in range(0, len(some), most):
                params = [p for _, p in some[start : start + most]]
                with current(device):
                    stack = Stack(params, number, [states[p] for p in params])
                for name, views in stack.views.items():
                    for p, view in zip(params, views, strict=True):
                        self.state[p][name] = view
                self._stacks.append(stack)
        self._leave_stacks(set(flat))
        self._flat, self._kinds = flat, kinds
        return self._stacks

    def _leave_stacks(self, stacked: set[Tensor]) -> None:
        """Give the state of other parameters memory of its own: one of theirs would keep all of a
        stack.
        """
        for p, state in self.state.items():
            if p not in stacked:
                for name, x in state.items():
                    if torch.is_tensor(x) and x._base is not None:
                        state[name] = x.clone()

    def _holds(self, stack: Stack) -> bool:
        """Whether the optimizer's state is still that of the stack: others may have put theirs."""
        states = [self.state[p] for p in stack.params]
        return all(
            state.get(name) is view
            for name, views in stack.views.items()
            for state, view in zip(states, views, strict=True)
        )

    def _state_of(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        """What there is, in its dtype and on its device, and what it begins with elsewhere."""
        state, fresh = self.state[p], self._fresh(p, group, place)
        for name, start in fresh.items():
            if name in state:
                check_state(name, state[name], start, place)
                fresh[name] = state[name].to(start)
        return fresh

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            for name, value in state.items():
                copied = torch.is_tensor(value)
                self.state[p][name] = value.detach().clone() if copied else value
        for group in self.param_groups:
            keep_rate_on_device(group)

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        groups = [{**old, "capturable": mine["capturable"]} for mine, old in pairs]
        for old, mine in zip(groups, self.param_groups, strict=True):
            check_number("lr", old["lr"])
            check_number("weight_decay", old["weight_decay"])
            self._check_options({**old, "params": mine["params"]})
        numbers = [k for group in groups for k in group["params"]]
        for number, (place, group_number, p) in zip(numbers, self._members(), strict=True):
            held = saved["state"].get(number, {})
            fresh = self._fresh(p, groups[group_number], place) if held else {}
            for name in fresh.keys() & held.keys():
                check_state(name, held[name], fresh[name], place)
        return {**saved, "param_groups": groups}
