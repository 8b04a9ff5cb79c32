"""Both passes of memory_input: their tables, plans and launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Allocator, Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .reference import NORM_EPS

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

Tensor = torch.Tensor


class RunTile(NamedTuple):
    """One program takes runs of ``run`` tokens (a power of two) of one head, as many as give each
    of its threads ``numbers`` numbers of one token. Serves where that makes at least ``fills``
    programs for each multiprocessor, and windows of up to ``taps``.
    """

    run: int
    numbers: int
    num_warps: int
    fills: float = 0.0
    taps: int = 8

    def rows(self, columns: int) -> int:
        """Runs of a program, at ``columns`` numbers a token, a power of two: no more than threads,
        at least one.
        """
        threads = 32 * self.num_warps
        return max(1, min(threads, threads * self.numbers // columns))

    def tokens(self, columns: int) -> int:
        """Of one program."""
        return self.run * self.rows(columns)


class RunConfig(NamedTuple):
    """The constants of the kernels between the projection and the memory."""

    GROUPS: int
    LEARNED: bool
    REACH: int
    KEY_NORM: str
    EPS: float
    D: int
    BLOCK_D: int
    ROWS: int
    RUN: int


class PartsConfig(NamedTuple):
    """The constants of the kernel that adds partial sums."""

    SIZE1: int
    SIZE2: int
    PARTS: int
    NUMBERS: int


class PartsTile(NamedTuple):
    """One program adds the partial sums of ``numbers`` numbers, ``parts`` of them at a time."""

    numbers: int
    parts: int
    num_warps: int


# Each table is read from the top: the first line that fits serves. The results do not depend on it,
# but for the order in which the taps' gradient is added. Source:
# results/tuning-input-h200-torch2.11-triton3.6.csv, bf16, 4 taps, heads of 64 columns; lines for
# more taps are unmeasured.
FORWARD = (
    RunTile(run=2, numbers=8, num_warps=2, taps=4),
    RunTile(run=2, numbers=4, num_warps=1),
)
BACKWARD = (
    RunTile(run=32, numbers=4, num_warps=1, fills=7.0, taps=4),
    RunTile(run=8, numbers=4, num_warps=1, taps=4),
    RunTile(run=16, numbers=4, num_warps=1),
)
ADD_PARTS = PartsTile(numbers=16, parts=128, num_warps=4)


class Problem(NamedTuple):
    """A call as its kernels see it. Without gates it has queries alone."""

    batch: int
    tokens: int
    heads: int
    width: int
    # How many taps; 0 without a convolution.
    taps: int
    key_norm: str | None
    gates: int
    dtype: torch.dtype
    device: torch.device

    @property
    def groups(self) -> int:
        return 3 if self.gates else 1

    @property
    def channels(self) -> int:
        return self.groups * self.heads * self.width

    @property
    def reach(self) -> int:
        return max(self.taps - 1, 0)

    @property
    def block_d(self) -> int:
        return power_of_2(self.width)

    def tiles(self, config: RunTile) -> int:
        """Of one row of the batch; one where there are no tokens, for its history goes on."""
        return max(1, cdiv(self.tokens, config.tokens(self.block_d)))

    def programs(self, groups: int, config: RunTile) -> int:
        """Of a launch with ``groups`` programs for every tile of a head."""
        return self.batch * self.tiles(config) * self.heads * groups

    def config(self, table: tuple[RunTile, ...], groups: int) -> RunTile:
        """The first line that serves a launch with ``groups`` programs for every tile of a head."""
        multiprocessors = device_properties(self.device).multiprocessors
        return next(
            line
            for line in table
            if self.taps <= line.taps
            and self.programs(groups, line) >= line.fills * multiprocessors
        )

    def launch(self, kernel: Any, config: RunTile, joint: Layout, groups: int) -> Launch:
        """A kernel whose programs have some tokens of one head, ``groups`` programs of each."""
        tiles = self.tiles(config)
        return Launch(
            kernel,
            (self.batch * tiles * self.heads, groups),
            self.device,
            (self.tokens, self.heads, tiles, *joint[1][:2]),
            dict(num_warps=config.num_warps),
            CONFIG=RunConfig(
                self.groups,
                self.gates == 3,
                self.reach,
                self.key_norm or "",
                NORM_EPS,
                self.width,
                self.block_d,
                config.rows(self.block_d),
                config.run,
            ),
        )


def memory_input_forward(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor | None,
    present: Tensor | None,
    heads: int,
    key_norm: str | None,
    largest: float,
    theta: float | None,
) -> tuple[Tensor | None, ...]:
    """``(q, k, v, alpha, eta, theta, written, history of the next call)``; without logits q and the
    last.
    """
    operands = contiguous_after(joint, history, taps, logits, present)
    problem = problem_of(joint, taps, logits, heads, key_norm)
    plan = forward_plan(problem, layouts(*operands))
    return plan.run(operands, (largest if theta is None else theta,))


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Layout | None, ...]) -> Plan:
    """The plan for operands of these layouts: joint, history, taps, logits and present."""
    joint, history, *_ = operands
    assert joint is not None
    assert history is not None
    by_head = problem.batch, problem.tokens, problem.heads
    device = problem.device
    launch = None
    if problem.batch:
        # One program computes queries, another keys, values and gates.
        groups = 2 if problem.gates else 1
        config = problem.config(FORWARD, groups)
        launch = problem.launch(kernels.memory_input_kernel, config, joint, groups)
    rows = allocator((*by_head, problem.width), problem.dtype, device)
    gate = allocator(by_head, torch.float32, device)
    written = allocator(by_head, torch.bool, device)
    writes = rows, rows, gate, gate, gate, written
    last = allocator((problem.batch, problem.reach, problem.channels), history[0], device)
    return Plan(launch, (), (rows, *(writes if problem.gates else (None,) * 6), last))


def memory_input_backward(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor | None,
    *grads_and_options: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of (joint, history, taps, logits), of the last only where those of the gates are
    there: all or none of them. ``grads_and_options`` as in the reference.
    """
    *grads, heads, key_norm, largest, theta = grads_and_options
    operands = contiguous_after(joint, history, taps, logits, *grads)
    problem = problem_of(joint, taps, logits, heads, key_norm)
    plan, add = backward_plan(problem, layouts(*operands))
    rate = largest if theta is None else theta
    djoint, dhistory, dtaps, dlogits = plan.run(operands, (rate,))
    if add is not None:
        # These were partial sums.
        dtaps, _ = add.run((dtaps,))
    return djoint, dhistory, dtaps, dlogits


