r"""VeLO: an LSTM of every tensor, which sees the losses, the progress of training and the tensor's
statistics, mixes a small perceptron for it out of many, and that makes the update of every element
from 30 features; ``fusewright.optimizer.velo_features`` has the formulas.

On a card one small launch decides whether the step is taken and prepares its numbers, and four more
for each combination of dtypes do what there is for every element: squares over rows and columns;
their means; momenta, the squares of all features and the tensor's moments; those added. The LSTM
and the mixing are torch's products over all tensors together, and one launch more moves all
elements. Where gradients are clipped or such steps skipped, a launch before them adds their
squares. Features exist in registers alone, sums are in a fixed order, and nothing waits for the
host.

Metz et al., VeLO: Training Versatile Learned Optimizers by Scaling Up, arXiv 2211.09760; Janson et
al., PyLO, arXiv 2506.10315.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch

from ._backends import Backend, launchers, without_autocast
from ._learned_base import StatisticsOptimizer, loss_of
from ._learned_parts import Moved, Moving
from ._members import current, on
from ._velo_parts import VeLOMoving, VeLOReferencePart
from .velo_features import (
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
        params: real tensors, parameter groups or named parameters, of fp32, bf16 or fp16; fp64 and
            what has gaps in its memory in plain torch. A group may have ``lr`` and ``weight_decay``
            of its own.
        networks: in fp32 or fp64, on the device of one of the parameters; a step reads their
            weights as they are. ``load_velo`` has the public ones.
        num_steps: how many steps the whole training has. The public networks were trained for up
            to 200 000; the original accumulates gradients where there are more than 150 000.
        lr: what an update is multiplied by, a number or a 0-d tensor on the device; the original
            has none.
        weight_decay: that much of the parameter is added to its gradient, and of its sum of squares
            to the loss, as the original does; it advises 1e-6.
        max_grad_norm: scale all gradients down to this norm over all parameters; the gradients
            themselves are left as they are.
        skip_nonfinite: skip a step whose loss is not finite or whose gradients have no finite norm;
            what clips always does. Other steps spread what is not finite, as the original does.
        backend: "auto" takes the kernels for CUDA parameters and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Attributes:
        grad_norm: of the last step, 0-d fp32 on the device of the first parameter that has a
            gradient; NaN before one and where no norm is taken.
        skipped: whether the last step was skipped, 0-d bool there.
        skipped_steps: how many were, 0-d int64 there.
        losses: ``velo_features.LossStatistics``: the count of steps and the means of losses.

    The state of a parameter: ``step``, ``momenta``, ``square``, ``row`` and ``column`` of
    ``learned_features.Statistics`` in fp32 (fp64 for fp64): 16 bytes for each element, and three
    numbers for each row and column, or of fewer than two axes for each element; and ``lstm``
    ``[2, hidden]``. A skipped step leaves all of it, and ``losses``, as they were. Parameters
    without a gradient or without elements take no part in a step.

    Raises:
        TypeError: a parameter is complex, sparse, distributed or not floating, a gradient is
            sparse, networks are no VeLONetworks or of another dtype, the loss is no number.
        ValueError: an option is out of its range, there are no parameters, a gradient or a loaded
            state has another shape or device than its parameter, the networks are on a device of no
            parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    copied = (*StatisticsOptimizer.copied, "networks", "num_steps", "losses")

    def __init__(
        self,
        params: Iterable,
        networks: VeLONetworks,
        num_steps: int,
        lr: float | Tensor = 1.0,
        weight_decay: float | Tensor = 0.0,
        *,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        backend: Backend = "auto",
    ) -> None:
        if not isinstance(networks, VeLONetworks):
            raise TypeError(f"networks must be VeLONetworks, got {type(networks).__name__}")
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(f"num_steps must be a whole number of at least 1, got {num_steps!r}")
        self.networks, self.num_steps = networks, num_steps
        self.losses = new_loss_statistics(networks.start.device)
        self._prepare(max_grad_norm, skip_nonfinite, backend)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._constants: Constants | None = None

    @torch.no_grad()
    def step(self, loss: Loss | Callable[[], Loss]) -> Loss:  # type: ignore[override]
        """Take one step.

        Args:
            loss: of the batch that the gradients are of, without a scaler's factor: a tensor of one
                element, which the step reads on its device, a number, which a captured step keeps,
                or a closure that computes loss and gradients.

        Returns:
            The loss.
        """
        given = loss_of(loss) if callable(loss) else loss
        check_loss(given)
        kinds = [(x.dtype, x.device) for x in self.networks.parameters()]
        gradients = self._plan([id(self.networks), self.num_steps, kinds])
        if not self._parts:
            self._nothing_moved()
            return given
        home = self.networks.start.device
        with without_autocast(home):
            self._move(gradients, loss_on(home, given))
        return given

    def _move(self, gradients: list[Tensor | None], value: Tensor) -> None:
        """The step for this loss, 0-d fp64 on the networks' device."""
        home = value.device
        self._point(gradients)
        steps = self._steps(self._found(value))
        moments = []
        for part, step in zip(self._halves(), steps, strict=True):
            with current(part.device):
                moments.append(part.see(step))
        with current(home):
            mixed, scales = self._mix(value, moments, on(home, steps[0].skipped))
        start = 0
        for part in self._halves():
            mine = slice(start, start + len(part.members))
            start = mine.stop
            with current(part.device):
                part.apply(on(part.device, mixed[mine]), on(part.device, scales[mine]))
            # Whoever sets gradients to None gets their memory back.
            part.gradients = []

    def _halves(self) -> list[VeLOMoving]:
        return [part for part, _ in self._parts]  # type: ignore[misc]

    def _found(self, value: Tensor) -> Tensor | None:
        """What is above 0 where the step is to be skipped whatever the gradients' norm is."""
        found = getattr(self, "found_inf", None)
        if not self.skip_nonfinite:
            return found
        strange = (~value.isfinite()).float()
        return strange if found is None else strange + on(value.device, found).reshape(())

    def _mix(self, value: Tensor, moments: list[Moments], skipped: Tensor) -> tuple[Tensor, Tensor]:
        """Perceptrons ``[tensors, 159]`` and scales ``[tensors]`` in the order of the parts'
        members; moves the losses' statistics and the LSTM's state.
        """
        home = value.device
        if self.losses.means.device != home:
            self.losses = LossStatistics(*(x.to(home) for x in self.losses))
        constants = self._constants
        if constants is None or constants.fractions.device != home:
            constants = self._constants = constants_on(home, self.num_steps)
        parts = self._halves()
        for part, some in zip(parts, moments, strict=True):
            if part.any_decays:
                with current(part.device):
                    penalty = part.penalty(some)
                value = value + on(home, penalty)
        kept = self.losses
        after = advanced_losses(kept, value, constants.loss_decays)
        everything = Moments(
            *(torch.cat([on(home, x) for x in some]) for some in zip(*moments, strict=True))
        )
        features = tensor_features(
            everything,
            torch.cat([on(home, part.ranks) for part in parts]),
            progress_features(kept.step / self.num_steps, constants.fractions),
            loss_features(after, constants.loss_decays),
        )
        flat = self._all_parameters()
        states = [self.state[flat[place]]["lstm"] for _, places in self._parts for place in places]
        before = torch.stack([on(home, x) for x in states])
        mixed, multipliers, moved = self.networks(features.to(before.dtype), before)
        for old, new in zip(kept, after, strict=True):
            old.copy_(torch.where(skipped, old, new))
        torch._foreach_copy_(states, list(torch.where(skipped, before, moved).unbind()))
        return mixed, scales_of(multipliers, everything)

    def _part(self, members: list[Moved], device: torch.device, with_kernels: bool) -> Moving:
        make = launchers().VeLOPart if with_kernels else VeLOReferencePart
        return make(members, self._rules(self.networks), device)

    def _takes(self, p: Tensor) -> bool:
        # Without elements there are no means.
        return p.numel() > 0

    def _check(self, flat: list[Tensor], gradients: list[Tensor | None]) -> None:
        super()._check(flat, gradients)
        kinds = {x.dtype for x in self.networks.parameters()}
        if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
            raise TypeError(
                f"the networks must be of float32 or float64, got {sorted(map(str, kinds))}"
            )
        home = {x.device for x in self.networks.parameters()}
        devices = {p.device for p, g in zip(flat, gradients, strict=True) if g is not None}
        if devices and (len(home) > 1 or not home <= devices):
            raise ValueError(
                f"the networks must be on one device of parameters with gradients, "
                f"{sorted(map(str, devices))}, got {sorted(map(str, home))}"
            )

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        start = self.networks.start.detach()
        return super()._new_state(p) | {"lstm": start.to(p.device, copy=True)}

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it, with ``losses`` beside it; the networks have a state dict
        of their own.
        """
        return super().state_dict() | {"losses": self.losses._asdict()}

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        losses = saved.get("losses", {})
        for name, wanted in self.losses._asdict().items():
            if name not in losses:
                raise ValueError(
                    f"the state dict must have losses with {name}, got {sorted(losses)}"
                )
            shape = list(torch.as_tensor(losses[name]).shape)
            if shape != list(wanted.shape):
                raise ValueError(f"{name} must have shape {list(wanted.shape)}, got {shape}")
        return super()._checked(saved)

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        super()._take(saved, before)
        for name, kept in self.losses._asdict().items():
            kept.copy_(torch.as_tensor(saved["losses"][name]))


def check_loss(loss: Any) -> None:
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"loss must be a number or a floating tensor of one, got {list(loss.shape)} of "
                f"{loss.dtype}"
            )
    elif isinstance(loss, bool) or not isinstance(loss, Real):
        raise TypeError(
            f"step needs the loss, a number, a tensor of one or a closure, got {loss!r}"
        )


def loss_on(device: torch.device, loss: Loss) -> Tensor:
    """0-d in fp64, without waiting for it."""
    if isinstance(loss, Tensor) and (loss.device.type != "cpu" or device.type == "cpu"):
        return on(device, loss.detach()).double().reshape(())
    return torch.full((), float(loss), dtype=torch.float64, device=device)
