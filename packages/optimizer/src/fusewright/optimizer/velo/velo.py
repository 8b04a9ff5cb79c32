r"""VeLO: an LSTM of each tensor, which sees the losses, the progress of training and the tensor's
statistics, mixes a small perceptron for it out of many, and the perceptron makes the update of each
element from 30 features; ``reference`` has the formulas.

On a GPU one small launch decides whether the step is taken and prepares its numbers, and four more
for each combination of dtypes do what depends on all elements: squares over rows and columns; their
means; momenta, the squares of all features and the tensor's moments; the sums of those. The LSTM
and the mixing are torch's products over all tensors together, and one launch more updates all
elements. Where gradients are clipped or nonfinite steps skipped, a launch before them adds their
squares. Features exist in registers alone, sums have a fixed order, and the host waits for nothing.

Metz et al., VeLO: Training Versatile Learned Optimizers by Scaling Up, arXiv 2211.09760; Janson et
al., PyLO, arXiv 2506.10315.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._core.backends import Backend
from .._core.checks import checked_count
from .._core.precision import without_autocast
from ..common.checks import is_number
from ..common.contract import OWN, as_it_is, loss_of
from ..common.placement import current, on
from ..common.sharding import mean_of, mesh_of_all
from ..common.statistics.checks import check_pieces
from ..common.statistics.members import Member
from ..common.statistics.optimizer import StatisticsOptimizer
from . import launch
from .parts import VeLOPart, VeLOReferencePart
from .reference import (
    Constants,
    LossStatistics,
    Moments,
    advanced_losses,
    constants_on,
    loss_features,
    new_loss_statistics,
    progress_features,
    scales_of,
    tensor_features,
)
from .velo_networks import VeLONetworks

Tensor = torch.Tensor
Loss = float | Tensor


class VeLO(StatisticsOptimizer):
    """VeLO as a torch.optim.Optimizer whose every step needs the loss.

    Args:
        params: real tensors, parameter groups or named parameters, of fp32, bf16 or fp16. Plain
            torch updates fp64 parameters and those with gaps in their memory. A group may have
            ``lr`` and ``weight_decay`` of its own.
        networks: in fp32 or fp64, on the device of one of the parameters; a step reads their
            weights as they are. ``load_velo`` has the public ones.
        num_steps: how many steps the whole training has. The public networks were trained for up
            to 200 000; the original accumulates gradients where there are more than 150 000.
        lr: what an update is multiplied by, a number or a 0-d tensor on the device; the original
            has none.
        weight_decay: that much of the parameter is added to its gradient, and of its sum of squares
            to the loss, as the original does; it advises 1e-6.
        max_grad_norm, backend: as ``AdamW`` has them.
        skip_nonfinite: skip a step whose loss is not finite or whose gradients have no finite norm,
            however large, since they are clipped to 1000; max_grad_norm implies it. Without it a
            loss that is not finite reaches all parameters, as in the original.

    Attributes:
        grad_norm, skipped, skipped_steps: as ``AdamW`` has them.
        losses: ``velo.reference.LossStatistics``: the count of steps and the means of losses.

    The state of a parameter: that of ``LearnedOptimizer``, and ``lstm`` ``[2, hidden]``. A skipped
    step leaves all of it, and ``losses``, as they were.
    Parameters without a gradient or without elements take no part in a step. DTensors are taken as
    ``LearnedOptimizer`` takes them; then the loss of a step is the mean of the processes' losses,
    and ``lstm`` and ``losses`` are the same in all of them.

    Raises:
        TypeError: a parameter is complex, sparse, not floating, or sharded otherwise, a gradient is
            sparse, networks are no VeLONetworks or of another dtype, the loss is no number.
        ValueError: an option is out of its range, there are no parameters, a gradient or a loaded
            state has another shape or device than its parameter, the networks are on a device of no
            parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    _kinds = VeLOReferencePart, launch.VeLOKernelPart
    copied: tuple[str, ...] = (*StatisticsOptimizer.copied, "networks", "num_steps", "losses")

    def __init__(
        self,
        params: Iterable[Any],
        networks: VeLONetworks,
        num_steps: int,
        lr: float | Tensor = 1.0,
        weight_decay: float | Tensor = 0.0,
        *,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        if not isinstance(networks, VeLONetworks):
            raise TypeError(f"networks must be VeLONetworks, got {type(networks).__name__}")
        self.networks: VeLONetworks = networks
        self.num_steps: int = checked_count("num_steps", num_steps)
        self.losses: LossStatistics = new_loss_statistics(networks.start.device)
        self._prepare(max_grad_norm, skip_nonfinite, backend)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, OWN: None})

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._constants: Constants | None = None

    @as_it_is
    def step(  # type: ignore[override]
        self,
        loss: Loss | Callable[[], Loss] | None = None,
        *,
        closure: Callable[[], Loss] | None = None,
    ) -> Loss | None:
        """Take one step.

        Args:
            loss: of the batch that the gradients are of, without a scaler's factor: a tensor of one
                element, which the step reads on its device, a number, which a captured step keeps,
                or a closure that computes loss and gradients.
            closure: the same, by torch's name.

        Returns:
            The loss. None where there is none: as torch.distributed.checkpoint calls the first step
            at a learning rate of 0, for the state that is allocated then, with no other effect.
        """
        closure = loss if callable(loss) else closure
        value: Any = loss if closure is None else loss_of(closure)
        allocates = value is None and self._allocates()
        if not allocates:
            check_loss(value)
        placements = [(x.dtype, x.device) for x in self.networks.parameters()]
        gradients = self._plan(id(self.networks), self.num_steps, placements)
        if allocates:
            return None
        if not self._parts:
            self._clear_results()
            return value
        home = self.networks.start.device
        with without_autocast(home):
            mesh = mesh_of_all(self._all_parameters())
            self._move(gradients, mean_of(loss_on(home, value), mesh))
        return value

    def _move(self, gradients: list[Tensor | None], value: Tensor) -> None:
        """The step for this loss, 0-d fp64 on the networks' device."""
        home = value.device
        self._point(gradients)
        steps = self._steps(self._found_inf(value))
        moments = []
        for part, step in steps:
            with current(part.device):
                moments.append(part.advance(step))
        with current(home):
            mixed, scales = self._mix(value, moments, on(home, steps[0][1].skipped))
        start = 0
        for part, _ in self._parts:
            its = slice(start, start + len(part.members))
            start = its.stop
            with current(part.device):
                part.apply(on(part.device, mixed[its]), on(part.device, scales[its]))
            # Gradients that are set to None are freed.
            part.gradients = []

    def _found_inf(self, value: Tensor) -> Tensor | None:
        """Above 0 where the step is skipped for its loss or by a scaler."""
        found_inf = getattr(self, "found_inf", None)
        if not self.skip_nonfinite:
            return found_inf
        nonfinite = (~value.isfinite()).float()
        if found_inf is None:
            return nonfinite
        return nonfinite + on(value.device, found_inf).reshape(())

    def _mix(self, value: Tensor, moments: list[Moments], skipped: Tensor) -> tuple[Tensor, Tensor]:
        """Perceptrons ``[tensors, 159]`` and scales ``[tensors]`` in the order of the parts'
        members; updates the losses' statistics and the LSTM's state.
        """
        home = value.device
        if self.losses.means.device != home:
            self.losses = LossStatistics(*(x.to(home) for x in self.losses))
        constants = self._constants
        if constants is None or constants.fractions.device != home:
            constants = self._constants = constants_on(home, self.num_steps)
        parts: list[VeLOPart] = [part for part, _ in self._parts]
        for part, some in zip(parts, moments, strict=True):
            if part.any_decays:
                with current(part.device):
                    penalty = part.penalty(some)
                value = value + on(home, penalty)
        losses = self.losses
        after = advanced_losses(losses, value, constants.loss_decays)
        all_moments = Moments(
            *(torch.cat([on(home, x) for x in some]) for some in zip(*moments, strict=True))
        )
        features = tensor_features(
            all_moments,
            torch.cat([on(home, part.ranks) for part in parts]),
            progress_features(losses.step / self.num_steps, constants.fractions),
            loss_features(after, constants.loss_decays),
        )
        flat = self._all_parameters()
        states = [self.state[flat[place]]["lstm"] for _, places in self._parts for place in places]
        before = torch.stack([on(home, x) for x in states])
        mixed, multipliers, lstm_states = self.networks(features.to(before.dtype), before)
        for old, new in zip(losses, after, strict=True):
            old.copy_(torch.where(skipped, old, new))
        torch._foreach_copy_(states, list(torch.where(skipped, before, lstm_states).unbind()))
        return mixed, scales_of(multipliers, all_moments)

    def _network(self) -> VeLONetworks:
        return self.networks

    def _member(self, p: Tensor, g: Tensor, place: int, number: int, mesh: int) -> Member | None:
        # Without elements there are no means.
        return super()._member(p, g, place, number, mesh) if p.numel() else None

    def _squared(self, member: Member) -> Sequence[torch.dtype]:
        # They are clipped to 1000 before.
        return ()

    def _check(self, gradients: list[Tensor | None]) -> None:
        super()._check(gradients)
        dtypes = {x.dtype for x in self.networks.parameters()}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
            raise TypeError(
                f"the networks must be of float32 or float64, got {sorted(map(str, dtypes))}"
            )
        home = {x.device for x in self.networks.parameters()}
        devices = {p.device for p, g in zip(self._flat, gradients, strict=True) if g is not None}
        if devices and (len(home) > 1 or not home <= devices):
            raise ValueError(
                f"the networks must be on one device of parameters with gradients, "
                f"{sorted(map(str, devices))}, got {sorted(map(str, home))}"
            )

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        start = self.networks.start.detach()
        return super()._new_state(p) | {"lstm": start.to(p.device, copy=True)}

    def _own(self) -> dict[str, Any]:
        return {"losses": self.losses._asdict()}

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it, with ``losses``; the networks have a state dict of their
        own.
        """
        return super().state_dict()

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        losses = saved.get("losses", {})
        check_pieces(losses, self.losses._asdict(), "the state dict must have losses with")
        return super()._checked(saved)

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        super()._take(saved, before)
        for name, x in self.losses._asdict().items():
            x.copy_(torch.as_tensor(saved["losses"][name]))


def check_loss(loss: Any) -> None:
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"loss must be a number or a floating tensor of one, got {list(loss.shape)} of "
                f"{loss.dtype}"
            )
    elif not is_number(loss):
        raise TypeError(
            f"step needs the loss, a number, a tensor of one or a closure, got {loss!r}"
        )


def loss_on(device: torch.device, loss: Loss) -> Tensor:
    """0-d in fp64, without waiting for it."""
    if isinstance(loss, Tensor) and (loss.device.type != "cpu" or device.type == "cpu"):
        return on(device, loss.detach()).double().reshape(())
    return torch.full((), float(loss), dtype=torch.float64, device=device)
