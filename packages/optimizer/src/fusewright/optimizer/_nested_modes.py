"""The two ways in which DeepNestedOptimizer moves parameters: by AdamW, and by a continuum of
momenta. Each shows the norm of the gradients and whether the last step was skipped, and says how a
parameter was moved per learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._adamw_state import new_results
from ._checks import check_gradient
from ._group_rates import GroupRates
from ._grouped_adamw import GroupedAdamW, squares_by_group
from ._nested_checks import Options
from ._tables import upload
from .continuum import Continuum
from .hypergradient import adamw_direction, dots_by_group, wide

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]
# What AdamW's groups have of the optimizer's own.
NUMBERS = "betas", "eps", "weight_decay"


class AdamWMode:
    """AdamW over the same parameters and with the same state, its learning rates those of
    ``rates``.
    """

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
        # It holds this step's loss.
        del adamw.control

    def put(self, results: Sequence[Tensor]) -> None:
        """Take what ``results`` were elsewhere."""
        norm, skipped, count = (x.to(self.rates.device, copy=True) for x in results)
        self.adamw._results = norm, skipped, count

    def hypergradient(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """dL/dm of each group, through the last step: ``[groups]`` in fp64."""
        parts = [part for part, _ in self.adamw._parts]
        if len(parts) != 1 or parts[0].squares_of is None or not self.in_place(groups, parts[0]):
            # Where nobody knows what the last step moved it is whatever has state.
            places = [member.place for part in parts for member in part.members]
            moved = set(places) if parts else set(range(len(gradients)))
            chosen = [g if place in moved else None for place, g in enumerate(gradients)]
            dots = dots_by_group(groups, chosen, self.direction)
            return -(self.rates.rates / self.rates.multipliers) * dots
        part = parts[0]
        shares = part.squares_of.dots([gradients[member.place] for member in part.members])
        # Already times the learning rates.
        return -self.rates.by_group(shares, part.owner) / self.rates.multipliers

    def in_place(self, groups: Groups, part: Any) -> bool:
        """Whether the parameters lie where the last step moved them."""
        ps = [p for group in groups for p in group["params"]]
        return all(ps[x.place].data_ptr() == x.p.data_ptr() for x in part.members)

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
        found = self.adamw.state
        self.follow(groups, found)
        return found


class ContinuumMode:
    """Momenta at several frequencies, in plain torch."""

    def __init__(self, groups: Groups, rates: GroupRates, options: Options) -> None:
        self.rates, self.most = rates, options.max_grad_norm
        weight = rates.statistics
        self.continuum = Continuum(
            options.frequencies,
            options.preprocessing,
            options.momentum_hidden_dim,
            options.momentum_num_layers,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.results = new_results(rates.device)
        self.moved: dict[int, Tensor] = {}
        self.owners: dict[tuple[int, ...], Tensor] = {}

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
        pairs = [
            (number, p)
            for number, group in enumerate(groups)
            for p in group["params"]
            if p.grad is not None
        ]
        for _, p in pairs:
            check_gradient(p, p.grad)
        self.moved = {}
        if not pairs:
            return
        numbers = [number for number, _ in pairs]
        ps = [p.detach() for _, p in pairs]
        gs = [p.grad.detach() for _, p in pairs]
        present = tuple(sorted(set(numbers)))
        if present not in self.owners:
            self.owners[present] = upload(present, torch.int32, loss.device)
        squares = squares_by_group(gs, numbers, present)
        both = torch.stack([squares, squares_by_group(ps, numbers, present)]) if updates else None
        self.rates.update(both, self.owners[present], loss, scale, found)
        norm, skipped, count = self.results
        factor = torch.ones_like(squares[0]) if scale is None else 1.0 / scale.double().reshape(())
        whole = squares.sum().sqrt() * factor.abs()
        goes_on = (whole < torch.inf) & (self.rates.found_inf == 0.0)
        norm.copy_(whole)
        skipped.copy_(~goes_on)
        count.add_(~goes_on)
        if self.most is not None:
            factor = factor * (self.most / (whole + 1e-6)).clamp(max=1.0)
        filled = [place for place, p in enumerate(ps) if p.numel()]
        states = [state[pairs[place][1]] for place in filled]
        for place, some in zip(filled, states, strict=True):
            self.continuum.prepare(ps[place], some)
        rates, base = self.rates.rates.unbind(), self.rates.base.unbind()
        found_directions = self.continuum.step(
            t,
            [ps[place] for place in filled],
            [wide(gs[place]) * factor.to(wide(gs[place]).dtype) for place in filled],
            states,
            [rates[numbers[place]] for place in filled],
            [groups[numbers[place]]["weight_decay"] for place in filled],
            [base[numbers[place]] for place in filled],
            loss,
            goes_on,
        )
        if keeps:
            for place, d in zip(filled, found_directions, strict=True):
                if d is not None:
                    self.moved[id(pairs[place][1])] = d

    def follow(self, groups: Groups, state: Any) -> None:
        """Nothing is kept of either."""

    def put(self, results: Sequence[Tensor]) -> None:
        """Take what ``results`` were elsewhere."""
        for mine, x in zip(self.results, results, strict=True):
            mine.copy_(x)

    def hypergradient(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """dL/dm of each group, through the last step: ``[groups]`` in fp64."""
        dots = dots_by_group(groups, gradients, lambda p, number: self.moved.get(id(p)))
        return -(self.rates.rates / self.rates.multipliers) * dots

    def take(self, groups: Groups, state: Any, loaded: dict[int, Any]) -> Any:
        ps = [p for group in groups for p in group["params"]]
        for place, pieces in loaded.items():
            p = ps[place]
            for name, value in pieces.items():
                kept = torch.empty_like(wide(p), memory_format=torch.preserve_format)
                state[p][name] = kept.copy_(value)
        self.moved = {}
        return state
