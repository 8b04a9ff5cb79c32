"""Time every candidate launch of the short convolution on this GPU; the fastest lines go to
``launch.py`` of ``convolution``.

    PYTHONPATH=packages/deltanet/src:ci/testkit/src python packages/deltanet/tune_convolution.py
    --out packages/deltanet/results

Needs a GPU. Both passes are timed with heads of unit length, as q and k have them, and without, as
v. Every candidate is checked before that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import typer
from fusewright.deltanet.convolution import launch
from fusewright.deltanet.convolution.short_convolution import short_convolution
from fusewright_testkit import Yardstick
from fusewright_testkit.timing import copies_needed, graph_time
from tune import ranked, write_table

# Rows, tokens, heads, columns of one: many programs, a few and hardly any.
SIZES = ((4, 4096, 8, 128), (1, 4096, 8, 128), (1, 512, 8, 128))
TAPS = 4


def candidates() -> Iterator[tuple[str, object]]:
    """Candidates for the place of one of the three lines."""
    for elements, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8)):
        # Between four numbers of a thread and sixteen.
        if not 4 <= elements // (32 * warps) <= 16:
            continue
        for name in ("CONVOLUTION", "CONVOLUTION_BACKWARD"):
            line = getattr(launch, name)
            if elements >= 512 if name == "CONVOLUTION" else elements <= 1024:
                yield name, line._replace(elements=elements, num_warps=warps)
    for length in (16, 32, 64, 128):
        yield "STRIPS", (length,)


@contextlib.contextmanager
def configured(name: str, line: object) -> Iterator[None]:
    """The launchers with one candidate in place of its line, and no plan made before."""
    launch.convolution_plan.cache_clear()
    with mock.patch.object(launch, name, line):
        yield
    launch.convolution_plan.cache_clear()


def op(heads: int, backend: str) -> Callable[..., torch.Tensor]:
    return functools.partial(short_convolution, bias=None, heads=heads, backend=backend)


def inputs(batch: int, tokens: int, heads: int, width: int) -> list[torch.Tensor]:
    x = torch.randn(batch, tokens, heads * width, device="cuda", dtype=torch.bfloat16)
    return [x, torch.randn(heads * width, TAPS, device="cuda")]


def passes(sizes: tuple[int, ...], unit: bool) -> dict[bool, list[Callable[[], object]]]:
    """Both passes on cold copies of their inputs, the backward ones by themselves."""
    heads, moved = sizes[2] if unit else 0, 3 * 2 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    copies = [inputs(*sizes) for _ in range(copies_needed(moved))]
    backward = launch.convolution_backward
    return {
        False: [functools.partial(op(heads, "triton"), *each) for each in copies],
        True: [
            functools.partial(backward, torch.randn_like(x), x, weight, None, None, heads)
            for x, weight in copies
        ],
    }


def main(out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV")) -> None:
    """Time the candidates and print the best of each size."""
    table = []
    for sizes, unit in itertools.product(SIZES, (True, False)):
        batch, tokens, heads, width = sizes
        timed = passes(sizes, unit)
        small = inputs(2, 130, heads, width)
        yardstick = Yardstick(op(heads if unit else 0, "reference"), small)
        case = f"B={batch} T={tokens} H={heads} D={width} unit={unit}"
        for backward in (False, True):
            names = ("CONVOLUTION_BACKWARD", "STRIPS") if backward else ("CONVOLUTION",)
            lines = [each for each in candidates() if each[0] in names]
            results = []
            for name, line in [(names[0], getattr(launch, names[0])), *lines]:
                with configured(name, line):
                    yardstick.check(op(heads if unit else 0, "triton"))
                    ms = graph_time(timed[backward], replays=7, warm_seconds=0.01).ms
                results.append((ms, f"{name}={line}" if results else "committed"))
            table += ranked("backward" if backward else "forward", case, results, best=3)
    write_table(out, "tuning-convolution", table)


if __name__ == "__main__":
    typer.run(main)
