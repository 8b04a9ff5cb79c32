"""Launches of the learned optimizers' statistics: one that prepares a step, then for each batch of
tensors three that update the statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..._core.backends import device_properties
from ..._core.lazy import lazy_module
from ..launch import Block, KernelPart, Squares, planned
from ..step import Step
from ..tables import Blocks, Uploaded, addresses_of, aligned, upload
from .layout import Layout, Stretch, Stretches, Strip, Strips
from .members import Member, Rules, StatisticsPart
from .reference import START_DECAYS, Statistics

if TYPE_CHECKING:
    from . import kernels, kernels_strips, kernels_sums, tiles
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_strips = lazy_module(__package__, "kernels_strips")
    kernels_sums = lazy_module(__package__, "kernels_sums")
    tiles = lazy_module(__package__, "tiles")

Tensor = torch.Tensor


class SumTile(NamedTuple):
    """Squares over the middle axis of ``[groups, length, inner]``: tiles of ``lines`` by
    ``line`` where inner is 1, else of ``tall`` by ``wide``; the middle axis has at most ``chunks``
    chunks, of at least ``tiles`` tiles each.
    """

    lines: int
    line: int
    tall: int
    wide: int
    tiles: int
    chunks: int
    num_warps: int


class Means(NamedTuple):
    """One program takes ``span`` column statistics, or one line of rows, in tiles of ``size`` by
    ``partials`` partial sums.
    """

    size: int
    partials: int
    span: int
    num_warps: int


class Sums(NamedTuple):
    """One program adds partial sums in tiles of ``rows`` by ``size``."""

    rows: int
    size: int
    num_warps: int


# STATISTICS and APPLY are of results/tuning-learned-h200-torch2.11-triton3.6.csv, those of strips
# of docs/decisions/0009-strips-h200.csv; the others are unmeasured. Without strips they take 3 % of
# a step.
STATISTICS = Stretch(size=64, num_warps=1, shortest=1024, programs=1024)
# With more registers two programs share a multiprocessor, else three.
APPLY = Stretch(size=128, num_warps=4, shortest=2048, programs=2048, registers=168)
STATISTICS_STRIP = Strip(size=128, num_warps=4, shortest=16, programs=1024, ahead=False)
# It says which matrices are in strips. Three programs of a multiprocessor wait for memory often
# enough that each reads ahead.
APPLY_STRIP = Strip(128, num_warps=4, shortest=32, programs=1024, ahead=True, registers=168)
LINES = Block(size=64, num_warps=2)
SQUARES_OVER_AXES = SumTile(lines=16, line=128, tall=32, wide=64, tiles=16, chunks=64, num_warps=4)
MEANS = Means(size=128, partials=8, span=1024, num_warps=4)
FOLD = Sums(rows=64, size=32, num_warps=4)


class StatisticsBatch:
    """Tensors of one dtype with gradients of one dtype, and the launches that update their
    statistics.

    Attributes:
        velo: whether features and gradients are VeLO's.
        decays: of VeLO, whether weight decay is in the gradients.
        updates: fp32, in the order of the parameters' memory; None where parameters are updated
            in place.
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
        layouts = [Layout(p, velo=self.velo) for p in ps]
        self.layouts = layouts
        columns = [
            [p, x.momenta, x.square, *((x.column, x.row) if its.exchanged else (x.row, x.column))]
            for p, x, its in zip(ps, statistics, layouts, strict=True)
        ]
        lines = [addresses_of(line) for line in zip(*columns, strict=True)]
        self.all_aligned = aligned(lines[0])
        lines.append([0] * len(ps) if updates is None else addresses_of(updates))
        self.lines = list(itertools.chain.from_iterable(lines))
        # The last line is of the upstream gradients of a backward pass.
        addresses = [*self.lines, *[0] * len(ps)]
        self.addresses = Uploaded(len(addresses), torch.int64, self.device, exclusive=True)
        self.addresses.hold(addresses)
        self.gradients = Uploaded(len(ps), torch.int64, self.device, exclusive=True)
        # Of all launches whose kernels read parameters or gradients.
        self.constants = dict(P=self.parameter, G=gradient, VELO=self.velo, ALIGNED=False)
        self.plan_sums()
        places = [] if self.velo else [n for n, x in enumerate(layouts) if APPLY_STRIP.serves(x)]
        self.moving = Stretches(layouts, STATISTICS, self.device, places)
        self.applying = Stretches(layouts, APPLY, self.device, places)
        self.moving_strips = Strips(places, layouts, STATISTICS_STRIP, self.device)
        self.applying_strips = Strips(places, layouts, APPLY_STRIP, self.device)
        self.plan_partials()
        # VeLO replaces it.
        self.moment_partials = self.partials
        self.row_means = self.empty(max(3 * sum(layout.row_means for layout in layouts), 1))
        self.norms = self.empty(len(ps), 32)
        self.plan_network()

    def plan_partials(self) -> None:
        """Allocate sums of squares, and the factors of the lines of matrices in strips."""
        strips, lines = self.moving_strips, []
        for place in strips.places:
            layout = self.layouts[place]
            lines += [-(-layout.x // LINES.size), -(-layout.y // LINES.size)]
        self.line_blocks = Blocks(lines, 1, self.device)
        self.factors = self.empty(max(strips.lines, 1), 4)
        # Of each tensor where its sums begin, and how many there are; then those of its lines. The
        # sums of stretches come first, then those of strips, then those of lines.
        ranges = [[0, 0, 0, 0] for _ in self.ps]
        at = 0
        for place, count in itertools.chain(
            enumerate(self.moving.counts), zip(strips.places, strips.counts, strict=True)
        ):
            if count:
                ranges[place][:2] = at, count
            at += count
        for place, *two in zip(strips.places, lines[::2], lines[1::2], strict=True):
            ranges[place][2:] = at, sum(two)
            at += sum(two)
        self.ranges = upload(list(itertools.chain(*ranges)), torch.int64, self.device)
        self.partials = self.empty(max(at, 1), 32)

    def plan_network(self) -> None:
        """Allocate what a subclass's own launches need."""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def registers_of(self, stretch: Stretch | Strip) -> int | None:
        """The bound of a thread's registers on this device."""
        return stretch.registers if device_properties(self.device).capability == 90 else None

    def plan_sums(self) -> None:
        """The tables of the sums over rows and columns."""
        tile = SQUARES_OVER_AXES
        sums: list[int] = []
        means: list[int] = []
        sum_programs: list[int] = []
        mean_programs: list[int] = []
        base = row_means = 0
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
                means += [len(sum_programs), place, count, *line, row_means if is_row else -1]
                mean_programs.append(layout.row_means if is_row else -(-count // MEANS.span))
                sums += [number, groups, length, inner, chunks, chunk, base]
                sum_programs.append(across * chunks)
                base += groups * chunks * inner
            row_means += 3 * layout.row_means
        self.sums, self.means = (upload(x or [0], torch.int64, self.device) for x in (sums, means))
        self.sum_blocks = Blocks(sum_programs, 1, self.device)
        self.mean_blocks = Blocks(mean_programs, 1, self.device)
        self.squares = self.empty(max(base, 1))

    def point(self, gradients: Sequence[Tensor]) -> None:
        addresses = addresses_of(gradients)
        if self.gradients.hold(addresses):
            self.constants["ALIGNED"] = self.all_aligned and aligned(addresses)

    def advance(self, numbers: Tensor, decays: Tensor, skipped: Tensor) -> None:
        """Move the statistics, and add the squares of every feature."""
        operands, constants = (self.addresses.table, self.gradients.table), self.constants
        if self.sum_blocks.count:
            sums, means = (self.sum_blocks.count,), (self.mean_blocks.count,)
            options = constants | {"DECAYS": self.decays}
            tile = SQUARES_OVER_AXES
            launch = planned(kernels_sums, self.device, "sums_kernel", sums, (), tile, **options)
            blocks = self.sum_blocks.tables[1:]
            launch((*operands, self.sums, *blocks, numbers, skipped, self.squares))
            span = (MEANS.span,)
            launch = planned(kernels_sums, self.device, "means_kernel", means, span, MEANS)
            tables = self.addresses.table, self.sums, self.means, *self.mean_blocks.tables[1:]
            launch((*tables, decays, skipped, self.squares, self.row_means))
        if self.moving.blocks.count:
            stretch = self.moving.stretch
            plan = self.moving.grid, (len(self.ps),), stretch, self.registers_of(stretch)
            launch = planned(kernels, self.device, "statistics_kernel", *plan, **constants)
            written = self.row_means, self.partials, self.moment_partials
            launch((*operands, *self.moving.tables, numbers, decays, skipped, *written))
        if self.moving_strips.places:
            self.advance_strips(operands, numbers, decays, skipped)

    def advance_strips(
        self, operands: tuple[Tensor, Tensor], numbers: Tensor, decays: Tensor, skipped: Tensor
    ) -> None:
        """The same of matrices in strips, after their rows and columns."""
        strips, tensors = self.moving_strips, (len(self.ps),)
        shapes, at = self.moving.shapes, self.moving.blocks.count
        grid = (self.line_blocks.count,)
        launch = planned(kernels_strips, self.device, "lines_kernel", grid, tensors, LINES)
        tables = self.addresses.table, shapes, strips.table, *self.line_blocks.tables[1:]
        sums = self.partials[at + strips.blocks.count :]
        launch((*tables, skipped, self.row_means, self.factors, sums))
        plan = strips.grid, tensors, strips.strip, self.registers_of(strips.strip)
        name = "strip_statistics_kernel"
        launch = planned(kernels_strips, self.device, name, *plan, **self.constants)
        inputs = shapes, *strips.tables, numbers, decays, skipped
        launch((*operands, *inputs, self.factors, self.partials[at:]))


class StatisticsKernelPart(KernelPart, StatisticsPart):
    """The members on one device that kernels serve, and the launch that prepares a step.

    Attributes:
        batch: the class of its batches.
        offsets: learned changes of the decays.
    """

    batch: Any
    offsets: Sequence[Tensor] = ()

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        ordered = sorted(members, key=dtypes_of)
        columns = tiles.NUMBERS.value
        super().__init__(ordered, rules, device, kernels, "learned_prepare_kernel", columns)
        self.batches: list[tuple[Any, slice, Squares]] = []
        for _, group in itertools.groupby(ordered, key=dtypes_of):
            some = list(group)
            start = sum(len(batch.ps) for batch, *_ in self.batches)
            gradient = some[0].gradient
            batch = self.batch([x.p for x in some], [x.statistics for x in some], gradient)
            squares = Squares([x.p.numel() for x in some], gradient, device)
            self.batches.append((batch, slice(start, start + len(some)), squares))
        # VeLO's weight decays.
        self.decay_numbers = self.table[:, tiles.DECAY.value]
        count = 2 * tiles.DECAY_COUNT.value
        self.decays = torch.empty(count, dtype=torch.float32, device=device)
        complements = [1.0 - x for x in itertools.chain(*START_DECAYS)]
        self.complements = upload(complements, torch.float64, device)

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Put a step's gradients, in the members' order, and the groups' numbers into tables."""
        super().point(gradients, groups)
        for batch, places, _ in self.batches:
            batch.point(gradients[places])
        self.group_numbers.point(self.numbers)

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Partial sums of squares in fp64, as ``total_squares`` takes them."""
        return [
            (None, add(batch.gradients.table, batch.constants["ALIGNED"]))
            for batch, _, add in self.batches
        ]

    def decide(self, step: Step) -> None:
        """Decide whether the step is taken, and write its numbers and decays."""
        inputs = *self.offsets, self.complements
        self.prepare(step, inputs, (self.decays,), VELO=self.batch.velo)


def dtypes_of(member: Member) -> str:
    """Members of equal dtypes share launches."""
    return repr((member.p.dtype, member.gradient))
