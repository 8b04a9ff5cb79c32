"""The optimizers as the tests of several take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

MATRICES_AND_OTHERS = ((6, 10), (12, 5), (6, 10), (7,), (), (4, 3, 2), (0, 4), (7,))
STACKED = [(name, backend) for name in ("muon", "m3") for backend in ("reference", "triton")]
STACKED += [("delta", "reference"), ("deep", "reference")]
LEARNED = [(name, backend) for name in ("learned", "velo") for backend in ("reference", "triton")]
ADAMW = [("adamw", "reference"), ("adamw", "triton")]
NAMES = ("adamw", "muon", "m3", "delta", "deep", "learned", "velo")


class Kind:
    """One of the optimizers as the tests of several take it: called with parameters it makes one,
    with options that matter.
    """

    def __init__(self, name: str, backend: str, learned: Any) -> None:
        self.name, self.backend, self.learned = name, backend, learned
        self.by_kernels, self.takes_loss = backend == "triton", name == "velo"
        # The learned optimizers' kernels take long in the interpreter.
        slow = name in ("learned", "velo")
        self.shapes = ((3, 4), (5,), (0, 4)) if slow else MATRICES_AND_OTHERS

    def __call__(self, ps: Sequence[torch.nn.Parameter], **options: Any) -> Any:
        from fusewright import optimizer as ours

        name, device = self.name, ps[0].device.type
        if name in ("delta", "deep"):
            make = ours.DeltaMomentum if name == "delta" else ours.DeepMomentum
            return make(ps, **{"lr": 0.05, "weight_decay": 0.1} | options)
        # The kernels serve no fp64.
        served = self.by_kernels and ps[0].dtype != torch.float64
        options = {"backend": "triton" if served else "reference"} | options
        if name == "adamw":
            return ours.AdamW(ps, **{"lr": 0.1} | options)
        wide = torch.promote_types(ps[0].dtype, torch.float32)
        if name == "learned":
            mlp = self.learned.network(device=device).to(wide)
            return ours.LearnedOptimizer(ps, mlp, **{"lr": 0.5} | options)
        if name == "velo":
            networks = self.learned.velo_networks(device).to(wide)
            return ours.VeLO(ps, networks, 20, **{"lr": 0.2} | options)
        groups = [
            dict(params=[p for p in ps if p.dim() >= 2]),
            dict(params=[p for p in ps if p.dim() < 2], matrix=False),
        ]
        if name == "muon":
            return ours.Muon(groups, **{"lr": 0.05} | options)
        # Firing in between.
        return ours.M3(groups, **{"lr": 0.05, "frequency": 2, "weight_decay": 0.1} | options)

    def losses(self, step: int) -> tuple[float, ...]:
        """What a step takes."""
        return (3.0 - step,) if self.takes_loss else ()

    def go_on(self, training: Any, optimizer: Any, steps: Sequence[int]) -> Any:
        """Take these steps; returns the optimizer."""
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        for step in steps:
            training.give_gradients(ps, step)
            optimizer.step(*self.losses(step))
        return optimizer


def of_kinds(pairs: Sequence[tuple[str, str]], shapes: Any = None) -> Any:
    """A fixture: each of the optimizers; ``training`` then has these shapes or the kind's own."""

    @pytest.fixture(params=pairs, ids="-".join)
    def kind(request: pytest.FixtureRequest, learned: Any, training: Any) -> Kind:
        found = Kind(*request.param, learned)
        training.shapes = shapes or found.shapes
        return found

    return kind
