"""How DeepNestedOptimizer is saved, loaded and copied: by the order of parameters, on whatever
device they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ._checks import check_state_dict
from ._group_rates import GroupRates
from ._nested_checks import Options
from .adamw import keep_rate_on_device
from .hypergradient import ControllerTraining
from .nested_controller import NestedController

Tensor = torch.Tensor
# Of a group, what a loaded one does not change.
FIXED = "name", "depth", "capturable"


class NestedState(torch.optim.Optimizer):
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
        self._mode.put(kept["results"])
        self.controller.load_state_dict(kept["controller"])
        self._training.load_state_dict(kept["training"])
        if continuum is not None and kept["continuum"] is not None:
            continuum.load_state_dict(kept["continuum"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this optimizer's; or one of AdamW, of this package or of torch, which has
        nothing of the controller.
        """
        before = [dict(group) for group in self.param_groups]
        given: dict[str, Any] = {}

        def check(_: Any, adapted: dict[str, Any]) -> dict[str, Any]:
            check_state_dict(adapted, self.param_groups)
            given.update(adapted)
            # Moved below, without torch's casts to the parameters' dtypes.
            return {**adapted, "state": {}}

        def take(_: Any) -> None:
            self._take(given, before)

        # Others' hooks may adapt what is loaded before it is looked at, and see what came of it.
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, given: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for group, was in zip(self.param_groups, before, strict=True):
            for name, value in was.items():
                group.setdefault(name, value)
            for name in FIXED:
                group[name] = was[name]
            keep_rate_on_device(group)
        numbers = [k for group in given["param_groups"] for k in group["params"]]
        loaded = {
            place: given["state"][k] for place, k in enumerate(numbers) if k in given["state"]
        }
        self.state = self._mode.take(self.param_groups, self.state, loaded)
        if "nested" in given:
            self._take_numbers(given["nested"])

    def __getstate__(self) -> dict[str, Any]:
        # Nothing else: a scheduler gives its optimizer a step of its own, which no copy may have.
        own = {"options": self.options, "controller": self.controller, "kept": self._numbers()}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("kept", None)
        super().__setstate__(state)
        if kept is not None:
            self._build()
            self._take_numbers(kept)
