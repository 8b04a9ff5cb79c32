"""The launches of the sums over rows, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from ._launch import Allocate, Launch, memory
from ._update_configs import ADD_SPLITS, ROWS_OF_A_SPLIT, SPLIT_BELOW, UpdateTile
from ._update_gradient_kernels import _add_splits_kernel, _gradients_kernel
from ._update_problem import UpdateProblem, element_launch, element_programs, product_launch


class GradientsPlan(NamedTuple):
    """Gradients of weights and biases from all rows: one launch, and where several programs share
    the rows of a tile, one that adds their shares, ``parts``.

    ``slots``: how many sums of squares of a problem come of it.
    """

    launch: Launch
    add: Launch | None
    parts: tuple[Allocate, Allocate] | None
    slots: int

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        sums: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor | None,
        out: Sequence[torch.Tensor | None],
        squares: torch.Tensor | None,
        factor: float,
    ) -> None:
        """Write ``out``, a MemoryWeights, from the operands a1, k, a2, b2, a3, b3 and the column
        sums of p and e, or what stands for them.
        """
        if self.add is None or self.parts is None:
            self.launch((*operands, *sums, norm, *out, squares), (factor,))
            return
        parts = self.parts[0](), self.parts[1]()
        # The biases are left to the second launch.
        unwritten = (parts[0], None, parts[1], None)
        self.launch((*operands, None, None, None, *unwritten, None), (factor,))
        self.add((*parts, *sums, norm, *out, squares), (factor,))


def plan_gradients(
    problem: UpdateProblem,
    table: tuple[UpdateTile, ...],
    row_tiles: tuple[int, int],
    backward: bool,
) -> GradientsPlan:
    """Forward with the squares, or backward: onto what lies there, with the third product.

    ``row_tiles``: of how many tiles there are column sums, for b1 and for b2.
    """
    rows, width, hidden = problem.sizes
    # Both weights count.
    line = problem.tile_of(table, hidden, width, 2 * problem.problems)
    one = triton.cdiv(hidden, line.rows) * triton.cdiv(width, line.cols)
    other = triton.cdiv(width, line.rows) * triton.cdiv(hidden, line.cols)
    splits, share = split_rows(problem, line, one + other)
    split = splits > 1
    biases = triton.cdiv(hidden, line.cols) + triton.cdiv(width, line.cols)
    programs = splits * (one + other) + (0 if split else biases)
    final = dict(ADD=backward, SQUARES=not backward)
    launch = product_launch(
        _gradients_kernel,
        problem,
        line,
        problem.problems * programs,
        problem.walked_rows,
        (
            *problem.summed_keys,
            rows,
            width,
            hidden,
            problem.problems,
            programs,
            splits,
            share,
            *row_tiles,
        ),
        THIRD=backward,
        **(dict(ADD=False, SQUARES=False) if split else final),
        SPLIT=split,
        TURNED=problem.turns,
    )
    if not split:
        return GradientsPlan(launch, None, None, programs)
    slots = element_programs(problem, ADD_SPLITS.block)
    add = element_launch(
        _add_splits_kernel,
        problem,
        ADD_SPLITS,
        (width, hidden, problem.problems, slots, splits, *row_tiles),
        **final,
    )
    shape = (splits, problem.problems, hidden * width)
    part = memory(shape, torch.float32, problem.device)
    return GradientsPlan(launch, add, (part, part), slots)


def split_rows(problem: UpdateProblem, line: UpdateTile, matrix_tiles: int) -> tuple[int, int]:
    """Among how many programs the rows of a tile are divided, and the share of each, in whole
    steps of its walk.
    """
    programs = problem.problems * matrix_tiles
    splits = 1
    if programs < SPLIT_BELOW * problem.card.multiprocessors:
        splits = min(
            problem.card.multiprocessors // max(programs, 1), problem.rows // ROWS_OF_A_SPLIT
        )
    share = triton.cdiv(triton.cdiv(problem.rows, max(splits, 1)), line.depth) * line.depth
    return max(triton.cdiv(problem.rows, max(share, 1)), 1), share
