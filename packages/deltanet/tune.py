"""The launches of the rule and of the short convolution and their candidates: ``python -m
fusewright_testkit.tune deltanet``.

The fastest lines go to the launch modules of ``rule`` and of ``convolution``. One line changes at a
time, the others are as committed; the pass that the kernel belongs to is timed as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fusewright.deltanet.convolution import launch as convolution
from fusewright.deltanet.convolution.short_convolution import short_convolution
from fusewright.deltanet.rule import launch, launch_backward, launch_step
from fusewright_testkit import Case
from fusewright_testkit.bench import load
from fusewright_testkit.cases import by_pass, described
from fusewright_testkit.tune import Tables, Tuning, lines

bench = load(pathlib.Path(__file__).parent)
MODEL, LONG, NARROW, WIDE = bench.RULES
# What the carried state is cut into depends on how many rows and heads there are.
SERIAL = (MODEL, LONG, NARROW, WIDE, dict(B=4, T=4096, H=16, D=128))
CHECKED = dict(B=2, T=130, H=4)
# Of a convolution: many programs, a few and hardly any.
CONVOLUTIONS = tuple(dict(B=b, T=t, H=8, D=128) for b, t in ((4, 4096), (1, 4096), (1, 512)))
TAPS = 4


class Kind(NamedTuple):
    """A line of the tables: its module and name, and the sizes at which it is timed."""

    module: ModuleType
    table: str
    sizes: tuple[dict[str, int], ...]


KINDS = {
    "prepare": Kind(launch, "PREPARE", (MODEL, NARROW)),
    "states": Kind(launch, "STATES", SERIAL),
    "outputs": Kind(launch, "OUTPUTS", (MODEL, NARROW)),
    "local": Kind(launch_backward, "LOCAL", (MODEL, NARROW)),
    "state_gradients": Kind(launch_backward, "STATE_GRADIENTS", SERIAL),
    "inputs": Kind(launch_backward, "INPUTS", (MODEL, NARROW)),
    "through": Kind(launch_backward, "THROUGH", (MODEL, NARROW)),
    "step": Kind(launch_step, "STEP_BLOCK_V", bench.STEPS),
}


def tunings() -> list[Tuning]:
    of_rule = [rule_tuning(kind, sizes) for kind in KINDS for sizes in KINDS[kind].sizes]
    return of_rule + [
        convolution_tuning(sizes, unit, backward=backward)
        for sizes, unit, backward in itertools.product(CONVOLUTIONS, (True, False), (False, True))
    ]


def rule_tuning(kind: str, sizes: dict[str, int]) -> Tuning:
    module, table, _ = KINDS[kind]
    case_of = bench.step_case if kind == "step" else bench.rule_case
    return Tuning(
        names=dict(kind=kind, case=described(sizes)),
        case=dataclasses.replace(case_of(sizes), sample=case_of(sizes | CHECKED).inputs),
        op=bench.our_step if kind == "step" else bench.our_rule,
        module=module,
        candidates=lines(candidates(kind, sizes["D"]), table),
        backward=module is launch_backward,
        column="line",
    )


def candidates(kind: str, width: int) -> Iterator[Any]:
    """Candidates for the place of the committed line, or for that of all lines."""
    if kind == "step":
        yield from (8, 16, 32, 64)
    elif kind in ("states", "state_gradients"):
        for block_v, warps, stages in itertools.product((16, 32, 64), (4, 8), (2, 3, 4)):
            if block_v <= width:
                yield (launch.SerialConfig(block_v, warps, stages),)
    else:
        module, table, _ = KINDS[kind]
        blocks = (64, 128) if width >= 128 else (64,)
        for block_k, block_v, warps, stages in itertools.product(blocks, blocks, (4, 8), (1, 2, 3)):
            yield getattr(module, table)._replace(
                block_k=block_k, block_v=block_v, num_warps=warps, num_stages=stages
            )


def convolution_tuning(sizes: dict[str, int], unit: bool, *, backward: bool) -> Tuning:
    """With heads of unit length, as q and k have them, and without, as v."""
    heads = sizes["H"] if unit else 0
    op = functools.partial(short_convolution, bias=None, heads=heads)
    moved = 2 * sizes["B"] * sizes["T"] * sizes["H"] * sizes["D"]
    few = sizes | dict(B=2, T=130)
    case = Case(
        op="short_convolution",
        sizes=sizes | dict(unit=unit),
        dtype=bench.DTYPE,
        reference=functools.partial(op, backend="reference"),
        inputs=functools.partial(convolution_inputs, sizes),
        sample=functools.partial(convolution_inputs, few),
        bytes_moved=by_pass(2 * moved, 3 * moved),
    )
    return Tuning(
        names=dict(kind="backward" if backward else "forward", case=case.described),
        case=case,
        op=functools.partial(op, backend="triton"),
        module=convolution,
        candidates=convolution_lines(backward),
        backward=backward,
        file="tuning-convolution",
        column="line",
    )


def convolution_inputs(sizes: dict[str, int], device: str) -> list[torch.Tensor]:
    """x and weight."""
    channels = sizes["H"] * sizes["D"]
    x = torch.randn(sizes["B"], sizes["T"], channels, device=device, dtype=bench.DTYPE)
    return [x, torch.randn(channels, TAPS, device=device)]


def convolution_lines(backward: bool) -> dict[str, Tables]:
    """Between four numbers of a thread and sixteen; backward, the length of a strip too."""
    table = "CONVOLUTION_BACKWARD" if backward else "CONVOLUTION"
    line = getattr(convolution, table)
    blocks = [
        (elements, warps)
        for elements, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8))
        if 4 <= elements // (32 * warps) <= 16
        and (elements <= 1024 if backward else elements >= 512)
    ]
    values = [(table, line._replace(elements=e, num_warps=warps)) for e, warps in blocks]
    if backward:
        values += [("STRIPS", (length,)) for length in (16, 32, 64, 128)]
    return {f"{name}={value}": {name: value} for name, value in values}
