r"""AdamW over all parameters at once. With g the gradient, unscaled and clipped, and t the count of
steps that were taken:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

On a card one small launch decides whether the step is taken and prepares its numbers, and one more
for each combination of dtypes moves every element; where gradients are clipped, a launch before
them adds their squares. Everything that a step depends on is on the device: a captured step follows
schedules that write to tensors, and nothing waits. Arithmetic is fp32, the numbers of a step and
the norm fp64.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from ._adamw_state import Kept, keep_rate_on_device, new_results
from ._backends import KERNEL_DTYPES, Backend, check_backend, decline, launchers, uses_triton
from ._checks import check_gradient, check_options, check_parameters, check_state_dict
from ._contract import Contract
from ._members import (
    Member,
    Rules,
    Step,
    current,
    is_dense,
    is_distributed,
    local,
    mesh_of,
    on,
    placed_like,
)
from ._parts import total_squares
from ._tables import addresses_of, kinds_of, same
from .reference import ReferencePart

Tensor = torch.Tensor
Rounding = Literal["nearest", "stochastic", "remainder"]


class AdamW(Contract):
    """torch.optim.AdamW's formula, contract and state dict, in one launch for all parameters of a
    dtype.

    Args:
        params: tensors, parameter groups or named parameters, as torch's optimizers take them, of
            fp32, bf16 or fp16; fp64 and what has gaps in its memory in plain torch, complex as
            pairs of real numbers, DTensors by their local shards.
        lr, betas, eps, weight_decay: numbers, or 0-d tensors on the parameters' device in fp32 or
            fp64, which a step reads there. A number that has changed is uploaded by the next step;
            ``refresh`` does it between replays of a captured one.
        amsgrad: the denominator takes the greatest exp_avg_sq so far.
        maximize: ascend.
        decoupled_weight_decay: False adds weight_decay p to the gradient, as torch.optim.Adam does.
        capturable: turn lr into a tensor on the device of a group's first parameter, so that
            learning-rate schedulers reach a captured step.
        max_grad_norm: scale all gradients down to this norm over all parameters, of all shards and
            devices. The gradients themselves are left as they are.
        skip_nonfinite: skip a step whose gradients have no finite norm; what clips always does, and
            what costs one more reading of the gradients elsewhere.
        state_dtype: of exp_avg and exp_avg_sq, float32 or bfloat16; the parameter's where left out,
            of fp16 parameters fp32.
        rounding: of bf16 parameters: "nearest"; "stochastic", up or down by chance, bf16 state too;
            or "remainder": the 16 bits that bf16 lacks are kept as state, so that parameters move
            as in fp32.
        seed: of stochastic rounding.
        backend: "auto" takes the kernels for CUDA parameters and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Attributes:
        grad_norm: of the last step, 0-d fp32 on the device of the first parameter that has a
            gradient; NaN before one and where no norm is taken.
        skipped: whether the last step was skipped, 0-d bool there.
        skipped_steps: how many were, 0-d int64 there.

    A skipped step leaves everything as it was, counts of steps included. With a
    ``torch.amp.GradScaler`` unscaling happens inside the step and a scaler's skip is one.

    Raises:
        TypeError: a parameter is no floating or complex strided tensor; a gradient is sparse.
        ValueError: an option is out of its range, there are no parameters, a gradient or a loaded
            state has another shape or device than its parameter.
        RuntimeError: backend is "triton" and the kernels cannot serve a parameter.
    """

    copied = (
        *("decoupled_weight_decay", "max_grad_norm", "skip_nonfinite", "state_dtype", "rounding"),
        *("seed", "backend", "_kept"),
    )

    def __init__(
        self,
        params: Iterable,
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
        check_backend(backend)
        check_options(max_grad_norm, skip_nonfinite, state_dtype, rounding, seed)
        self.decoupled_weight_decay = decoupled_weight_decay
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.skip_nonfinite = (
            max_grad_norm is not None if skip_nonfinite is None else skip_nonfinite
        )
        self.state_dtype, self.rounding, self.seed = state_dtype, rounding, seed
        self._kept = Kept(state_dtype, rounding)
        self.backend = backend
        self._forget_plans()
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
        )
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_parameters(group)
        keep_rate_on_device(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)
            group.setdefault("capturable", False)

    def _forget_plans(self) -> None:
        # Each with the places of its members' among all parameters; a range where it has all.
        self._parts: list[tuple[Any, Sequence[int]]] = []
        self._flat: list[Tensor] = []
        self._state: list[Any] = []
        self._sharded = False
        self._seen: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move_all()
        return loss

    def _move_all(self) -> None:
        """The step itself, without torch's hooks."""
        gradients = self._plan()
        if not self._parts:
            self._nothing_moved()
            return
        self._keep_captured([part for part, _ in self._parts])
        for part, places in self._parts:
            in_order = isinstance(places, range)
            mine = gradients if in_order else [gradients[place] for place in places]
            with current(part.device):
                part.point(part.gradients_of(mine), self.param_groups)
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        squares = None
        if self.skip_nonfinite:
            squares = total_squares([part for part, _ in self._parts])
        for number, (part, _) in enumerate(self._parts):
            device = part.device
            results = self._results_on(device) if number == 0 else new_results(device)
            with current(device):
                part.move(Step(on(device, squares), on(device, scale), on(device, found), *results))
            # Whoever sets gradients to None gets their memory back.
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
        check_state_dict(saved, self.param_groups)
        return saved

    def _take(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        for p, state in self._states_of(saved):
            for name, value in state.items():
                # Another optimizer has cast these bits, and moved the parameter without them.
                if name != "remainder" or value.dtype == torch.int16:
                    self.state[p][name] = self._kept.own(name, value, p)
        for group, was in zip(self.param_groups, before, strict=True):
            group["capturable"] = was["capturable"]
            keep_rate_on_device(group)

    def _plan(self) -> list[Tensor | None]:
        """Have the plans be of these parameters, gradients and states; returns all gradients."""
        # By identity: others may put parameters and state in the place of these.
        if not same(self._all_state(), self._state):
            self._seen = []
        flat = self._all_parameters()
        if not same(flat, self._flat):
            self._flat, self._seen = flat, []
            self._sharded = any(map(is_distributed, flat))
        gradients = [p.grad for p in flat]
        if self._sharded:
            gradients = list(map(placed_like, gradients, flat))
        given = [g for g in gradients if g is not None]
        try:
            kinds = kinds_of(given)
        except RuntimeError:
            # Sparse ones have no strides.
            self._check(gradients)
            raise
        seen = [
            [(group["amsgrad"], group["maximize"]) for group in self.param_groups],
            self.max_grad_norm,
            addresses_of(map(local, flat) if self._sharded else flat),
            list(map(Tensor.numel, flat)),
            len(given) == len(flat) or [g is None for g in gradients],
            kinds,
        ]
        if seen == self._seen:
            return gradients
        self._check(gradients)
        found: dict[tuple[torch.device, bool], list[Member]] = {}
        # In the order of the parameters, which is the same in every process.
        meshes: list[Any] = [None]
        place = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                g = gradients[place]
                if g is not None:
                    if mesh_of(p) not in meshes:
                        meshes.append(mesh_of(p))
                    mesh = meshes.index(mesh_of(p))
                    member = self._kept.member(p, g, self.state[p], group, place, number, mesh)
                    with_kernels = self._uses_triton(member)
                    found.setdefault((member.p.device, with_kernels), []).append(member)
                place += 1
        rules = Rules(
            len(self.param_groups),
            self.decoupled_weight_decay,
            self.rounding,
            self.seed,
            self.max_grad_norm,
        )
        self._parts = []
        for (device, with_kernels), members in found.items():
            make = launchers().KernelPart if with_kernels else ReferencePart
            with current(device):
                part = make(members, rules, device)
            places, every = [member.place for member in part.members], range(len(flat))
            self._parts.append((part, every if places == [*every] else places))
        # With the states that have just been made.
        self._state, self._seen = self._all_state(), seen
        return gradients

    def _uses_triton(self, member: Member) -> bool:
        if not uses_triton(member.p, self.backend):
            return False
        dtype = member.kind.gradient
        if not is_dense(member.p):
            decline("a parameter has gaps in its memory", self.backend)
        elif dtype not in KERNEL_DTYPES:
            wanted = "the kernels take gradients of float32, bfloat16 and float16"
            decline(f"{wanted}, not {dtype}", self.backend)
        else:
            return True
        return False

    def _check(self, gradients: list[Tensor | None]) -> None:
        for p, g in zip(self._flat, gradients, strict=True):
            if g is not None:
                check_gradient(p, g)
