"""The forward pass of memory_scan: its tables, its plan, its launches; and the launches that the
backward pass repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import (
    Allocator,
    Launch,
    LaunchCall,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    launch_in_order,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import FEWEST_ROWS, SMALLEST_TILE, head_strides, product_precision
from ..common.weights import packed_size

if TYPE_CHECKING:
    from . import kernels, kernels_clip
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_clip = lazy_module(__package__, "kernels_clip")

Tensor = torch.Tensor


class ScanConfig(NamedTuple):
    """A program takes a chunk of tokens and ``block_h`` hidden units. With ``splits_heads`` a
    head's other units are with other programs, for which it ``waits`` within the launch; otherwise
    it takes them one block after the other.
    """

    block_h: int
    num_warps: int
    splits_heads: bool = False
    waits: bool = True


# Source: docs/decisions/0005-memory-scan-h200.csv. From the line of the most programs to that of
# the fewest.
STATES = (ScanConfig(block_h=32, num_warps=4, splits_heads=True),)
READ = ScanConfig(block_h=64, num_warps=4)
RECOMPUTE = ScanConfig(block_h=64, num_warps=4)
# With a clip; unmeasured.
CLIP = ScanConfig(block_h=64, num_warps=4)
ADVANCE = ScanConfig(block_h=32, num_warps=4, splits_heads=True, waits=False)
# Where no two numbers of a row are loaded at once, ptxas loses a descriptor with 4 warps.
ADVANCE_ODD = ADVANCE._replace(num_warps=8)
# q, k, v, the state, the gates, which tokens are written, the rest, which chunks are reset.
OPERANDS = 10
# Programs of four warps on one multiprocessor.
PROGRAMS_AT_ONCE = 2
# hidden, chunk, activation, read, residual_norm, precision.
Options = tuple[int, int, str, str, bool, str]
# Tensors of the read kernel that it writes for the backward pass alone: two of them where there is
# a norm, the last where there is a clip.
NOT_KEPT = (None,) * 12


class KernelConfig(NamedTuple):
    """The constants of the kernels; those over gates take the first alone."""

    C: int
    BLOCK_C: int
    # How many tokens before its own a query reads.
    SHIFT: int
    D: int = 0
    HIDDEN: int = 0
    SIZE: int = 0
    BLOCK_D: int = 0
    BLOCK_H: int = 0
    BLOCKS: int = 0
    ACTIVATION: str = ""
    RESIDUAL_NORM: bool = False
    UPCAST: bool = False
    PRECISION: str = ""


class Problem(NamedTuple):
    """A call as its kernels see it."""

    batch: int
    tokens: int
    heads: int
    width: int
    hidden: int
    chunk: int
    activation: str
    read: str
    residual_norm: bool
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return cdiv(self.tokens, self.chunk)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of weights and momentum, packed."""
        return self.batch, self.heads, 2, packed_size(self.hidden, self.width)

    @property
    def rest_shape(self) -> tuple[int, ...]:
        return self.heads, 1, packed_size(self.hidden, self.width)

    @property
    def resets_shape(self) -> tuple[int, ...]:
        return self.batch, self.chunks

    def sharing(self, configs: tuple[ScanConfig, ...]) -> ScanConfig:
        """The first of the lines all of whose programs run on the GPU at once."""
        room = PROGRAMS_AT_ONCE * device_properties(self.device).multiprocessors
        fitting = (each for each in configs if self.all_heads * self.blocks(each) <= room)
        return next(fitting, configs[-1])

    def block_h(self, config: ScanConfig) -> int:
        fewest = SMALLEST_TILE if config.splits_heads else FEWEST_ROWS
        block_h = max(fewest, power_of_2(self.hidden))
        # Programs of the interpreter run one after the other and cannot wait for one another.
        alone = interpreted() and config.splits_heads and config.waits
        return block_h if alone else min(config.block_h, block_h)

    def blocks(self, config: ScanConfig) -> int:
        return cdiv(self.hidden, self.block_h(config))

    @property
    def gate_constants(self) -> KernelConfig:
        return KernelConfig(self.chunk, self.block_c, int(self.read == "before"))

    def constants(self, config: ScanConfig) -> KernelConfig:
        return self.gate_constants._replace(
            D=self.width,
            HIDDEN=self.hidden,
            SIZE=self.state_shape[-1],
            BLOCK_D=self.block_d,
            BLOCK_H=self.block_h(config),
            BLOCKS=self.blocks(config),
            ACTIVATION=self.activation,
            RESIDUAL_NORM=self.residual_norm,
            UPCAST=interpreted(),
            PRECISION=self.precision,
        )

    def launch(
        self, kernel: Any, config: ScanConfig, programs: int, integers: tuple[int, ...]
    ) -> Launch:
        """``programs`` programs of a kernel over tokens."""
        options = dict(num_warps=config.num_warps)
        constants = self.constants(config)
        return Launch(kernel, (programs,), self.device, integers, options, CONFIG=constants)

    @property
    def block_d(self) -> int:
        return max(FEWEST_ROWS, power_of_2(self.width))

    @property
    def block_c(self) -> int:
        return max(FEWEST_ROWS, power_of_2(self.chunk))

    def wide(self, *shape: int) -> Allocator:
        """For an fp32 tensor of this shape."""
        return allocator(shape, torch.float32, self.device)

    def narrow(self, *shape: int) -> Allocator:
        """For a tensor of this shape in q's dtype."""
        return allocator(shape, self.dtype, self.device)


