"""The launches of the pooled update's products over rows for Hopper: when they serve, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import DescribedLaunch, cdiv, in_tiles
from .._core.lazy import lazy_module
from .problem import UpdateProblem

if TYPE_CHECKING:
    from . import kernels_hopper
else:
    kernels_hopper = lazy_module(__package__, "kernels_hopper")

Tensor = torch.Tensor
Tensors = tuple[Any, ...]

# Products that a step adds, DEPTH of the kernel.
DEPTH = 64


class HopperTile(NamedTuple):
    """Tiles of ``rows`` by ``cols``, a ring of ``stages`` steps, registers of a thread that
    multiplies and that copies.
    """

    rows: int = 128
    cols: int = 128
    stages: int = 4
    registers: int = 232
    copying_registers: int = 24


# Of docs/decisions/0006, where it stands beside other rings.
TILE = HopperTile()
# Where the smaller of both outputs has so many tiles for each multiprocessor, or more:
# docs/decisions/0006-rows-h200.csv.
FEWEST_TILES = 1.9


class RowsConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``: what follows the products, of how many
    pairs of operands, of which the right ones are [cols, depth] with ``TRANSPOSED``, and which
    tensors there are beside them.
    """

    KIND: str
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    # Sets of places, of which the second is for the second tensor that is read.
    SETS: int
    # Columns that are read and written at once.
    PART_COLS: int
    REGISTERS: int
    COPYING_REGISTERS: int
    ACTIVATION: str
    PAIRS: int
    TRANSPOSED: bool
    BIAS: bool
    BACKWARD: bool
    SUMS: bool
    # Whether a second tensor is written.
    OTHER: bool
    # Tensors that are read beside the operands.
    LOADS: int
    FROM_LOSS: bool
    # Whether act'' is not zero.
    CURVED: bool


class Operands(NamedTuple):
    """The tensors of a launch: a b + c d, with x and ``other_x``, makes y and ``other``."""

    a: Tensor
    b: Tensor
    y: Tensor
    c: Tensor | None = None
    d: Tensor | None = None
    other: Tensor | None = None
    bias: Tensor | None = None
    x: Tensor | None = None
    other_x: Tensor | None = None
    norm: Tensor | None = None
    dloss: Tensor | None = None
    sums: Tensor | None = None
    losses: Tensor | None = None


class Kind(NamedTuple):
    """One product of the update: its operands, of the tensors that the kernel of the same name in
    kernels.py or kernels_backward.py takes, whether it has ``hidden`` columns or ``width``, and
    constants of the kernel.
    """

    operands: Callable[..., Operands]
    of_hidden: bool
    pairs: int = 1
    transposed: bool = True
    bias: bool = False
    backward: bool = False
    sums: bool = False
    other: bool = False
    # Tensors that are read beside the operands, one more where ``curves`` and act'' is not zero.
    loads: int = 0
    curves: bool = False


def hidden(k, w1, b1, z, h, _):
    return Operands(k, w1, h, other=z, bias=b1)


def residual(h, w2, b2, v, row_weights, e, _, sums, losses):
    return Operands(h, w2, e, bias=b2, x=v, sums=sums, losses=losses)


def slope(e, w2, z, dh, p, _, sums):
    return Operands(e, w2, p, other=dh, x=z, sums=sums)


def p_bar(k, a1, a1_bias, z, dh, norm, u, dh_bar, _):
    x = dict(x=z) if u is None else dict(x=dh, other_x=z)
    return Operands(k, a1, dh_bar, other=u, bias=a1_bias, norm=norm, **x)


def e_bar(
    h, dh_bar, a2, a2_bias, w2, b2, e, row_weights, dloss, norm, q, _, dv, sums, row_parts
):  # fmt: skip
    statistics = dict(bias=a2_bias, norm=norm, dloss=dloss, sums=sums)
    return Operands(h, a2, q, dh_bar, w2, other=dv, x=e, **statistics)


def z_bar(e, q, a2, w2, z, dh, u, norm, row_parts, z_bar, _, sums, drow_weights):
    x = dict(x=z) if u is None else dict(x=u, other_x=z)
    return Operands(e, a2, z_bar, q, w2, norm=norm, sums=sums, **x)


def dk(p, z_bar, a1, w1, norm, dk):
    return Operands(p, a1, dk, z_bar, w1, norm=norm)


