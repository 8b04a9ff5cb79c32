r"""The learned optimizer: a small network, the same for all elements of all parameters, makes each
element's update from 28 features of its gradient, value and statistics, 11 of time, and those that
the caller adds; ``reference`` and ``common.statistics.reference`` have the formulas.

On a GPU one small launch decides whether the step is taken and prepares its numbers, and five more
for each combination of dtypes update all parameters: squares over rows and columns; their means;
momenta and the squares of all features; the normalisation, folded into a first layer for each
tensor; the network. Where gradients are clipped or nonfinite steps skipped, a launch before them
adds their squares. Features exist in registers alone, sums have a fixed order, and the host waits
for nothing.

Metz et al., Practical tradeoffs between memory, compute, and performance in learned optimizers,
arXiv 2203.11860; Janson et al., PyLO, arXiv 2506.10315.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._core.backends import Backend
from .._core.precision import without_autocast
from ..common.contract import as_it_is, loss_of
from ..common.placement import current
from ..common.statistics.members import Member
from ..common.statistics.optimizer import StatisticsOptimizer
from . import launch
from .checks import check_extra, network_obstacle
from .learned_update import UpdateMLP
from .reference import ReferencePart

Tensor = torch.Tensor
Extra = Tensor | Callable[[Tensor], Tensor]


class LearnedOptimizer(StatisticsOptimizer):
    """small_fc_lopt's learned optimizer as a torch.optim.Optimizer.

    Args:
        params: real tensors, parameter groups or named parameters, of fp32, bf16 or fp16. Plain
            torch updates fp64 parameters and those with gaps in their memory. A group may have
            options of its own.
        mlp: the network, on the parameters' device; a step reads its weights as they are, so that
            they may be trained. ``load_update_mlp`` has the public ones;
            ``fusewright.optimizer.learned_update`` gives gradients to the weights.
        lr: what an update is multiplied by, a number or a 0-d tensor on the device.
        weight_decay: decoupled, and of the parameter after the update; the network's own training
            had none.
        maximize: ascend.
        extra_features: for a network that has some: ``[extra features]`` on the parameters' device,
            or, of parameters that are not sharded, a tensor that can be broadcast to
            ``[*shape, extra features]``, for which plain torch serves; or a function of a
            parameter, called in each step, that returns such a tensor.
        max_grad_norm, skip_nonfinite, backend: as ``AdamW`` has them.

    Attributes:
        grad_norm, skipped, skipped_steps: as ``AdamW`` has them.

    The state of a parameter: ``step``, ``momenta``, ``square``, ``row`` and ``column`` of
    ``common.statistics.reference.Statistics`` in fp32 (fp64 for fp64): 16 bytes for each element,
    and three numbers for each row and column, or of fewer than two axes for each element. A skipped
    step leaves all of it as it was. Where a parameter is a matrix and the model is in
    maximal-update parametrisation, divide its group's lr by the width multiplier, as MuLO does.

    DTensors are taken where they are whole or sharded by rows, as FSDP2 shards them: plain torch
    moves the shards, with sums over all of them, three all-reduces in a step, and their state is
    sharded as they are where it has their rows. The network must be the same in all processes, and
    the same parameters must have gradients in all of them.

    Raises:
        TypeError: a parameter is complex, sparse, not floating, or sharded otherwise, a gradient is
            sparse, mlp is no UpdateMLP.
        ValueError: an option is out of its range, there are no parameters, a gradient, extra
            features or a loaded state have another shape or device than their parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    _kinds = ReferencePart, launch.KernelPart
    copied: tuple[str, ...] = (*StatisticsOptimizer.copied, "mlp")

    def __init__(
        self,
        params: Iterable[Any],
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
        """Take the arguments that the class names."""
        if not isinstance(mlp, UpdateMLP):
            raise TypeError(f"mlp must be an UpdateMLP, got {type(mlp).__name__}")
        self.mlp = mlp
        self._prepare(max_grad_norm, skip_nonfinite, backend)
        defaults = dict(
            lr=lr, weight_decay=weight_decay, maximize=maximize, extra_features=extra_features
        )
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        extra = group["extra_features"]
        if (extra is None) != (self.mlp.extra_features == 0):
            raise ValueError(
                f"extra_features must be given for a network that has some and for no other: "
                f"this one has {self.mlp.extra_features}, got {extra!r}"
            )
        if isinstance(extra, Tensor):
            check_extra(self.mlp, group["params"], [extra] * len(group["params"]))

    @as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None if closure is None else loss_of(closure)
        extra = self._extra = self._extra_features()
        placements = [(x.dtype, x.device) for x in self.mlp.parameters()]
        gradients = self._plan(id(self.mlp), placements, [x.ndim for x in extra.values()])
        if not self._parts:
            self._clear_results()
            return loss
        self._point(gradients)
        steps = self._steps(getattr(self, "found_inf", None))
        for (part, step), (_, places) in zip(steps, self._parts, strict=True):
            part.extra = [extra[place] for place in places] if extra else None
            with current(part.device), without_autocast(part.device):
                part.move(step)
            # Gradients that are set to None are freed.
            part.gradients, part.extra = [], None
        self._extra = {}
        return loss

    def _network(self) -> UpdateMLP:
        return self.mlp

    def _obstacle(self, member: Member) -> str | None:
        extra = self._extra.get(member.place)
        if extra is not None and extra.ndim > 1:
            return "the kernels take extra features of whole tensors, not of elements"
        return network_obstacle(self.mlp, member.p.device) or super()._obstacle(member)

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        super()._take(saved, before)
        for group, was in zip(self.param_groups, before, strict=True):
            group["extra_features"] = was["extra_features"]

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it, without the callers' extra features and the network, which
        has a state dict of its own.
        """
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group["extra_features"] = None
        return state_dict

    def _extra_features(self) -> dict[int, Tensor]:
        """The callers' features in this step, by the places of parameters that have a gradient."""
        features: dict[int, Tensor] = {}
        place = 0
        for group in self.param_groups:
            extra = group["extra_features"]
            for p in group["params"]:
                if extra is not None and p.grad is not None:
                    x = extra if isinstance(extra, Tensor) else extra(p)
                    check_extra(self.mlp, [p], [x])
                    features[place] = x
                place += 1
        return features
