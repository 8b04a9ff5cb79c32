"""The learned optimizer on a card: plans the launches of tensors of one dtype, and launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from . import _learned_configs as configs
from ._backends import card_of, constant_when_compiled
from ._launch import Launch
from ._learned_apply_kernels import (
    SHARE,
    _add_shares_kernel,
    _apply_kernel,
    _fold_kernel,
    _learned_backward_kernel,
)
from ._learned_kernels import _statistics_kernel
from ._learned_layout import Layout, Stretches
from ._learned_sums_kernels import _means_kernel, _sums_kernel
from ._learned_tiles import AT_UPSTREAM
from ._norm_launch import triton_dtype
from ._tables import Blocks, Uploaded, addresses_of, aligned, upload
from .learned_features import (
    TIMESCALES,
    Statistics,
    time_features,
)

Tensor = torch.Tensor
ROLES = AT_UPSTREAM.value + 1


class StatisticsBatch:
    """Tensors of one dtype with gradients of one dtype, their statistics, and the launches that
    move these.

    Attributes:
        velo: whether features and gradients are VeLO's.
        decays: of VeLO, whether weight decay is in the gradients.
        updates: fp32, in the order of the parameters' memory; None where parameters are moved in
            place.
    """

    velo = False
    decays = False

    def __init__(
        self,
        ps: Sequence[Tensor],
        statistics: Sequence[Statistics],
        gradient: torch.dtype,
        updates: Sequence[Tensor] | None = None,
    ) -> None:
        self.ps, self.statistics, self.updates = ps, statistics, updates
        self.device, self.parameter, self.gradient = ps[0].device, ps[0].dtype, gradient
        layouts = [Layout(p) for p in ps]
        self.layouts = layouts
        columns = [
            [p, x.momenta, x.square, x.row, x.column] for p, x in zip(ps, statistics, strict=True)
        ]
        lines = [addresses_of(line) for line in zip(*columns, strict=True)]
        self.all_aligned = aligned(lines[0])
        lines.append([0] * len(ps) if updates is None else addresses_of(updates))
        self.addresses = Uploaded(ROLES * len(ps), torch.int64, self.device, apart=True)
        self.lines = list(itertools.chain.from_iterable(lines))
        self.addresses.hold([*self.lines, *[0] * len(ps)])
        self.gradients = Uploaded(len(ps), torch.int64, self.device, apart=True)
        self.aligned = False
        self.plan_sums()
        self.moving = Stretches(layouts, configs.STATISTICS, self.device)
        self.applying = Stretches(layouts, configs.APPLY, self.device)
        self.partials = self.empty(max(self.moving.blocks.count, 1), 32)
        # VeLO's alone.
        self.moment_shares = self.partials
        self.middles = self.empty(max(3 * sum(layout.middles for layout in layouts), 1))
        self.norms = self.empty(len(ps), 32)
        self.launches: dict[tuple, Launch] = {}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def plan_sums(self) -> None:
        """The tables of what is added over rows and columns."""
        tile = configs.SQUARES_OVER_AXES
        sums: list[int] = []
        means: list[int] = []
        sum_programs: list[int] = []
        mean_programs: list[int] = []
        base = middle = 0
        tensors = len(self.ps)
        for number, layout in enumerate(self.layouts):
            for is_row in (True, False):
                if not layout.factored or not layout.length:
                    continue
                groups, length, inner = layout.over(layout.row_over_y == is_row)
                step = tile.line if inner == 1 else tile.tall
                chunk = max(step * tile.tiles, -(-length // tile.chunks))
                chunks = -(-length // chunk)
                across = -(-groups // tile.lines) if inner == 1 else groups * -(-inner // tile.wide)
                count = groups * inner
                place = number + (3 if is_row else 4) * tensors
                line = layout.rows_line() if is_row else (count, 1)
                means += [len(sum_programs), place, count, *line, middle if is_row else -1]
                mean_programs.append(layout.middles if is_row else -(-count // configs.MEANS.span))
                sums += [number, groups, length, inner, chunks, chunk, base]
                sum_programs.append(across * chunks)
                base += groups * chunks * inner
            middle += 3 * layout.middles
        self.sums, self.means = (upload(x or [0], torch.int64, self.device) for x in (sums, means))
        self.sum_blocks = Blocks(sum_programs, 1, self.device)
        self.mean_blocks = Blocks(mean_programs, 1, self.device)
        self.squares = self.empty(max(base, 1))

    def point(self, gradients: Sequence[Tensor]) -> None:
        addresses = addresses_of(gradients)
        if self.gradients.hold(addresses):
            self.aligned = self.all_aligned and aligned(addresses)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        integers: tuple[int, ...],
        warps: int,
        registers: int | None = None,
        **constants: Any,
    ) -> Launch:
        """Planned once for each alignment of the addresses."""
        key = (kernel, self.aligned, *constants.values())
        if key not in self.launches:
            # Programs do other work while one reads: reading ahead only takes instructions.
            options = dict(num_warps=warps, num_stages=1)
            if registers is not None:
                options["maxnreg"] = registers
            self.launches[key] = Launch(kernel, grid, self.device, integers, options, **constants)
        return self.launches[key]

    def dtypes(self) -> dict[str, Any]:
        return dict(
            P=triton_dtype(self.parameter), G=triton_dtype(self.gradient), ALIGNED=self.aligned
        )

    def advance(self, numbers: Tensor, decays: Tensor, skipped: Tensor) -> None:
        """Move the statistics, and add the squares of every feature."""
        tile, means = configs.SQUARES_OVER_AXES, configs.MEANS
        blocks = self.sum_blocks
        if blocks.count:
            self.launch(
                _sums_kernel,
                (blocks.count,),
                (),
                tile.num_warps,
                **self.dtypes(),
                VELO=self.velo,
                DECAYS=self.decays,
                LINES=tile.lines,
                LINE=tile.line,
                TALL=tile.tall,
                WIDE=tile.wide,
            )(
                (
                    *(self.addresses.table, self.gradients.table, self.sums, blocks.first),
                    *(blocks.owner, numbers, skipped, self.squares),
                )
            )
            blocks = self.mean_blocks
            self.launch(
                _means_kernel,
                (blocks.count,),
                (means.span,),
                means.num_warps,
                SIZE=means.size,
                SHARES=means.shares,
            )(
                (
                    *(self.addresses.table, self.sums, self.means, blocks.first, blocks.owner),
                    *(decays, skipped, self.squares, self.middles),
                )
            )
        if self.moving.blocks.count:
            stretch = self.moving.stretch
            self.launch(
                _statistics_kernel,
                (self.moving.blocks.count,),
                (len(self.ps),),
                stretch.num_warps,
                **self.dtypes(),
                VELO=self.velo,
                SIZE=stretch.size,
            )(
                (
                    *(self.addresses.table, self.gradients.table, *self.moving.tables()),
                    *(numbers, decays, skipped, self.middles, self.partials, self.moment_shares),
                )
            )


class LearnedBatch(StatisticsBatch):
    """The batch of ``LearnedOptimizer``: its network too."""

    def __init__(
        self,
        ps: Sequence[Tensor],
        statistics: Sequence[Statistics],
        gradient: torch.dtype,
        updates: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(ps, statistics, gradient, updates)
        self.timescales = upload(TIMESCALES, torch.float64, self.device)
        self.biases = self.empty(len(ps), 32)
        self.folded = self.empty(len(ps), 32, 32)

    def fold(
        self, numbers: Tensor, weights: Sequence[Tensor], extra: Tensor | None, skipped: Tensor
    ) -> None:
        """Each tensor's own first layer."""
        w1, b1 = weights[:2]
        added = 0 if extra is None else extra.shape[1]
        self.launch(
            _fold_kernel, (len(self.ps),), (added,), configs.FOLD.num_warps, ROWS=configs.FOLD.rows
        )(
            (
                *(self.partials, self.moving.shapes, self.moving.blocks.first, numbers),
                *(self.timescales, w1, b1, w1 if extra is None else extra, skipped),
                *(self.norms, self.folded, self.biases),
            )
        )

    def apply(
        self,
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        skipped: Tensor,
        exp_mult: float,
        step_mult: float,
    ) -> None:
        """Move the parameters, or write their updates."""
        stretch, blocks = self.applying.stretch, self.applying.blocks
        if not blocks.count:
            return
        self.launch(
            _apply_kernel,
            (blocks.count,),
            (len(self.ps),),
            stretch.num_warps,
            stretch.registers if card_of(self.device).capability == 90 else None,
            **self.dtypes(),
            IN_PLACE=self.updates is None,
            PRECISION=precision(),
            SIZE=stretch.size,
        )(
            (
                *(self.addresses.table, self.gradients.table, *self.applying.tables()),
                *(numbers, decays, self.middles, self.folded, self.biases, *weights[2:], skipped),
            ),
            (exp_mult, step_mult),
        )

    def weight_gradients(
        self,
        upstream: Sequence[Tensor],
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        exp_mult: float,
        step_mult: float,
    ) -> Tensor:
        """``[tensors, 2178]``: of each tensor the gradients of W1's part for elements, transposed,
        b1, W2, transposed, b2, W3 and b3.
        """
        stretches = Stretches(self.layouts, configs.BACKWARD, self.device)
        stretch, blocks, adding = stretches.stretch, stretches.blocks, configs.SHARES
        self.addresses.hold([*self.lines, *addresses_of(upstream)])
        shares = self.empty(max(blocks.count, 1), SHARE.value)
        if blocks.count:
            self.launch(
                _learned_backward_kernel,
                (blocks.count,),
                (len(self.ps),),
                stretch.num_warps,
                **self.dtypes(),
                SIZE=stretch.size,
            )(
                (
                    *(self.addresses.table, self.gradients.table, *stretches.tables()),
                    *(numbers, decays, self.middles, self.norms, self.folded, self.biases),
                    *(*weights[2:], shares),
                ),
                (exp_mult, step_mult),
            )
        found = self.empty(len(self.ps), SHARE.value)
        self.launch(
            _add_shares_kernel,
            (len(self.ps), -(-SHARE.value // adding.size)),
            (),
            adding.num_warps,
            ROWS=adding.rows,
            SIZE=adding.size,
        )((shares, stretches.shapes, blocks.first, found))
        return found

    def times(self, numbers: Tensor) -> Tensor:
        """``[tensors, 11]``: the features of time."""
        return time_features(numbers[:, 1]).float()


@constant_when_compiled
def precision() -> str:
    """Of the network's products: three of TF32, which together have fp32's precision, or one where
    torch's own switch allows that.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
