r"""The learned optimizer: a small network, the same for every element of all parameters, makes each
element's update from 28 features of its gradient, value and statistics, 11 of time, and what the
caller adds; ``fusewright.optimizer.learned_features`` has its formulas.

On a card one small launch decides whether the step is taken and prepares its numbers, and five more
for each combination of dtypes move all parameters: squares over rows and columns; their means;
momenta and the squares of all features; the normalisation, folded into a first layer for each
tensor; the network. Where gradients are clipped or such steps skipped, a launch before them adds
their squares. Features exist in registers alone, sums are in a fixed order, and nothing waits for
the host.

Metz et al., Practical tradeoffs between memory, compute, and performance in learned optimizers,
arXiv 2203.11860; Janson et al., PyLO, arXiv 2506.10315.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._backends import KERNEL_DTYPES, Backend, check_backend, decline, launchers, uses_triton
from ._checks import check_gradient, check_number, check_options
from ._learned_checks import (
    check_extra,
    check_learnable,
    check_state,
    meta_statistics,
    network_obstacle,
    tensor_obstacle,
)
from ._learned_parts import LearnedRules, Moved, Moving, ReferencePart
from ._members import Step, current, on
from ._parts import total_squares
from .adamw import new_results
from .learned_features import Statistics, new_statistics
from .update_mlp import UpdateMLP

Tensor = torch.Tensor
Extra = Tensor | Callable[[Tensor], Tensor]


class LearnedOptimizer(torch.optim.Optimizer):
    """small_fc_lopt's learned optimizer as a torch.optim.Optimizer.

    Args:
        params: real tensors, parameter groups or named parameters, of fp32, bf16 or fp16; fp64 and
            what has gaps in its memory in plain torch. A group may have options of its own.
        mlp: the network, on the parameters' device; a step reads its weights as they are, so that
            others may train them. ``load_update_mlp`` has the public ones;
            ``fusewright.optimizer.learned_update`` gives gradients to the weights.
        lr: what an update is multiplied by, a number or a 0-d tensor on the device.
        weight_decay: decoupled; the network's own training had none.
        maximize: ascend.
        extra_features: for a network that has some: ``[extra features]`` on the parameters' device,
            or what can be broadcast to ``[*shape, extra features]``, which plain torch serves; or
            what is called with each parameter in each step and returns such a tensor.
        max_grad_norm: scale all gradients down to this norm over all parameters; the gradients
            themselves are left as they are.
        skip_nonfinite: skip a step whose gradients have no finite norm; what clips always does.
        backend: "auto" takes the kernels for CUDA parameters and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Attributes:
        grad_norm: of the last step, 0-d fp32 on the device of the first parameter that has a
            gradient; NaN before one and where no norm is taken.
        skipped: whether the last step was skipped, 0-d bool there.
        skipped_steps: how many were, 0-d int64 there.

    The state of a parameter: ``step``, ``momenta``, ``square``, ``row`` and ``column`` of
    ``learned_features.Statistics`` in fp32 (fp64 for fp64): 16 bytes for each element, and three
    numbers for each row and column, or of fewer than two axes for each element. A skipped step
    leaves all of it as it was. Where a parameter is a matrix and the model is in maximal-update
    parametrisation, divide its group's lr by the width multiplier, as MuLO does.

    Raises:
        TypeError: a parameter is complex, sparse, distributed or not floating, a gradient is
            sparse, mlp is no UpdateMLP.
        ValueError: an option is out of its range, there are no parameters, a gradient, extra
            features or a loaded state have another shape or device than their parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    # torch.amp.GradScaler sets grad_scale and found_inf before a step, and deletes them after.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable,
        mlp: UpdateMLP,
        lr: float | Tensor = 1.0,
        weight_decay: float | Tensor = 0.0,
        *,
        maximize: bool = False,
        extra_features: Extra | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        backend: Backend = "auto",
    ) -> None:
        check_backend(backend)
        check_options(max_grad_norm, skip_nonfinite, None, "nearest", 0)
        if not isinstance(mlp, UpdateMLP):
            raise TypeError(f"mlp must be an UpdateMLP, got {type(mlp).__name__}")
        self.mlp, self.backend = mlp, backend
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.skip_nonfinite = (
            max_grad_norm is not None if skip_nonfinite is None else skip_nonfinite
        )
        self._results: tuple[Tensor, Tensor, Tensor] | None = None
        self._forget_plans()
        defaults = dict(
            lr=lr, weight_decay=weight_decay, maximize=maximize, extra_features=extra_features
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where given."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                check_learnable(p)
            check_number("lr", group["lr"])
            check_number("weight_decay", group["weight_decay"])
            given = group["extra_features"]
            if (given is None) != (self.mlp.extra_features == 0):
                raise ValueError(
                    f"extra_features must be given for a network that has some and for no other: "
                    f"this one has {self.mlp.extra_features}, got {given!r}"
                )
            if isinstance(given, Tensor):
                check_extra(self.mlp, group["params"], [given] * len(group["params"]))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._forget_plans()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("mlp", "backend", "max_grad_norm", "skip_nonfinite", "_results")
        return super().__getstate__() | {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._parts: list[tuple[Moving, list[int]]] = []
        self._seen: list[Any] = []

    @property
    def grad_norm(self) -> Tensor:
        return self._results_on(self._first_device())[0]

    @property
    def skipped(self) -> Tensor:
        return self._results_on(self._first_device())[1]

    @property
    def skipped_steps(self) -> Tensor:
        return self._results_on(self._first_device())[2]

    def _first_device(self) -> torch.device:
        if self._results is not None:
            return self._results[0].device
        return next(iter(self._all_parameters())).device

    def _results_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._results is None:
            self._results = new_results(device)
        elif self._results[0].device != device:
            norm, skipped, count = (x.to(device) for x in self._results)
            self._results = norm, skipped, count
        return self._results

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        extra = self._extra_features()
        gradients = self._plan(extra)
        if not self._parts:
            return loss
        for part, places in self._parts:
            with current(part.device):
                mine = [g for g in (gradients[place] for place in places) if g is not None]
                part.point(part.gradients_of(mine), self.param_groups)
                part.extra = [extra[place] for place in places] if extra else None
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        squares = None
        if self.skip_nonfinite:
            squares = total_squares([part for part, _ in self._parts])
        for number, (part, _) in enumerate(self._parts):
            device = part.device
            results = new_results(device) if number else self._results_on(device)
            with current(device):
                part.move(Step(on(device, squares), on(device, scale), on(device, found), *results))
            # Whoever sets gradients to None gets their memory back.
            part.gradients = []
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of such an optimizer; statistics keep their dtypes."""
        given: dict[str, Any] = {}

        def check(_: Any, adapted: dict[str, Any]) -> None:
            for saved, group in zip(adapted["param_groups"], self.param_groups, strict=False):
                for number, p in zip(saved["params"], group["params"], strict=False):
                    check_state(adapted["state"].get(number, {}), p, number)
            given.update(adapted)

        def take(_: Any) -> None:
            # Once more, without torch's casts to the parameters' dtypes.
            numbers = (k for group in given["param_groups"] for k in group["params"])
            for number, p in zip(numbers, self._all_parameters(), strict=True):
                state = given["state"].get(number, {})
                if state:
                    for name, fresh in new_statistics(p.detach())._asdict().items():
                        self.state[p][name] = fresh.copy_(torch.as_tensor(state[name]))
            for group, mine in zip(self.param_groups, callables, strict=True):
                group["extra_features"] = mine
            self._forget_plans()

        callables = [group["extra_features"] for group in self.param_groups]
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it, without the callers' extra features and the network, which
        has a state dict of its own.
        """
        found = super().state_dict()
        for group in found["param_groups"]:
            group["extra_features"] = None
        return found

    def _all_parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _extra_features(self) -> dict[int, Tensor]:
        """What the callers add in this step, by the places of parameters that have a gradient."""
        found: dict[int, Tensor] = {}
        place = 0
        for group in self.param_groups:
            given = group["extra_features"]
            for p in group["params"]:
                if given is not None and p.grad is not None:
                    x = given if isinstance(given, Tensor) else given(p)
                    check_extra(self.mlp, [p], [x])
                    found[place] = x
                place += 1
        return found

    def _plan(self, extra: dict[int, Tensor]) -> list[Tensor | None]:
        """Make sure that the plans are of these parameters, gradients and states; returns all
        gradients.
        """
        flat = self._all_parameters()
        gradients = [p.grad for p in flat]
        try:
            kinds = [None if g is None else (g.dtype, g.stride(), g.is_neg()) for g in gradients]
        except RuntimeError:
            # Sparse ones have no strides.
            self._check(flat, gradients)
            raise
        # What addresses and launches were planned for.
        seen = [
            [(p.data_ptr(), p.dtype, p.stride()) for p in flat],
            kinds,
            [group["maximize"] for group in self.param_groups],
            [(x.dtype, x.device) for x in self.mlp.parameters()],
            [x.ndim for x in extra.values()],
        ]
        if self._seen and seen == self._seen[:-1] and self._kept(flat) == self._seen[-1]:
            return gradients
        self._check(flat, gradients)
        found: dict[tuple[torch.device, bool], list[Moved]] = {}
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                g = gradients[place]
                if g is not None:
                    sign = -1.0 if group["maximize"] else 1.0
                    member = Moved(place, p.detach(), self._statistics_of(p), number, sign, g.dtype)
                    key = p.device, self._uses_triton(p, g, extra.get(place))
                    found.setdefault(key, []).append(member)
                place += 1
        self._parts = []
        rules = LearnedRules(self.mlp, self.max_grad_norm, len(self.param_groups))
        for (device, with_kernels), members in found.items():
            make = launchers().LearnedPart if with_kernels else ReferencePart
            with current(device):
                part = make(members, rules, device)
            self._parts.append((part, [member.place for member in part.members]))
        # With the states that have just been made.
        self._seen = [*seen, self._kept(flat)]
        return gradients

    def _check(self, flat: list[Tensor], gradients: list[Tensor | None]) -> None:
        for p, g in zip(flat, gradients, strict=True):
            if g is not None:
                check_gradient(p, g)

    def _kept(self, flat: list[Tensor]) -> list[tuple[int, ...]]:
        """Which tensors the state is."""
        return [tuple(map(id, self.state.get(p, {}).values())) for p in flat]

    def _uses_triton(self, p: Tensor, g: Tensor, extra: Tensor | None) -> bool:
        if not uses_triton(p, self.backend):
            return False
        obstacle = network_obstacle(self.mlp, p.device) or tensor_obstacle(p)
        if g.dtype not in KERNEL_DTYPES:
            obstacle = f"the kernels take gradients of float32, bfloat16 and float16, not {g.dtype}"
        if extra is not None and extra.ndim > 1:
            obstacle = "the kernels take extra features of whole tensors, not of elements"
        if obstacle is not None:
            decline(obstacle, self.backend)
        return obstacle is None

    def _statistics_of(self, p: Tensor) -> Statistics:
        state = self.state[p]
        if not state:
            state.update(new_statistics(p.detach())._asdict())
        kept = Statistics(*(state[name] for name in Statistics._fields))
        wanted = meta_statistics(p)
        same = all(
            (x.dtype, x.device, x.stride()) == (y.dtype, p.device, y.stride())
            for x, y in zip(kept, wanted, strict=True)
        )
        if not same:
            # Others may have put it there, or given the parameter other memory since.
            check_state(state, p, 0)
            fresh = new_statistics(p.detach())
            for new, old in zip(fresh, kept, strict=True):
                new.copy_(old)
            state.update(fresh._asdict())
            kept = fresh
        return kept
