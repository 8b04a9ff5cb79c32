"""How DeepNestedOptimizer updates parameters by a continuum of momenta; ``adamw_mode`` has the same
methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core.precision import wide, wide_dtype
from ..common.checks import check_gradient
from ..common.contract import clear_results, new_results
from ..common.reference import decide
from ..common.step import Step
from ..common.tables import upload
from .checks import AnyOf, Options
from .continuum import Continuum
from .rates import GroupRates
from .reference import dots_by_group, squares_by_group

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]
Scaler = tuple[Tensor | None, Tensor | None]


class ContinuumMode:
    """Momenta at several frequencies, in plain torch.

    Attributes:
        needed, allowed: names in the state of a parameter.
        directions: the last step's update of a parameter, by its id, where the hypergradient will
            be asked for.
    """

    def __init__(self, groups: Groups, rates: GroupRates, options: Options) -> None:
        self.groups, self.rates, self.max_norm = groups, rates, options.max_grad_norm
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
        self.directions: dict[int, Tensor] = {}
        self.owners: dict[tuple[int, ...], Tensor] = {}

    def allocate(self) -> None:
        """Make the state of parameters that have gradients, and no step."""
        for group in self.groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.continuum.prepare(p.detach(), self.state[p])

    def step(self, t: int, loss: Tensor, updates: bool, keeps: bool, scaler: Scaler) -> None:
        groups = self.groups
        pairs = [
            (number, p)
            for number, group in enumerate(groups)
            for p in group["params"]
            if p.grad is not None
        ]
        for _, p in pairs:
            check_gradient(p, p.grad)
        self.directions = {}
        if not pairs:
            clear_results(self.results)
            return
        numbers = [number for number, _ in pairs]
        ps = [p.detach() for _, p in pairs]
        gs = [p.grad.detach() for _, p in pairs]
        present = tuple(sorted(set(numbers)))
        if present not in self.owners:
            self.owners[present] = upload(present, torch.int32, loss.device)
        squares = squares_by_group(gs, numbers, present)
        both = torch.stack([squares, squares_by_group(ps, numbers, present)]) if updates else None
        self.rates.update(both, self.owners[present], loss, *scaler)
        step = Step(squares, scaler[0], self.rates.found_inf, *self.results)
        factor = decide(step, self.max_norm, loss.device)
        filled = [place for place, p in enumerate(ps) if p.numel()]
        states = [self.state[pairs[place][1]] for place in filled]
        for place, some in zip(filled, states, strict=True):
            self.continuum.prepare(ps[place], some)
        rates, base = self.rates.rates.unbind(), self.rates.base.unbind()
        wide_gradients = [wide(gs[place]) for place in filled]
        directions = self.continuum.step(
            t,
            [ps[place] for place in filled],
            [g * factor.to(g.dtype) for g in wide_gradients],
            states,
            [rates[numbers[place]] for place in filled],
            [groups[numbers[place]]["weight_decay"] for place in filled],
            [base[numbers[place]] for place in filled],
            loss,
            ~step.skipped,
        )
        if keeps:
            for place, d in zip(filled, directions, strict=True):
                if d is not None:
                    self.directions[id(pairs[place][1])] = d

    def follow(self, groups: Groups, state: Any) -> None:
        """Take the optimizer's groups and state as they are now."""
        self.groups, self.state = groups, state

    def last(self) -> dict[str, Any]:
        """The last step: how it updated each parameter, None where it is not known."""
        ps = [p for group in self.groups for p in group["params"]]
        return {"directions": [self.directions.get(id(p)) for p in ps]}

    def put(self, results: Sequence[Tensor], last: dict[str, Any]) -> None:
        """Load ``results`` and ``last()`` of these parameters, or of the first of them."""
        for own, x in zip(self.results, results, strict=True):
            own.copy_(x)
        ps = [p for group in self.groups for p in group["params"]]
        pairs = zip(ps, last["directions"], strict=False)
        # In the order of its memory, which is that of the sum.
        self.directions = {
            id(p): d.to(p.device, wide_dtype(p), copy=True) for p, d in pairs if d is not None
        }

    def wanted_last(self) -> Any:
        """``last()`` for ``check_like``."""
        ps = [p for group in self.groups for p in group["params"]]
        return {"directions": [AnyOf((None, p)) for p in ps]}

    def hypergradient(self, groups: Groups, gradients: Sequence[Tensor | None]) -> Tensor:
        """dL/dm of each group, through the last step: ``[groups]`` in fp64."""
        dots = dots_by_group(
            groups, gradients, lambda p, number: self.directions.get(id(p)), self.rates.device
        )
        return -(self.rates.rates / self.rates.multipliers) * dots

    def take(self, groups: Groups, state: Any, loaded: dict[int, Any]) -> Any:
        ps = [p for group in groups for p in group["params"]]
        for place, pieces in loaded.items():
            p = ps[place]
            for name, value in pieces.items():
                buffer = torch.empty_like(wide(p), memory_format=torch.preserve_format)
                state[p][name] = buffer.copy_(value)
        self.directions = {}
        return state