class ForwardPlan(NamedTuple):
    """One forward pass: which operands it copies first, its launches in their order, and the
    allocators of its tensors, ``intermediate`` ones and results.
    """

    copies: tuple[bool, ...]
    find_decays: Launch
    write: Launch
    read: Launch
    intermediate: tuple[Allocator | None, ...]
    results: tuple[Allocator, ...]
    clip: ClipPlan | None


class ClipPlan(NamedTuple):
    """What a clip takes instead of the write launch: the first two launches for every chunk, the
    third at the end; intermediate tensors, which are e of a chunk, whether each program's part of
    the memory is finite, and how many chunks have begun; and the factors and which chunks are
    taken.
    """

    chunks: int
    clip: Launch
    advance: Launch
    settle: Launch
    intermediate: tuple[Allocator, ...]
    results: tuple[Allocator, ...]


def scan_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(y, state after the last token, states with which the chunks began, the inner loss of each
    token [B, T, heads])``.

    Args:
        arguments: q, k, v, the packed state, alpha, eta, theta, which tokens are written or None,
            the packed rest or None, which chunks are reset or None; then hidden, chunk, activation,
            read and residual_norm.
    """
    operands, options = arguments[:OPERANDS], arguments[OPERANDS:]
    q, _, _, state, *_ = operands
    if not q.numel():
        chunks = cdiv(q.shape[1], options[1])
        y, loss = q.new_empty(q.shape), state.new_empty(q.shape[:3])
        return y, state.clone(), state.new_empty(chunks, *state.shape), loss
    return launched_forward(operands, options, ())


def clipped_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The same, and the factors of the tokens' gradients ``[B, T, heads]`` and which chunks were
    taken ``[B, chunks, heads]``.

    Args:
        arguments: as for ``scan_forward``; then the largest norm.
    """
    *given, limit = arguments
    q, state, alpha = given[0], given[3], given[4]
    if not q.numel():
        y, end, states, loss = scan_forward(*given)
        chunks, batch, heads = states.shape[:3]
        taken = state.new_empty((batch, chunks, heads), dtype=torch.bool)
        return y, end, states, loss, alpha.new_empty(alpha.shape), taken
    return launched_forward(tuple(given[:OPERANDS]), given[OPERANDS:], (limit,))


def launched_forward(
    operands: Sequence[Any], options: Sequence[Any], limit: tuple[float, ...]
) -> Any:
    q = operands[0]
    options = *options, product_precision(q.dtype)
    plan = forward_plan(q.shape, options, layouts(*operands), q.device, bool(limit))
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    q, k, v, state, *gates, written, rest, resets = operands
    # No call of ``allocate`` for each of them.
    intermediate = [None if x is None else x() for x in plan.intermediate]
    gamma, nu, reach, tiles, arrived = intermediate
    y, end, states, loss = [allocate() for allocate in plan.results]
    if plan.clip is None:
        starts = state, rest, resets
        tokens = k, v, written, gamma, nu, reach, *starts, states, end, tiles, arrived
        reads = q, k, v, written, gamma, reach, states, rest, y, loss, *NOT_KEPT, None
        launch_in_order(
            LaunchCall(plan.find_decays, (*gates, written, gamma, nu, reach, None, arrived)),
            LaunchCall(plan.write, tokens),
            LaunchCall(plan.read, reads),
        )
        return y, end, states, loss
    e, flags, step = [allocate() for allocate in plan.clip.intermediate]
    factors, taken = [allocate() for allocate in plan.clip.results]
    states[0].copy_(state)
    # It sets the count of chunks to zero.
    plan.find_decays((*gates, written, gamma, nu, reach, None, step))
    settled = states, end, flags, taken, step
    clipped = k, v, written, resets, *settled, e, factors
    advanced = k, written, gamma, nu, reach, rest, states, end, flags, step, e, factors
    for _ in range(plan.clip.chunks):
        plan.clip.clip(clipped, limit)
        plan.clip.advance(advanced)
    plan.clip.settle(settled)
    plan.read((q, k, v, written, gamma, reach, states, rest, y, loss, *NOT_KEPT, factors))
    return y, end, states, loss, factors, taken


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
    clips: bool = False,
) -> ForwardPlan:
    """The plan for operands of these layouts: q, k, v, the state, alpha, eta, theta, which tokens
    are written, rest and which chunks are reset, None where there is none. A launch with a clip is
    another than one without.
    """
    *rows, state, alpha, eta, theta, written, rest, resets = operands
    problem = problem_of(shape, options, rows[0], device)
    gates = ((shape[:3], gate) for gate in (alpha, eta, theta, written))
    optional = (problem.rest_shape, rest), (problem.resets_shape, resets)
    others = (problem.state_shape, state), *gates, *optional
    copies, strides = head_strides(shape, rows, *others)
    chunks, config = problem.chunks, problem.sharing(STATES)
    return ForwardPlan(
        copies,
        decays_launch(kernels.decays_kernel, problem, 0, chunks),
        problem.launch(
            kernels.scan_states_kernel,
            config,
            problem.all_heads * problem.blocks(config),
            (problem.tokens, problem.heads, problem.all_heads, *strides[1], *strides[2]),
        ),
        read_launch(problem, strides, 0, chunks, keep=False),
        intermediate_tensors(problem, config, chunks),
        (
            problem.narrow(*shape),
            problem.wide(*problem.state_shape),
            problem.wide(chunks, *problem.state_shape),
            problem.wide(*shape[:3]),
        ),
        clip_plan(problem, strides[1], strides[2]) if clips else None,
    )


