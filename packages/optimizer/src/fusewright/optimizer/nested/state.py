"""How DeepNestedOptimizer is saved, loaded and copied: by the order of its parameters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ..common.checks import check_adamw_state
from ..common.contract import Contract, keep_rate_on_device
from .checks import (
    AnyOf,
    Options,
    check_decoupled,
    check_like,
    check_names_of_state,
    check_plain,
)
from .controller_training import ControllerTraining
from .nested_controller import NestedController
from .rates import GroupRates

Tensor = torch.Tensor
# The options of a group that a loaded one does not change.
FIXED = "name", "depth", "capturable", "decoupled_weight_decay"


class NestedState(Contract):
    """An optimizer with the state of its parameters, of its groups' rates and of the controller."""

    options: Options
    # As torch has it, for type checkers that do not infer it.
    state: defaultdict[Tensor, Any]
    global_step: int
    controller: NestedController
    _rates: GroupRates
    _mode: Any
    _training: ControllerTraining

    def _build(self) -> None:
        """Make everything that follows from the groups."""
        raise NotImplementedError

    def _own(self) -> dict[str, Any]:
        return {"nested": self._numbers()}

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's, by the order of parameters, with the optimizer's own under "nested"."""
        return super().state_dict()

    def _numbers(self) -> dict[str, Any]:
        """The state that is of no parameter."""
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
    def _take_numbers(self, numbers: dict[str, Any]) -> None:
        """Load ``_numbers`` of these groups, or of the first of them."""
        rates, continuum = self._rates, self._mode.continuum
        self.global_step = numbers["global_step"]
        for name in ("multipliers", "rates", "statistics"):
            value = numbers[name]
            getattr(rates, name)[: len(value)].copy_(value)
        rates.ema_loss.copy_(numbers["ema_loss"])
        self._mode.put(numbers["results"], numbers["last"])
        self.controller.load_state_dict(numbers["controller"])
        self._training.load_state_dict(numbers["training"])
        if continuum is not None and numbers["continuum"] is not None:
            continuum.load_state_dict(numbers["continuum"])

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state dict of this optimizer; or, where it updates by AdamW, of AdamW, of this package
        or of torch, which has no controller.
        """
        check_adamw_state(saved, self.param_groups)
        for group in saved["param_groups"]:
            check_decoupled(group)
            check_plain(group)
        mode, update = self._mode, f'state of update="{self.options.update}"'
        states = [state for _, state in self._states_of(saved)]
        check_names_of_state(update, states, mode.needed, mode.allowed)
        if "nested" in saved or mode.continuum is not None:
            check_like("nested", saved.get("nested"), self._wanted_numbers())
        return saved

    def _wanted_numbers(self) -> dict[str, Any]:
        """``_numbers`` for ``check_like``."""
        own, continuum = self._numbers(), self._mode.continuum
        own["training"]["optimizer"] = self._training.optimizer
        if continuum is not None:
            # As many elements as the network was trained on.
            previous = AnyOf((None, torch.Size([-1])))
            own["continuum"] |= {"trainer": continuum.trainer, "previous": previous}
        return own | {"last": self._mode.wanted_last()}

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
        """The modes check themselves whether their plans fit."""

    def _last(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._mode.results

    def __getstate__(self) -> dict[str, Any]:
        names = "options", "controller", "_theirs"
        own = {name: getattr(self, name) for name in names} | {"kept": self._numbers()}
        return torch.optim.Optimizer.__getstate__(self) | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        numbers = state.pop("kept", None)
        torch.optim.Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", True)
        if numbers is not None:
            self._build()
            self._take_numbers(numbers)