KINDS = {
    "hidden": Kind(hidden, True, bias=True, other=True),
    "residual": Kind(residual, False, bias=True, sums=True, loads=1),
    "slope": Kind(slope, True, transposed=False, sums=True, other=True, loads=1),
    "p_bar": Kind(p_bar, True, bias=True, backward=True, loads=1, curves=True),
    "e_bar": Kind(e_bar, False, pairs=2, bias=True, backward=True, sums=True),
    "z_bar": Kind(
        *(z_bar, True, 2), transposed=False, backward=True, sums=True, loads=1, curves=True
    ),
    "dk": Kind(dk, False, pairs=2, transposed=False, backward=True),
}


class RowsLaunch(NamedTuple):
    """Takes what the launch of the kernel of the same name takes."""

    operands: Callable[..., Operands]
    launch: DescribedLaunch

    def __call__(self, tensors: Tensors, floats: tuple[float, ...] = (1.0,)) -> None:
        x = self.operands(*tensors)
        # A Gluon kernel takes no absent pointer: what stands in is not touched.
        described = x.a, x.b, x.c, x.d, x.y, x.other, x.x, x.other_x
        stand_ins = x.a, x.b, x.a, x.b, x.y, x.y, x.y, x.y
        pointers = x.bias, x.norm, x.dloss, x.sums, x.losses
        present = next(pointer for pointer in pointers if pointer is not None)
        self.launch(
            (
                *(y if x is None else x for x, y in zip(described, stand_ins, strict=True)),
                *(present if pointer is None else pointer for pointer in pointers),
            ),
            floats,
        )


def serves(problem: UpdateProblem, has_row_weights: bool) -> bool:
    """Whether the products over rows are those of this file."""
    gpu = problem.gpu
    # Tensor cores cut what they add: the loss of a thousand columns in fp16 errs too much.
    if problem.dtype != torch.bfloat16 or gpu.capability != 90 or interpreted():
        return False
    rows_lie_together = problem.keys[3] == problem.values[3] == problem.width
    if problem.lead or has_row_weights or not rows_lie_together or not problem.aligned:
        return False
    return is_large(*problem.sizes, gpu.multiprocessors)


def is_large(rows: int, width: int, hidden: int, multiprocessors: int) -> bool:
    """Whether the kernel is faster than tiles of a program each."""
    tiles = cdiv(rows, TILE.rows) * cdiv(min(width, hidden), TILE.cols)
    return tiles >= FEWEST_TILES * multiprocessors


def rows_launch(
    problem: UpdateProblem, name: str, *, other: bool = False, from_loss: bool = False
) -> RowsLaunch:
    """The launch of a kind; ``other``: its second result, where that may be absent, is there."""
    kind = KINDS[name]
    curved = problem.activation != "relu"
    cols = problem.hidden if kind.of_hidden else problem.width
    depth = problem.width + problem.hidden - cols
    tiles = cdiv(problem.rows, TILE.rows) * cdiv(cols, TILE.cols)
    loads = kind.loads + (curved if kind.curves else from_loss)
    # Two tensors have as many bytes of shared memory as one.
    sets = max(loads, 1)
    part_cols = TILE.cols // 2 // sets
    config = RowsConstants(
        name,
        TILE.rows,
        TILE.cols,
        TILE.stages,
        sets,
        part_cols,
        TILE.registers,
        TILE.copying_registers,
        problem.activation,
        kind.pairs,
        kind.transposed,
        kind.bias,
        kind.backward,
        kind.sums,
        kind.other or other,
        loads,
        from_loss,
        curved,
    )
    launch = DescribedLaunch(
        kernels_hopper.hopper_rows_kernel,
        (min(problem.gpu.multiprocessors, tiles),),
        problem.device,
        (problem.rows, cols, depth),
        problem.options(num_warps=4, overlaps=False),
        CONFIG=config,
    )
    left = in_tiles(TILE.rows, DEPTH)
    right = in_tiles(TILE.cols, DEPTH) if kind.transposed else in_tiles(DEPTH, TILE.cols)
    part = in_tiles(TILE.rows, part_cols, swizzled=2 * part_cols)
    launch.descriptors = left, right, left, right, *[part] * 4
    return RowsLaunch(kind.operands, launch)
