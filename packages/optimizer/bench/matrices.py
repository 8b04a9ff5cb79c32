"""Muon, M3 and the momenta of Nested Learning as benchmark cases, over the matrices of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fusewright.optimizer import M3, DeepMomentum, DeltaMomentum, Muon
from fusewright_testkit import Case

from .steps import LR, SHAPES, OneByOne, Shapes, Stepped, Tensor, matrices, step_case

MUON = "Muon"
OURS: dict[str, Callable[..., Any]] = {
    MUON: Muon,
    "M3": M3,
    "DeltaMomentum": DeltaMomentum,
    "DeepMomentum": DeepMomentum,
}
# The steps of M3's chunk differ: a captured one does not take the mean time.
CAPTURED = MUON, "DeltaMomentum", "DeepMomentum"
NEWTON_SCHULZ_STEPS = 5
# The last three are served by kernels that take whole tiles, ours and others'.
SAMPLED: Shapes = [(33, 70), (70, 33), (70, 33), (65, 65), (384, 640), (640, 384), (384, 384)]


def cases() -> list[Case]:
    """All at 33.6 M parameters, Muon at 1.01 B too."""
    found = []
    for op in OURS:
        for name in ("small", "large") if op == MUON else ("small",):
            shapes = matrices(SHAPES[name])
            operations = newton_schulz_operations(shapes) if op == MUON else 0
            reference = functools.partial(alone, make=OURS[op])
            # Gradient, parameter and one state; the operands of the products are not counted.
            found.append(step_case(op, shapes, torch.float32, reference, 5, SAMPLED, operations))
    return found


def newton_schulz_operations(shapes: Shapes) -> int:
    """Three products a step: r x r of r x c twice, and one of r x r, for r rows, the fewer."""
    found = 0
    for shape in shapes:
        r, c = sorted(shape)
        found += NEWTON_SCHULZ_STEPS * (2 * 2 * r * r * c + 2 * r**3)
    return found


def alone(*tensors: Tensor, make: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Parameters after two steps, each moved by an optimizer of its own, with Newton-Schulz in
    fp64 where these are.
    """
    options: dict[str, Any] = dict(lr=LR)
    if tensors[0].dtype == torch.float64 and make in (Muon, M3):
        options["ns_dtype"] = None
    return Stepped(lambda ps: OneByOne(ps, functools.partial(make, **options)))(*tensors)


def providers() -> dict[str, dict[str, Stepped]]:
    """Stacked; the same formula matrix by matrix; and torch's Muon."""
    found: dict[str, dict[str, Stepped]] = {"fusewright": {}, "one-by-one": {}}
    for op, make in OURS.items():
        captures = op in CAPTURED
        some = functools.partial(make, lr=LR)
        found["fusewright"][op] = Stepped(some, captures=captures)
        each = functools.partial(OneByOne, make=some)
        found["one-by-one"][op] = Stepped(each, captures=captures)
    if hasattr(torch.optim, "Muon"):
        found["torch"] = {MUON: Stepped(functools.partial(torch.optim.Muon, lr=LR))}
    return found
