"""DeepNestedOptimizer's way of moving parameters by AdamW; that by a continuum of momenta is
_nested_continuum's. Each shows the norm of the gradients and whether the last step was skipped, and
says how a parameter was moved per learning rate, which it keeps for a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ._adamw_state import BUFFERS
from ._backends import launchers
from ._group_rates import GroupRates
from ._grouped_adamw import GroupedAdamW, Measured
from ._members import Rules
from ._nested_checks import Options
from ._tables import check_eager, upload
from .continuum import Continuum
from .hypergradient import adamw_direction, dots_by_group

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]
# What AdamW's groups have of the optimizer's own.
NUMBERS = "betas", "eps", "weight_decay"
# Of the last step, where nobody knows: what AdamWMode.last gives.
UNKNOWN: dict[str, Any] = {"gradients": None, "numbers": None}


class AdamWMode:
    """AdamW over the same parameters and with the same state, its learning rates those of
    ``rates``.

    Attributes:
        needed, allowed: names in the state of a parameter.
    """

    needed: Sequence[str] = ("step", "exp_avg", "exp_avg_sq")
    allowed: Sequence[str] = ("step", *BUFFERS)
    continuum: Continuum | None = None

    def __init__(self, groups: Groups, rates: GroupRates, options: Options) -> None:
        self.rates, self.views = rates, rates.rates.unbind()
        given = [{"params": group["params"]} for group in groups]
        self.adamw = GroupedAdamW(
            given,
            max_grad_norm=options.max_grad_norm,
            skip_nonfinite=True,
            state_dtype=options.state_dtype,
            rounding=options.rounding,
            seed=options.seed,
            backend=options.backend,
        )
        # What was loaded of the last step, until it is planned anew or another one is taken.
        self.told: dict[str, Any] | None = UNKNOWN

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.adamw.grad_norm, self.adamw.skipped, self.adamw.skipped_steps

    def follow(self, groups: Groups, state: Any) -> None:
        """Take the optimizer's groups and state as they are now."""
        self.adamw.state = state
        for mine, group, rate in zip(self.adamw.param_groups, groups, self.views, strict=True):
            mine["params"], mine["lr"] = group["params"], rate
            for name in NUMBERS:
                mine[name] = group[name]

    def step(
        self,
        t: int,
        groups: Groups,
        state: Any,
        loss: Tensor,
        updates: bool,
        keeps: bool,
        scale: Tensor | None,
        found: Tensor | None,
    ) -> None:
        """Step t; whether multipliers change in it, and whether the direction is asked for after
        it; a scaler's tensors.
        """
        adamw, rates = self.adamw, self.rates
        adamw.both = updates
        adamw.control = lambda squares, owner: rates.update(squares, owner, loss, scale, found)
        adamw.grad_scale, adamw.found_inf = scale, rates.found_inf
        adamw._move_all()
        self.told = None
        # It holds this step's loss.
        del adamw.control

    def last(self) -> dict[str, Any]:
        """Of the last step, by place: "gradients", the dtypes of those that there were, and
        "numbers", ``[parameters, NUMBERS]`` as the kernels have them, None where plain torch says
        how parameters were moved.
        """
        if self.told is not None:
            return self.told
        part, numbers = self.kernels_part(), None
        gradients = self.gradients()
        if part is not None:
            numbers = part.numbers.new_zeros(len(gradients), part.numbers.shape[1])
            places = [member.place for member in part.members]
            numbers[upload(places, torch.int64, numbers.device)] = part.numbers
        return {"gradients": gradients, "numbers": numbers}

    def put(self, results: Sequence[Tensor], last: dict[str, Any]) -> None:
        """Take what ``results`` and ``last()`` were elsewhere, of these parameters or of the first
        of them.
        """
        for mine, x in zip(self.adamw._results_on(self.rates.device), results, strict=True):
            mine.copy_(x)
        numbers = last["numbers"]
        if numbers is not None:
            numbers = numbers.to(self.rates.device, torch.float32, copy=True)
        self.told = {"gradients": last["gradients"], "numbers": numbers}

    def hypergradient(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """dL/dm of each group, through the last step: ``[groups]`` in fp64."""
        self.plan_told()
        part = self.kernels_part()
        if part is None:
            # Where nobody knows what the last step moved it is whatever has state.
            moved = self.gradients() if self.told is None else self.told["gradients"]
            if moved is not None:
                pairs = itertools.zip_longest(gradients, moved)
                gradients = [None if dtype is None else g for g, dtype in pairs]
            dots = dots_by_group(groups, gradients, self.direction)
            return -(self.rates.rates / self.rates.multipliers) * dots
        shares = part.squares_of.dots([gradients[member.place] for member in part.members])
        # Already times the learning rates.
        return -self.rates.by_group(shares, part.owner) / self.rates.multipliers

    def gradients(self) -> list[torch.dtype | None]:
        """Of each parameter the dtype of the gradient that the last step took."""
        found: list[torch.dtype | None] = [None for _ in self.adamw._all_parameters()]
        for part, _ in self.adamw._parts:
            for member in part.members:
                found[member.place] = member.kind.gradient
        return found

    def kernels_part(self) -> Any:
        """What the last step moved; None where kernels do not know of all of it, or where it is no
        longer.
        """
        parts = [part for part, _ in self.adamw._parts]
        if len(parts) != 1 or parts[0].squares_of is None:
            return None
        ps = self.adamw._all_parameters()
        in_place = all(ps[x.place].data_ptr() == x.p.data_ptr() for x in parts[0].members)
        return parts[0] if in_place else None

    def plan_told(self) -> None:
        """Plan the last step as it was, so that its hypergradient has the same bits."""
        told, adamw = self.told, self.adamw
        if told is None or told["numbers"] is None:
            return
        members, known = [], enumerate(told["gradients"])
        for number, group in enumerate(adamw.param_groups):
            # Parameters that were added since are the last.
            for p, (place, dtype) in zip(group["params"], known, strict=False):
                if dtype is not None:
                    state, like = adamw.state[p], torch.empty(0, dtype=dtype)
                    members.append(adamw._kept.member(p, like, state, group, place, number, 0))
        if not all(map(adamw._uses_triton, members)):
            return
        device = self.rates.device
        check_eager(device, "the plan of a loaded step was to be made")
        rules = Rules(
            len(adamw.param_groups),
            adamw.decoupled_weight_decay,
            adamw.rounding,
            adamw.seed,
            adamw.max_grad_norm,
        )
        part = launchers().KernelPart(members, rules, device)
        places = [member.place for member in part.members]
        part.numbers.copy_(told["numbers"][upload(places, torch.int64, device)])
        adamw._parts = [(Measured(part, adamw), places)]
        self.told = None

    def direction(self, p: Tensor, number: int) -> Tensor | None:
        state = self.adamw.state.get(p)
        if not state:
            return None
        group = self.adamw.param_groups[number]
        return adamw_direction(p, state, group, self.views[number])

    def take(self, groups: Groups, state: Any, loaded: dict[int, Any]) -> Any:
        """A loaded state, by place; returns it by parameter."""
        places = iter(range(sum(len(group["params"]) for group in groups)))
        numbered = [
            {**group, "params": [next(places) for _ in group["params"]]}
            for group in self.adamw.param_groups
        ]
        self.adamw.load_state_dict({"state": loaded, "param_groups": numbered})
        self.told = UNKNOWN
        found = self.adamw.state
        self.follow(groups, found)
        return found
