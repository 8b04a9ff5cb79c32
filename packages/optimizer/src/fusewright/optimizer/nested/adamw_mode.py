"""How DeepNestedOptimizer updates parameters by AdamW; ``continuum_mode`` does it by a continuum of
momenta. Each has the norm of the gradients and whether the last step was skipped, and says how a
parameter was updated per learning rate, which it saves for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.placement import local, mesh_of
from ..common.step import add_over_shards_
from ..common.tables import check_eager, same, upload
from .checks import AnyOf, Options
from .continuum import Continuum
from .grouped_adamw import GroupedAdamW
from .rates import GroupRates
from .reference import adamw_direction, dots_by_group

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]
Scaler = tuple[Tensor | None, Tensor | None]
# The options that AdamW's groups take from the optimizer's.
GROUP_OPTIONS = "betas", "eps", "weight_decay"
# The numbers of a parameter in AdamW's launches.
STEP_NUMBERS = 8
# AdamWMode.last where the last step is not known.
UNKNOWN: dict[str, Any] = {"gradients": None, "numbers": None}


class AdamWMode:
    """AdamW over the same parameters and with the same state, its learning rates those of
    ``rates``.

    Attributes:
        needed, allowed: names in the state of a parameter.
    """

    needed: Sequence[str] = ("step", "exp_avg", "exp_avg_sq")
    allowed: Sequence[str] = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder")
    continuum: Continuum | None = None

    def __init__(self, groups: Groups, rates: GroupRates, options: Options) -> None:
        self.rates, self.views = rates, rates.rates.unbind()
        self.adamw = GroupedAdamW(
            [{"params": group["params"]} for group in groups],
            max_grad_norm=options.max_grad_norm,
            skip_nonfinite=True,
            state_dtype=options.state_dtype,
            rounding=options.rounding,
            seed=options.seed,
            backend=options.backend,
        )
        self.groups = groups
        # The last step as it was loaded, until it is planned again or another one is taken.
        self.loaded: dict[str, Any] | None = UNKNOWN
        # Of which parameters, by place: they may have left their groups since.
        self.last_of: list[Tensor] = []

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.adamw.grad_norm, self.adamw.skipped, self.adamw.skipped_steps

    def follow(self, groups: Groups, state: Any) -> None:
        """Take the optimizer's groups and state as they are now."""
        self.groups, self.adamw.state = groups, state
        for own, group, rate in zip(self.adamw.param_groups, groups, self.views, strict=True):
            own["params"], own["lr"] = group["params"], rate
            for name in GROUP_OPTIONS:
                own[name] = group[name]

    def parameters(self) -> list[Tensor]:
        """As they are grouped now."""
        return [p for group in self.groups for p in group["params"]]

    def allocate(self) -> None:
        """Make the state of parameters that have gradients, and no step."""
        self.adamw._plan()

    def step(self, t: int, loss: Tensor, updates: bool, keeps: bool, scaler: Scaler) -> None:
        """Step t of what was followed.

        Args:
            updates: whether multipliers change in it.
            keeps: whether the hypergradient through it will be asked for.
            scaler: grad_scale and found_inf of a scaler.
        """
        adamw, rates = self.adamw, self.rates
        adamw.both = updates
        adamw.control = lambda squares, owner: rates.update(squares, owner, loss, *scaler)
        adamw.grad_scale, adamw.found_inf = scaler[0], rates.found_inf
        adamw._move_all()
        self.loaded, self.last_of = None, adamw._flat
        # It refers to this step's loss.
        del adamw.control

    def last(self) -> dict[str, Any]:
        """The last step, by place: "gradients", their dtypes, None where there was none, and
        "numbers", the kernels' ``[parameters, STEP_NUMBERS]``, None where plain torch computes how
        parameters were updated.
        """
        ps, last = self.last_of, self.planned_last() if self.loaded is None else self.loaded
        now, gradients, numbers = self.parameters(), last["gradients"], last["numbers"]
        if gradients is None or same(ps, now):
            return last
        if same(ps, now[: len(ps)]):
            # Those that were added since are the last.
            more = len(now) - len(ps)
            if numbers is not None:
                numbers = torch.cat([numbers, numbers.new_zeros(more, numbers.shape[1])])
            return {"gradients": [*gradients, *[None] * more], "numbers": numbers}
        known = dict(zip(map(id, ps), gradients, strict=True))
        return {"gradients": [known.get(id(p)) for p in now], "numbers": None}

    def planned_last(self) -> dict[str, Any]:
        """``last`` by the places that the last step had."""
        gradients: list[torch.dtype | None] = [None for _ in self.last_of]
        for part, _ in self.adamw._parts:
            for member in part.members:
                gradients[member.place] = member.key.gradient
        part, numbers = self.kernels_part(), None
        if part is not None:
            numbers = part.table.new_zeros(len(gradients), part.table.shape[1])
            places = [member.place for member in part.members]
            numbers[upload(places, torch.int64, numbers.device)] = part.table
        return {"gradients": gradients, "numbers": numbers}

    def put(self, results: Sequence[Tensor], last: dict[str, Any]) -> None:
        """Load ``results`` and ``last()`` of these parameters, or of the first of them."""
        for own, x in zip(self.adamw._results_on(self.rates.device), results, strict=True):
            own.copy_(x)
        numbers = last["numbers"]
        if numbers is not None:
            numbers = numbers.to(self.rates.device, torch.float32, copy=True)
        self.loaded = {"gradients": last["gradients"], "numbers": numbers}
        self.last_of = self.parameters()[: len(last["gradients"] or ())]

    def wanted_last(self) -> Any:
        """``last()`` for ``check_like``."""
        count = len(self.parameters())
        gradients = [AnyOf((None, torch.float32))] * count
        numbers = AnyOf((None, torch.Size([count, STEP_NUMBERS])))
        return AnyOf((UNKNOWN, {"gradients": gradients, "numbers": numbers}))

    def hypergradient(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """dL/dm of each group, through the last step: ``[groups]`` in fp64; of DTensors the
        gradients are what this process has.
        """
        self.plan_loaded()
        part = self.kernels_part()
        if part is None:
            # Where it is not known which parameters were updated, all that have state did.
            moved = self.last()["gradients"]
            if moved is not None:
                pairs = zip(gradients, moved, strict=True)
                gradients = [None if dtype is None else g for g, dtype in pairs]
            dots = self.dots(groups, gradients)
            return -(self.rates.rates / self.rates.multipliers) * dots
        partials = part.squares_of.dots([gradients[member.place] for member in part.members])
        # Already times the learning rates.
        dots = self.rates.by_group(partials, part.owner)
        add_over_shards_(dots, part.members[0].mesh)
        return -dots / self.rates.multipliers

    def dots(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """``dots_by_group``, over all shards."""
        meshes = list(map(mesh_of, self.parameters()))
        totals = []
        # In the order of the parameters, which is the same in every process.
        for mesh in dict.fromkeys(meshes):
            its = [g if mesh == own else None for g, own in zip(gradients, meshes, strict=True)]
            totals.append(dots_by_group(groups, its, self.direction, self.rates.device))
            add_over_shards_(totals[-1], mesh)
        return torch.stack(totals).sum(0)

    def kernels_part(self) -> Any:
        """The one part of the last step; None where kernels did not update all parameters, or where
        these have other memory or places since.
        """
        parts = [part for part, _ in self.adamw._parts]
        if len(parts) != 1 or parts[0].squares_of is None:
            return None
        ps = [local(p).data_ptr() for p in self.parameters()]
        in_place = all(ps[x.place : x.place + 1] == [x.p.data_ptr()] for x in parts[0].members)
        return parts[0] if in_place else None

    def plan_loaded(self) -> None:
        """Plan the last step as it was, so that its hypergradient has the same bits."""
        loaded, adamw = self.loaded, self.adamw
        if loaded is None or loaded["numbers"] is None:
            return
        if not same(self.last_of, self.parameters()[: len(self.last_of)]):
            return
        members, known = [], enumerate(loaded["gradients"])
        for number, group in enumerate(adamw.param_groups):
            # Parameters that were added since are the last.
            for p, (place, dtype) in zip(group["params"], known, strict=False):
                if dtype is not None:
                    state, like = adamw.state[p], torch.empty(0, dtype=dtype)
                    members.append(
                        adamw._state_format.member(p, like, state, group, place, number, 0)
                    )
        meshes = {member.mesh for member in members}
        if len(meshes) > 1 or not all(map(adamw._uses_triton, members)):
            return
        device = self.rates.device
        check_eager(device, "the plan of a loaded step was to be made")
        part = adamw._part(members, device, with_kernels=True)
        places = [member.place for member in part.members]
        part.table.copy_(loaded["numbers"][upload(places, torch.int64, device)])
        adamw._parts = [(part, places)]
        self.loaded = None

    def direction(self, p: Tensor, number: int) -> Tensor | None:
        state = self.adamw.state.get(p)
        if not state:
            return None
        group = self.adamw.param_groups[number]
        memories = {name: local(x) for name, x in state.items()}
        return adamw_direction(local(p), memories, group, self.views[number])

    def take(self, groups: Groups, state: Any, loaded: dict[int, Any]) -> Any:
        """A loaded state, by place; returns it by parameter."""
        # Parameters may have moved to other groups since the last step.
        self.follow(groups, state)
        places = iter(range(sum(len(group["params"]) for group in groups)))
        numbered = [
            {**group, "params": [next(places) for _ in group["params"]]}
            for group in self.adamw.param_groups
        ]
        self.adamw.load_state_dict({"state": loaded, "param_groups": numbered})
        self.loaded = UNKNOWN
        state = self.adamw.state
        self.follow(groups, state)
        return state