@functools.lru_cache(maxsize=4096)
def backward_plan(
    problem: Problem, operands: tuple[Layout | None, ...]
) -> tuple[Plan, Plan | None]:
    """The plan for operands of these layouts: joint, history, taps, logits, the gradients of q, k,
    v, alpha, eta, theta and the next history; and the one that adds the partial sums of the taps'
    gradient, where there are taps.
    """
    joint, history, taps, _, _, _, _, dalpha, *_ = operands
    assert joint is not None
    assert history is not None
    batch, tokens, channels = problem.batch, problem.tokens, problem.channels
    device, reach = problem.device, problem.reach
    groups = problem.groups + (dalpha is not None)
    config = problem.config(BACKWARD, groups)
    parts = batch * problem.tiles(config)
    launch = None
    if batch:
        kernel = kernels_backward.memory_input_backward_kernel
        launch = problem.launch(kernel, config, joint, groups)
    outputs = (
        allocator((batch, tokens, channels), problem.dtype, device),
        allocator((batch, reach, channels), history[0], device),
        None if taps is None else allocator((parts, channels, reach + 1), torch.float32, device),
        None
        if dalpha is None
        else allocator((batch, tokens, problem.gates * problem.heads), torch.float32, device),
    )
    add = None
    if taps is not None:
        dtaps = allocator((channels, reach + 1), taps[0], device)
        add = parts_plan(parts, (reach + 1) * channels, 0, (dtaps, None), device)
    return Plan(launch, (), outputs), add


def parts_plan(
    parts: int,
    size1: int,
    size2: int,
    outputs: tuple[Allocator | None, ...],
    device: torch.device,
) -> Plan:
    """The launch that adds ``parts`` partial sums of ``size1`` numbers of one output and ``size2``
    of another.
    """
    launch = Launch(
        kernels_backward.add_parts_kernel,
        (cdiv(size1 + size2, ADD_PARTS.numbers),),
        device,
        (parts,),
        dict(num_warps=ADD_PARTS.num_warps),
        CONFIG=PartsConfig(size1, size2, ADD_PARTS.parts, ADD_PARTS.numbers),
    )
    return Plan(launch, (), outputs)


def problem_of(
    joint: Tensor, taps: Tensor | None, logits: Tensor | None, heads: int, key_norm: str | None
) -> Problem:
    batch, tokens, channels = joint.shape
    gates = 0 if logits is None else logits.shape[-1] // heads
    width = channels // (heads * (3 if gates else 1))
    count = 0 if taps is None else taps.shape[1]
    sizes = batch, tokens, heads, width, count, key_norm, gates
    return Problem(*sizes, joint.dtype, joint.device)


def contiguous_after(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands as the kernels read them, copied where they lie otherwise: x with a contiguous
    last axis, the others contiguous.
    """
    rows = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return rows, *[y if y is None or y.is_contiguous() else y.contiguous() for y in others]
