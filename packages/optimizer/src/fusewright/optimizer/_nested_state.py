"""How DeepNestedOptimizer is saved, loaded and copied: by the order of parameters, on whatever
device they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._adamw_state import keep_rate_on_device
from ._checks import check_state_dict
from ._contract import Contract
from ._group_rates import GroupRates
from ._nested_checks import (
    Options,
    check_directions,
    check_like,
    check_names_of_state,
    check_numbers,
    check_previous,
)
from .hypergradient import ControllerTraining
from .nested_controller import NestedController

Tensor = torch.Tensor
# Of a group, what a loaded one does not change.
FIXED = "name", "depth", "capturable"


class NestedState(Contract):
    """An optimizer with the state of its parameters, of its groups' numbers and of what trains
    them.
    """

    options: Options
    global_step: int
    controller: NestedController
    _rates: GroupRates
    _mode: Any
    _training: ControllerTraining

    def _build(self) -> None:
        """Everything that follows from the groups."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's, by the order of parameters, with the optimizer's own under "nested"."""
        return super().state_dict() | {"nested": self._numbers()}

    def _numbers(self) -> dict[str, Any]:
        """What is of no parameter."""
        rates, continuum = self._rates, self._mode.continuum
        return {
            "global_step": self.global_step,
            "multipliers": rates.multipliers,
            "rates": rates.rates,
            "results": list(self._mode.results),
            "last": self._mode.last(),
            "statistics": rates.statistics,
            "ema_loss": rates.ema_loss,
            "controller": self.controller.state_dict(),
            "training": self._training.state_dict(),
            "continuum": None if continuum is None else continuum.state_dict(),
        }

    @torch.no_grad()
    def _take_numbers(self, kept: dict[str, Any]) -> None:
        """What ``_numbers`` gave, of these groups or of the first of them."""
        rates, continuum = self._rates, self._mode.continuum
        self.global_step = kept["global_step"]
        for name in ("multipliers", "rates", "statistics"):
            value = kept[name]
            getattr(rates, name)[: len(value)].copy_(value)
        rates.ema_loss.copy_(kept["ema_loss"])
        self._mode.put(kept["results"], kept["last"])
        self.controller.load_state_dict(kept["controller"])
        self._training.load_state_dict(kept["training"])
        if continuum is not None and kept["continuum"] is not None:
            continuum.load_state_dict(kept["continuum"])

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Of this optimizer; or, where it moves by AdamW, of AdamW, of this package or of torch,
        which has nothing of the controller.
        """
        check_state_dict(saved, self.param_groups)
        mode, update = self._mode, f'state of update="{self.options.update}"'
        states = [state for _, state in self._states_of(saved)]
        check_names_of_state(update, states, mode.needed, mode.allowed)
        if "nested" in saved or mode.continuum is not None:
            check_like("nested", saved.get("nested"), self._wanted_numbers())
        return saved

    def _wanted_numbers(self) -> dict[str, Any]:
        """What ``_numbers`` gives, to be held against what is loaded: an optimizer in the place of
        its state, and a function where another look is wanted.
        """
        own, continuum = self._numbers(), self._mode.continuum
        own["training"]["optimizer"] = self._training.optimizer
        ps = self._all_parameters()
        if continuum is None:
            return own | {"last": functools.partial(check_numbers, ps)}
        own["continuum"] |= {"trainer": continuum.trainer, "previous": check_previous}
        return own | {"last": functools.partial(check_directions, ps)}

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for group, was in zip(self.param_groups, before, strict=True):
            for name, value in was.items():
                group.setdefault(name, value)
            for name in FIXED:
                group[name] = was[name]
            keep_rate_on_device(group)
        states = (state for _, state in self._states_of(saved))
        loaded = {place: state for place, state in enumerate(states) if state}
        self.state = self._mode.take(self.param_groups, self.state, loaded)
        if "nested" in saved:
            self._take_numbers(saved["nested"])

    def _forget_plans(self) -> None:
        """The modes look themselves whether their plans hold."""

    def _last(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._mode.results

    def __getstate__(self) -> dict[str, Any]:
        own = {"options": self.options, "controller": self.controller, "kept": self._numbers()}
        return torch.optim.Optimizer.__getstate__(self) | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("kept", None)
        torch.optim.Optimizer.__setstate__(self, state)
        if kept is not None:
            self._build()
            self._take_numbers(kept)
