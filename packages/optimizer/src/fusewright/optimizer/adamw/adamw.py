r"""AdamW over all parameters at once. With g the gradient, unscaled and clipped, and t the count of
steps that were taken:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

On a GPU one small launch decides whether the step is taken and prepares its numbers, and one more
for each combination of dtypes updates every element; where gradients are clipped, a launch before
them adds their squares. All that a step depends on is on the device: a captured step follows
schedules that write to tensors, and the host waits for nothing. Arithmetic is fp32, the numbers of
a step and the norm fp64.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from .._core.backends import Backend
from ..common.checks import check_adamw_group, check_adamw_state, check_storage
from ..common.contract import as_it_is, keep_rate_on_device, loss_of
from ..common.placement import current, is_dense
from ..common.planned_optimizer import PlannedOptimizer
from . import launch
from .members import Member, Rules, StateFormat
from .reference import ReferencePart

Tensor = torch.Tensor
Rounding = Literal["nearest", "stochastic", "remainder"]


class AdamW(PlannedOptimizer):
    """torch.optim.AdamW's formula, contract and state dict, in one launch for all parameters of a
    dtype.

    Args:
        params: tensors, parameter groups or named parameters, as torch's optimizers take them, of
            fp32, bf16 or fp16. Plain torch updates fp64 parameters and those with gaps in their
            memory; complex ones are pairs of real numbers, DTensors their local shards.
        lr, betas, eps, weight_decay: numbers, or 0-d tensors on the parameters' device in fp32 or
            fp64, which a step reads there. A number that has changed is uploaded by the next step;
            ``refresh`` does it between replays of a captured one.
        amsgrad: the denominator takes the greatest exp_avg_sq so far.
        maximize: ascend.
        decoupled_weight_decay: False adds weight_decay p to the gradient, as torch.optim.Adam does.
            An option of groups, as torch.optim.Adam has it: a state dict that has it sets it.
        capturable: make lr a tensor on the device of a group's first parameter, so that
            learning-rate schedulers reach a captured step.
        max_grad_norm: scale all gradients down to this norm over all parameters, of all shards and
            devices. The gradients themselves are left as they are.
        skip_nonfinite: skip a step whose gradients are not finite, or so large, after clipping,
            that their squares may not be: whose norm is 2^63 or more, of states in fp64 alone
            2^511. Clipping implies it; without clipping it costs one more reading of the gradients.
        state_dtype: of exp_avg and exp_avg_sq, float32 or bfloat16; the parameter's where left out,
            of fp16 parameters fp32.
        rounding: of bf16 parameters: "nearest"; "stochastic", up or down at random, bf16 state
            too; or "remainder": the 16 bits that bf16 lacks are kept as state, so that parameters
            are updated as in fp32.
        seed: of stochastic rounding.
        backend: "auto" takes the kernels for CUDA parameters and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Attributes:
        grad_norm: of the last step, 0-d fp32 on the device of the first parameter that has a
            gradient; NaN before one and where no norm is taken.
        skipped: whether the last step was skipped, 0-d bool there.
        skipped_steps: how many steps were skipped, 0-d int64 there.

    A skipped step leaves everything as it was, counts of steps included. With a
    ``torch.amp.GradScaler`` unscaling happens inside the step and a scaler's skip is one.

    Raises:
        TypeError: a parameter is no floating or complex strided tensor; a gradient is sparse.
        ValueError: an option is out of its range, there are no parameters, a gradient or a loaded
            state has another shape or device than its parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    _kinds = ReferencePart, launch.KernelPart
    copied: tuple[str, ...] = (
        *PlannedOptimizer.copied,
        *("state_dtype", "rounding", "seed", "_state_format"),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        capturable: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        self._prepare(max_grad_norm, skip_nonfinite, backend)
        check_storage(state_dtype, rounding, seed)
        self.state_dtype: torch.dtype | None = state_dtype
        self.rounding: Rounding = rounding
        self.seed: int = seed
        self._state_format = StateFormat(state_dtype, rounding)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            capturable=capturable,
        )
        super().__init__(params, defaults)

    @property
    def decoupled_weight_decay(self) -> bool:
        """Whether weight decay is decoupled in every group."""
        return all(group["decoupled_weight_decay"] for group in self.param_groups)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adamw_group(group)
        keep_rate_on_device(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Of a pickle from before it was an option of groups.
        decoupled = state.get("decoupled_weight_decay", True)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", decoupled)
            for name in ("amsgrad", "maximize", "capturable"):
                group.setdefault(name, False)

    @as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None if closure is None else loss_of(closure)
        self._move_all()
        return loss

    def _move_all(self) -> None:
        """The step itself, without torch's hooks."""
        gradients = self._plan(
            [
                (group["amsgrad"], group["maximize"], group["decoupled_weight_decay"])
                for group in self.param_groups
            ]
        )
        if not self._parts:
            self._clear_results()
            return
        self._point(gradients)
        for part, step in self._steps(getattr(self, "found_inf", None)):
            with current(part.device):
                part.move(step)
            # Gradients that are set to None are freed.
            part.gradients = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Upload the groups' numbers where they have changed: between replays of a captured step,
        for a schedule that writes numbers rather than tensors. It reaches captures whose numbers
        were those of the step before; a capture that found others keeps them.
        """
        for part, _ in self._parts:
            with current(part.device):
                part.point_numbers(self.param_groups)

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Of this optimizer, of torch.optim.AdamW or of torch.optim.Adam."""
        check_adamw_state(saved, self.param_groups)
        return saved

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            for name, value in state.items():
                # Another optimizer cast these bits, and updated the parameter without them.
                if name != "remainder" or not value.is_floating_point():
                    self.state[p][name] = self._state_format.converted(name, value, p)
        for group, was in zip(self.param_groups, before, strict=True):
            group["capturable"] = was["capturable"]
            keep_rate_on_device(group)

    def _member(self, p: Tensor, g: Tensor, place: int, number: int, mesh: int) -> Member:
        state, group = self.state[p], self.param_groups[number]
        return self._state_format.member(p, g, state, group, place, number, mesh)

    def _squared(self, member: Member) -> Sequence[torch.dtype]:
        return (member.key.state,)

    def _obstacle(self, member: Member) -> str | None:
        return None if is_dense(member.p) else "a parameter has gaps in its memory"

    def _apart(self, member: Member) -> Any:
        return self._is_decoupled(member)

    def _is_decoupled(self, member: Member) -> bool:
        return bool(self.param_groups[member.group]["decoupled_weight_decay"])

    def _rules(self, members: list[Any]) -> Rules:
        return Rules(
            len(self.param_groups),
            self._is_decoupled(members[0]),
            self.rounding,
            self.seed,
            self.max_grad_norm,
        )
