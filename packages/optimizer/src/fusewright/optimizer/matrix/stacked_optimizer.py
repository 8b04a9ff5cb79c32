"""Optimizers that update parameters of one shape together.

Parameters of one shape, dtype and group are a stack: each piece of their state is one tensor, of
which the parameters' own are views, and a step stacks their gradients. So the layers of a model
take few launches, and their matrix products are batched.

The device decides whether a step is taken and selects by it; the host waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._core.backends import Backend, check_backend
from ..common.checks import check_gradient, check_rate
from ..common.contract import Contract, as_it_is, keep_rate_on_device, loss_of
from ..common.placement import current, local, on, placed_like, placement_of
from ..common.reference import is_too_large
from ..common.step import norm_bound, total_squares
from ..common.tables import check_eager, same
from ..norms.grad_norm import parts_of
from .shares import overlapped
from .stack import Stack, check_parameter, check_state, factor_of, working_dtype

Tensor = torch.Tensor
# Elements of a stack at most: besides the state a step needs a few times their memory.
STACKED = 1 << 26
# Stacks whose state is one memory, since an allocator rounds up each: a plan that is made again
# has the state of so many twice.
TOGETHER = 4
# The state that has squares of gradients.
SQUARED = "exp_avg_sq", "second_moment"


class StackedOptimizer(Contract):
    """What the optimizers of this kind share: groups, state dicts, skipping and the order of a
    step.

    A subclass says what state a parameter begins with, and how a stack is updated.
    """

    copied: tuple[str, ...] = "skip_nonfinite", "backend"

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        skip_nonfinite: bool,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        check_backend(backend)
        self.skip_nonfinite: bool = skip_nonfinite
        self.backend: Backend = backend
        self._forget_plans()
        super().__init__(params, defaults)

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise where a group's options are out of their range."""
        raise NotImplementedError

    def _new_state(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        """The state that a parameter begins with."""
        raise NotImplementedError

    def _check_stacks(self, stacks: list[Stack]) -> None:
        """Raise where a stack cannot be updated, before any is."""

    def _begin(self, groups: list[dict[str, Any]]) -> None:
        """Called with the groups that a step is about to update."""

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        """Update a stack along its gradients, unless the device says that the step is skipped."""
        raise NotImplementedError

    def _move_stack(
        self,
        stack: Stack,
        sign: float,
        scale: Tensor | None,
        group: dict[str, Any],
        skips: Tensor | None,
    ) -> Iterator[None]:
        """Update a stack along its gradients times the sign, over the scale; yields where it waits
        for other processes.
        """
        self._move(stack, stack.gradients(factor_of(sign, scale)), group, skips)
        yield from ()

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        """Raise where a group cannot have such a parameter."""
        check_parameter(p)

    def _planned(self, stacks: list[Stack]) -> None:
        """Called with the stacks of a new plan."""

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            self._check_parameter(p, group)
        check_rate(group)
        self._check_options(group)
        keep_rate_on_device(group)

    def _forget_plans(self) -> None:
        self._stacks: list[Stack] = []
        self._flat: list[Tensor] = []
        self._formats: list[tuple[int, torch.dtype, torch.device, torch.Size]] = []

    def _members(self) -> Iterator[tuple[int, int, Tensor]]:
        """The place of each parameter, the number of its group, and it."""
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                yield place, number, p
                place += 1

    @as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None if closure is None else loss_of(closure)
        stacks = self._plan()
        if not stacks:
            self._clear_results()
            return loss
        self._check_stacks(stacks)
        self._keep_captured(stacks)
        skips = self._decide(stacks)
        scale = getattr(self, "grad_scale", None)
        numbers = sorted({stack.number for stack in stacks})
        self._begin([self.param_groups[number] for number in numbers])
        overlapped((stack.device, self._moved(stack, scale, skips)) for stack in stacks)
        return loss

    def _moved(self, stack: Stack, scale: Tensor | None, skips: Tensor | None) -> Iterator[None]:
        group, device = self.param_groups[stack.number], stack.device
        sign = -1.0 if group["maximize"] else 1.0
        return self._move_stack(stack, sign, on(device, scale), group, on(device, skips))

    def _squared(self, stack: Stack) -> list[torch.dtype]:
        """The dtypes in which a step stores or takes squares of a stack's gradients."""
        return [x.dtype for name, x in stack.buffers.items() if name in SQUARED]

    def _norm_below(self, stacks: list[Stack]) -> float:
        """The bound of norms: that of squares, and what the stacks' dtypes hold."""
        squared = itertools.chain.from_iterable(map(self._squared, stacks))
        dtypes = {working_dtype(stack.params[0].dtype) for stack in stacks}
        return min(norm_bound(squared), *(torch.finfo(dtype).max for dtype in dtypes))

    def _decide(self, stacks: list[Stack]) -> Tensor | None:
        """Whether this step is skipped, where anything could make it so."""
        norm, skipped, count = self._last()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        skips = None
        if found_inf is not None:
            # A scaler adds up the flags of several devices.
            skips = on(skipped.device, found_inf).reshape(()) > 0.0
        if self.skip_nonfinite:
            pairs = [(p.grad, p) for p in self._flat]
            gradients = [g for g in itertools.starmap(placed_like, pairs) if g is not None]
            total = total_squares(parts_of(gradients, self.backend)).sum().sqrt()
            total = on(norm.device, total)
            if scale is not None:
                total = total / on(norm.device, scale).abs().reshape(())
            norm.copy_(total)
            nonfinite = is_too_large(total, self._norm_below(stacks))
            skips = nonfinite if skips is None else skips | nonfinite
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
        # With its group, to which a parameter may have moved.
        formats = [(number, p.dtype, p.device, p.shape) for _, number, p in members]
        # By identity: users may replace parameters.
        known = same(flat, self._flat) and formats == self._formats
        if known and all(map(self._holds, self._stacks)):
            return self._stacks
        stacks: dict[tuple, list[tuple[int, Tensor]]] = {}
        for p in flat[:1]:
            check_eager(p.device, "state was to be stacked")
        for place, number, p in members:
            key = number, p.shape, p.dtype, p.device, placement_of(p)
            stacks.setdefault(key, []).append((place, p))
        for place, number, p in members:
            if self.state[p]:
                self._checked_state(p, self.param_groups[number], place)
        # Where memory runs out below, the next step must plan again.
        self._forget_plans()
        self._leave_stacks(set(flat))
        for (number, _, _, device, _), some in stacks.items():
            with current(device):
                self._stacks += self._stacked(number, some)
        self._planned(self._stacks)
        self._flat, self._formats = flat, formats
        return self._stacks

    def _stacked(self, number: int, some: list[tuple[int, Tensor]]) -> Iterator[Stack]:
        """Stacks of these parameters of one shape, with their places."""
        largest = self._largest_stack([p for _, p in some], self.param_groups[number])
        together = TOGETHER * largest
        for start in range(0, len(some), together):
            yield from self._of_one_memory(number, some[start : start + together], largest)

    def _of_one_memory(
        self, number: int, some: list[tuple[int, Tensor]], largest: int
    ) -> Iterator[Stack]:
        """Stacks whose state is one memory but made for one stack after the other: to stack it
        takes as much again.
        """
        group = self.param_groups[number]
        wholes: dict[str, Tensor] = {}
        for start in range(0, len(some), largest):
            chosen = some[start : start + largest]
            params = [p for _, p in chosen]
            states = [self._state_of(p, group, place) for place, p in chosen]
            if not wholes:
                first = {name: local(x) for name, x in states[0].items()}
                wholes = {name: x.new_empty(len(some), *x.shape) for name, x in first.items()}
            buffers = {name: whole[start : start + largest] for name, whole in wholes.items()}
            for name, buffer in buffers.items():
                torch.stack([local(state[name]) for state in states], out=buffer)
            stack = Stack(params, number, buffers, states[0])
            for name, views in stack.views.items():
                for p, view in zip(params, views, strict=True):
                    self.state[p][name] = view
            del states
            yield stack

    def _largest_stack(self, params: list[Tensor], group: dict[str, Any]) -> int:
        """How many of these parameters of one shape at most one stack has."""
        return max(1, STACKED // max(1, params[0].numel()))

    def _leave_stacks(self, stacked: set[Tensor]) -> None:
        """Copy the state of parameters outside of all stacks: a view would keep the memory of
        whole stacks alive.
        """
        for p, state in self.state.items():
            if p not in stacked:
                for name, x in state.items():
                    if torch.is_tensor(x) and local(x)._base is not None:
                        state[name] = x.clone()

    def _holds(self, stack: Stack) -> bool:
        """Whether the optimizer's state is still the stack's: users may replace it."""
        states = [self.state[p] for p in stack.params]
        return all(
            state.get(name) is view
            for name, views in stack.views.items()
            for state, view in zip(states, views, strict=True)
        )

    def _state_of(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        """The state of a parameter in its dtype and on its device, new where it has none."""
        state, complete = self.state[p], self._checked_state(p, group, place)
        return {
            name: placed_like(state[name], x).to(x.device, x.dtype) if name in state else x
            for name, x in complete.items()
        }

    def _checked_state(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        """The state that a parameter begins with; raises where it has one that is not like it."""
        state, complete = self.state[p], self._new_state(p, group, place)
        for name, new in complete.items():
            if name in state:
                check_state(name, state[name], new, place)
        return complete

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            for name, value in state.items():
                is_tensor = torch.is_tensor(value)
                self.state[p][name] = value.detach().clone() if is_tensor else value
        for group in self.param_groups:
            keep_rate_on_device(group)

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        groups = [{**old, "capturable": mine["capturable"]} for mine, old in pairs]
        for old, mine in zip(groups, self.param_groups, strict=True):
            check_rate(old)
            self._check_options({**old, "params": mine["params"]})
        numbers = [k for group in groups for k in group["params"]]
        for number, (place, group_number, p) in zip(numbers, self._members(), strict=True):
            loaded = saved["state"].get(number, {})
            new = self._new_state(p, groups[group_number], place) if loaded else {}
            for name in new.keys() & loaded.keys():
                check_state(name, loaded[name], new[name], place)
        return {**saved, "param_groups": groups}