def clip_plan(problem: Problem, k: tuple[int, ...], v: tuple[int, ...]) -> ClipPlan:
    """For k and v of these strides."""
    advance = ADVANCE_ODD if problem.width % 2 else ADVANCE
    heads, blocks = problem.all_heads, problem.blocks(advance)
    sizes = problem.tokens, problem.heads, heads
    return ClipPlan(
        problem.chunks,
        problem.launch(kernels_clip.clip_kernel, CLIP, heads, (*sizes, blocks, *k, *v)),
        problem.launch(kernels_clip.advance_kernel, advance, heads * blocks, (*sizes, *k)),
        problem.launch(kernels_clip.settle_kernel, CLIP, heads, (*sizes, blocks)),
        (
            problem.wide(heads, problem.chunk, problem.width),
            allocator((heads, blocks), torch.int32, problem.device),
            allocator((heads,), torch.int32, problem.device),
        ),
        (
            problem.wide(problem.batch, problem.tokens, problem.heads),
            allocator((problem.batch, problem.chunks, problem.heads), torch.bool, problem.device),
        ),
    )


def problem_of(
    shape: tuple[int, int, int, int], options: Options, rows: Layout, device: torch.device
) -> Problem:
    hidden, chunk, activation, read, residual_norm, precision = options
    sizes = *shape, hidden, chunk_of(chunk, shape[1])
    choices = activation, read, residual_norm, precision
    return Problem(*sizes, *choices, rows[0], device)


def chunk_of(chunk: int, tokens: int) -> int:
    """The chunk that kernels are compiled for: where there are fewer tokens, no longer than the
    block that holds these. Of a chunk that comes token by token each number of tokens would
    otherwise have kernels of its own.
    """
    return min(chunk, max(FEWEST_ROWS, power_of_2(tokens)))


def read_launch(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int, *, keep: bool
) -> Launch:
    """The reads of ``chunks`` chunks from ``first`` on, for q, k and v of these strides."""
    return problem.launch(
        kernels.scan_read_kernel,
        RECOMPUTE if keep else READ,
        problem.all_heads * chunks,
        (
            *(problem.tokens, problem.heads, problem.all_heads, first, chunks),
            *(stride for operand in strides for stride in operand),
        ),
    )


class OverGates(Protocol):
    """What a kernel over the gates asks of a call, of two layers or more."""

    @property
    def all_heads(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def gate_constants(self) -> Any: ...


def decays_launch(kernel: Any, problem: OverGates, first: int, chunks: int) -> Launch:
    """A kernel over the gates of ``chunks`` chunks from ``first`` on."""
    return Launch(
        kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (problem.tokens, problem.heads, first, chunks),
        dict(num_warps=1),
        CONFIG=problem.gate_constants,
    )


def intermediate_tensors(
    problem: Problem, config: ScanConfig, chunks: int
) -> tuple[Allocator | None, ...]:
    """For gamma, the last row of nu, and keep, carry and decay, of ``chunks`` chunks of all heads;
    for the tiles that the programs of a head add up, and the count of those that have stored
    theirs: None where a head has one program.
    """
    blocks, heads, chunk = problem.blocks(config), problem.all_heads, problem.chunk
    tiles = arrived = None
    if blocks > 1:
        tiles = problem.wide(heads, 2, blocks, problem.block_c, problem.block_d)
        arrived = allocator((heads,), torch.int32, problem.device)
    return (
        problem.wide(heads, chunks, chunk, chunk),
        problem.wide(heads, chunks, chunk),
        problem.wide(heads, chunks, 3, chunk),
        tiles,
        arrived,
    )
