"""The learned optimizers and the same in plain torch as benchmark cases."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fusewright.optimizer import (
    LearnedOptimizer,
    UpdateMLP,
    VeLO,
    VeLONetworks,
    learned_apply,
    learned_init,
    learned_update,
)
from fusewright_testkit import Case

from .steps import SHAPES, Stepped, Tensor, step_case

LEARNED, VELO = "LearnedOptimizer", "VeLO"
RATE, STEPS = 0.1, 10_000


def cases() -> list[Case]:
    """Two sizes in fp32, the smaller in bf16 too."""
    sizes = ("small", torch.float32), ("small", torch.bfloat16), ("medium", torch.float32)
    # Sums over rows and columns read gradients; statistics and the network gradients and
    # parameters, which the network writes; four fp32 numbers of an element are read, written and
    # read again.
    return [
        step_case(op, SHAPES[name], dtype, reference, 6 + 3 * 4 * 4 / dtype.itemsize)
        for op, reference in ((LEARNED, plain_step), (VELO, plain_velo))
        for name, dtype in sizes
    ]


def network(device: torch.device | str) -> UpdateMLP:
    """One whose weights were drawn from a seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return UpdateMLP().to(device).requires_grad_(False)


def plain_step(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters after two steps, in plain torch and in at least fp32."""
    half = len(tensors) // 2
    ps, gs = tensors[:half], tensors[half:]
    mlp = network(ps[0].device)
    mlp = mlp.double() if ps[0].dtype == torch.float64 else mlp
    statistics = learned_init(ps)
    for _ in range(2):
        updates, statistics = learned_update(mlp, ps, gs, statistics, backend="reference")
        ps = tuple(learned_apply(ps, updates, RATE))
    return tuple(ps)


def plain_velo(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters after two steps, in plain torch and in at least fp32."""
    return Stepped(functools.partial(velo, backend="reference"), loss=True)(*tensors)


def velo(parameters: list, **options: Any) -> VeLO:
    p = parameters[0]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        networks = VeLONetworks().to(p.device).requires_grad_(False)
    wide = torch.promote_types(p.dtype, torch.float32)
    return VeLO(parameters, networks.to(wide), STEPS, RATE, **options)


def ours(parameters: list, **options: Any) -> LearnedOptimizer:
    return LearnedOptimizer(parameters, network(parameters[0].device), RATE, **options)


class Compiled:
    """torch.compile's fusion of one tensor's step, for each tensor."""

    def __init__(self, parameters: list) -> None:
        self.parameters, self.mlp = parameters, network(parameters[0].device)
        self.statistics = learned_init(parameters)
        self.one = torch.compile(self.moved, dynamic=False)

    def moved(self, p: Tensor, g: Tensor, statistics: Any) -> Any:
        updates, after = learned_update(self.mlp, [p], [g], [statistics], backend="reference")
        return learned_apply([p], updates, RATE)[0], after[0]

    @torch.no_grad()
    def step(self) -> None:
        for i, p in enumerate(self.parameters):
            moved, self.statistics[i] = self.one(p, p.grad, self.statistics[i])
            p.copy_(moved)


def providers() -> dict[str, dict[str, Stepped]]:
    plain = functools.partial(ours, backend="reference")
    return {
        "fusewright": {LEARNED: Stepped(ours), VELO: Stepped(velo, loss=True)},
        "torch": {
            LEARNED: Stepped(plain, captures=False),
            VELO: Stepped(functools.partial(velo, backend="reference"), captures=False, loss=True),
        },
        "compile": {LEARNED: Stepped(Compiled, captures=False)},
    }
