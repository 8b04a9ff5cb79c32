"""What one parameter is to an optimizer's step: its local, real, flat memory and that of its state.

DTensors are taken by their local shards, complex parameters as pairs of real numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._tables import same

Tensor = torch.Tensor
# Of the tensors that may stand for a group's numbers.
NUMBER_DTYPES = (torch.float32, torch.float64)


class Rules(NamedTuple):
    """What holds of all parameters of an optimizer.

    Attributes:
        groups: how many there are.
        decoupled: weight decay apart from the gradient.
        rounding: of bf16 parameters: "nearest", "stochastic" or "remainder".
        seed: of stochastic rounding.
        max_grad_norm: None where gradients are not clipped.
    """

    groups: int
    decoupled: bool
    rounding: str
    seed: int
    max_grad_norm: float | None


class Kind(NamedTuple):
    """What decides which launch serves a parameter."""

    parameter: torch.dtype
    gradient: torch.dtype
    state: torch.dtype
    amsgrad: bool
    remainder: bool
    # Which of the meshes, 0 for none.
    mesh: int


class Member(NamedTuple):
    """A parameter and its state, as flat memory.

    Attributes:
        place: of the parameter among all of the optimizer.
        p: its local memory.
        buffers: exp_avg, exp_avg_sq, max_exp_avg_sq and remainder, None where there is none.
        step: how many steps it has taken, 0-d fp32.
        group: index of its parameter group.
        sign: -1 where the objective is maximized.
        kind: which launch serves it.
        mesh: (mesh, sharded axes) of a DTensor, None of any other.
    """

    place: int
    p: Tensor
    buffers: tuple[Tensor | None, ...]
    step: Tensor
    group: int
    sign: float
    kind: Kind
    mesh: Any


class Step(NamedTuple):
    """What holds of one step on one device.

    Attributes:
        squares: shares of the squared norm of all gradients, scaled as they are; None: not wanted.
        grad_scale, found_inf: torch.amp.GradScaler's; None without one.
        norm: gets the norm, 0-d fp32.
        skipped: gets whether the step was skipped, 0-d bool.
        skipped_count: counts such, 0-d int64.
    """

    squares: Tensor | None
    grad_scale: Tensor | None
    found_inf: Tensor | None
    norm: Tensor
    skipped: Tensor
    skipped_count: Tensor


def is_distributed(x: Tensor) -> bool:
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """The memory of this process, as real numbers."""
    if is_distributed(x):
        x = x._local_tensor  # type: ignore[attr-defined]
    return torch.view_as_real(x) if x.is_complex() else x


def mesh_of(x: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a DTensor and its axes that shard it; None of another tensor."""
    if not is_distributed(x):
        return None
    placements = x.placements  # type: ignore[attr-defined]
    # Whatever shards: FSDP2's shards of what is sharded already are no torch Shard.
    sharded = tuple(axis for axis, how in enumerate(placements) if not how.is_replicate())
    return x.device_mesh, sharded  # type: ignore[attr-defined]


def placed_like(g: Tensor | None, p: Tensor) -> Tensor | None:
    """A DTensor's gradient where the parameter is: what is to be added over processes is."""
    if g is None or not (is_distributed(g) and is_distributed(p)):
        return g
    placements = p.placements  # type: ignore[attr-defined]
    if g.placements == placements:  # type: ignore[attr-defined]
        return g
    return g.redistribute(placements=placements)  # type: ignore[attr-defined]


def serves(x: Tensor, p: Tensor, name: str, dtype: torch.dtype) -> bool:
    """Whether a piece of state is as a step takes it beside its parameter."""
    if (x.dtype, x.device) != (dtype, p.device):
        return False
    if name == "step":
        return not x.shape
    mine = local(p)
    return not is_dense(mine) or local(x).stride() == mine.stride()


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of axes."""
    expected = 1
    axes = zip(x.stride(), x.shape, strict=True)
    for stride, length in sorted((s, n) for s, n in axes if n != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= length
    return True


def laid_out_like(x: Tensor, p: Tensor) -> Tensor:
    """x in the order of p's memory."""
    if x.stride() == p.stride() and not x.is_neg():
        return x
    return torch.empty_like(p, dtype=x.dtype).copy_(x)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device the current one, on which plans allocate and launch."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def on(device: torch.device, x: Tensor | None) -> Any:
    """x on the device; None for None. No card is waited for but by a CPU, which would read memory
    that is not written yet.
    """
    return None if x is None else x.to(device, non_blocking=device.type != "cpu")


class Part:
    """Members on one device that are moved in one way.

    Attributes:
        members: in the order in which gradients are given.
        gradients: of a step, while it is taken.
    """

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        self.members, self.rules, self.device = members, rules, device
        self.gradients: list[Tensor] = []
        # Whether gradients are memory in the order of the parameters' as they come.
        self.plain = False

    def gradients_of(self, given: list[Tensor]) -> list[Tensor]:
        """Their memory, in the order of the parameters'."""
        if self.plain:
            return given
        found = [
            laid_out_like(local(g), member.p) for g, member in zip(given, self.members, strict=True)
        ]
        # The kinds of gradients that a plan has seen do not change.
        self.plain = same(found, given)
        return found


def group_numbers(groups: list[dict], device: torch.device) -> list[float | Tensor]:
    """lr, both betas, eps and weight decay of each group: numbers, or tensors on this device."""
    return [
        number_on(device, x)
        for group in groups
        for x in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    ]


def number_on(device: torch.device, x: Any) -> float | Tensor:
    """x itself where it is a tensor that kernels read on this device, else its value."""
    # What somebody has put there since; kernels read fp32 and fp64.
    on_device = torch.is_tensor(x) and x.device == device and x.dtype in NUMBER_DTYPES
    return x if on_device else float(x)
