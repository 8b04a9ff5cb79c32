"""DeepNestedOptimizer's way of moving parameters by a continuum of momenta, as _nested_modes has it
for AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._adamw_state import clear_results, new_results
from ._checks import check_gradient
from ._group_rates import GroupRates
from ._grouped_adamw import squares_by_group
from ._nested_checks import Options
from ._tables import upload
from .continuum import Continuum
from .hypergradient import dots_by_group, wide

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]


class ContinuumMode:
    """Momenta at several frequencies, in plain torch.

    Attributes:
        needed, allowed: names in the state of a parameter.
        moved: how the last step moved a parameter, by its id; of no use where nobody will ask.
    """

    def __init__(self, groups: Groups, rates: GroupRates, options: Options) -> None:
        self.groups, self.rates, self.most = groups, rates, options.max_grad_norm
        weight = rates.statistics
        self.continuum = Continuum(
            options.frequencies,
            options.preprocessing,
            options.momentum_hidden_dim,
            options.momentum_num_layers,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.needed = self.allowed = self.continuum.buffers
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
            clear_results(self.results)
            return
        norm, skipped, count = self.results
        numbers = [number for number, _ in pairs]
        ps = [p.detach() for _, p in pairs]
        gs = [p.grad.detach() for _, p in pairs]
        present = tuple(sorted(set(numbers)))
        if present not in self.owners:
            self.owners[present] = upload(present, torch.int32, loss.device)
        squares = squares_by_group(gs, numbers, present)
        both = torch.stack([squares, squares_by_group(ps, numbers, present)]) if updates else None
        self.rates.update(both, self.owners[present], loss, scale, found)
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
        """Take the optimizer's groups as they are now."""
        self.groups = groups

    def last(self) -> dict[str, Any]:
        """Of the last step: how it moved each parameter, where that will be asked for."""
        ps = [p for group in self.groups for p in group["params"]]
        return {"directions": [self.moved.get(id(p)) for p in ps]}

    def put(self, results: Sequence[Tensor], last: dict[str, Any]) -> None:
        """Take what ``results`` and ``last()`` were elsewhere, of these parameters or of the first
        of them.
        """
        for mine, x in zip(self.results, results, strict=True):
            mine.copy_(x)
        ps = [p for group in self.groups for p in group["params"]]
        pairs = zip(ps, last["directions"], strict=False)
        # In the order of its memory, which is that of the sum.
        self.moved = {
            id(p): d.to(p.device, torch.promote_types(p.dtype, torch.float32), copy=True)
            for p, d in pairs
            if d is not None
        }

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
