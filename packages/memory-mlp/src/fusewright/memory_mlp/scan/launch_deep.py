"""The forward pass of deep_scan: its tables, its plan, its launches; and the launches that the
backward pass repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    Launch,
    LaunchCall,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    launch,
    layouts,
    prepare,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.deep_weights import deep_matrices, deep_size
from ..common.operands import FEWEST_ROWS, SMALLEST_TILE, head_strides, product_precision
from .launch import OPERANDS, chunk_of, decays_launch

if TYPE_CHECKING:
    from . import kernels, kernels_deep
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_deep = lazy_module(__package__, "kernels_deep")

Tensor = torch.Tensor


class RowsConfig(NamedTuple):
    """A program takes ``tokens`` tokens of a chunk through all layers; it loads up to ``loaded``
    bytes of a matrix at once, ``stages`` times ahead.
    """

    tokens: int
    loaded: int
    stages: int
    num_warps: int


# docs/decisions/0037
ROWS = RowsConfig(tokens=16, loaded=32 << 10, stages=2, num_warps=4)
TILE_WARPS = 4
# layers, hidden, chunk, activation, read, residual_norm, precision.
Options = tuple[int, int, int, str, str, bool, str]
KINDS = ("first", "middle", "last")


class DeepConfig(NamedTuple):
    """The constants of the kernels."""

    LAYERS: int
    C: int
    BLOCK_C: int
    # How many tokens before its own a query reads.
    SHIFT: int
    D: int
    HIDDEN: int
    # Numbers of a matrix of tokens from one token to the next.
    STRIDE: int
    SIZE: int
    MATRICES: int
    # Tiles of matrices are [BLOCK_D, BLOCK_D]: BLOCKS across, TILES of all layers, SIDES blocks of
    # all sides.
    BLOCK_D: int
    BLOCKS: int
    TILES: int
    SIDES: int
    # Of the kernels that go through all layers.
    BLOCK_HIDDEN: int
    STEP: int
    # HIDDEN, but two steps at least: of one, which is no loop, ptxas loses a descriptor.
    LOOP: int
    STAGES: int
    TOKENS: int
    TOKEN_BLOCKS: int
    ACTIVATION: str
    RESIDUAL_NORM: bool
    UPCAST: bool
    PRECISION: str
    # Of the kernels that take one layer: "first", "middle" or "last"; and whether what the backward
    # pass needs is kept.
    KIND: str = ""
    KEEPS: bool = False


class DeepProblem(NamedTuple):
    """A call as its kernels see it."""

    batch: int
    tokens: int
    heads: int
    width: int
    layers: int
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
        return self.batch, self.heads, 2, deep_size(self.layers, self.hidden, self.width)

    @property
    def rest_shape(self) -> tuple[int, ...]:
        return self.heads, 1, self.state_shape[-1]

    @property
    def resets_shape(self) -> tuple[int, ...]:
        return self.batch, self.chunks

    @property
    def gate_constants(self) -> DeepConfig:
        return self.constants

    @property
    def biases(self) -> int:
        """How many the memory has."""
        return self.state_shape[-1] - deep_matrices(self.layers, self.hidden, self.width)

    @property
    def stride(self) -> int:
        return max(self.hidden, self.width)

    @property
    def constants(self) -> DeepConfig:
        block_d = max(FEWEST_ROWS, power_of_2(self.width))
        block_hidden = max(block_d, power_of_2(self.hidden))
        blocks = cdiv(self.hidden, block_d)
        step = ROWS.loaded // (block_hidden * self.dtype.itemsize)
        step = max(SMALLEST_TILE, min(step, block_d, block_hidden // 2))
        return DeepConfig(
            LAYERS=self.layers,
            C=self.chunk,
            BLOCK_C=max(FEWEST_ROWS, power_of_2(self.chunk)),
            SHIFT=int(self.read == "before"),
            D=self.width,
            HIDDEN=self.hidden,
            STRIDE=self.stride,
            SIZE=self.state_shape[-1],
            MATRICES=deep_matrices(self.layers, self.hidden, self.width),
            BLOCK_D=block_d,
            BLOCKS=blocks,
            TILES=2 * blocks + (self.layers - 2) * blocks * blocks,
            SIDES=2 * (1 + blocks) + (self.layers - 2) * 2 * blocks,
            BLOCK_HIDDEN=block_hidden,
            STEP=step,
            LOOP=max(self.hidden, 2 * step),
            STAGES=ROWS.stages,
            TOKENS=ROWS.tokens,
            TOKEN_BLOCKS=cdiv(self.chunk, ROWS.tokens),
            ACTIVATION=self.activation,
            RESIDUAL_NORM=self.residual_norm,
            UPCAST=interpreted(),
            PRECISION=self.precision,
        )

    def launch(
        self,
        kernel: Any,
        programs: int,
        integers: tuple[int, ...],
        num_warps: int = TILE_WARPS,
        **constants: Any,
    ) -> Launch:
        options = dict(num_warps=num_warps)
        config = self.constants._replace(**constants)
        return Launch(kernel, (programs,), self.device, integers, options, CONFIG=config)

    def wide(self, *shape: int) -> Allocator:
        """For an fp32 tensor of this shape."""
        return allocator(shape, torch.float32, self.device)

    def narrow(self, *shape: int) -> Allocator:
        """For a tensor of this shape in q's dtype."""
        return allocator(shape, self.dtype, self.device)

    def slots(self, kinds: int, places: int) -> tuple[int, ...]:
        """The shape of ``rows`` or ``wide`` with these kinds of matrices."""
        return kinds * self.layers, places, self.chunk, self.stride


class ForwardPlan(NamedTuple):
    """One forward pass: which operands it copies first, its launches, and the allocators of its
    tensors, ``intermediate`` ones and results.
    """

    copies: tuple[bool, ...]
    matrices: int
    chunks: int
    find_decays: Launch
    rows: Launch
    advance: Launch
    reads: tuple[Launch, ...]
    intermediate: tuple[Allocator, ...]
    results: tuple[Allocator, ...]


def deep_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(y, state after the last token, states with which the chunks began, the inner loss of each
    token [B, T, heads])``.

    Args:
        arguments: q, k, v, the packed state, alpha, eta, theta, which tokens are written or None,
            the packed rest or None, which chunks are reset or None; then layers, hidden, chunk,
            activation, read and residual_norm.
    """
    operands, options = arguments[:OPERANDS], arguments[OPERANDS:]
    q, state = operands[0], operands[3]
    if not q.numel():
        chunks = cdiv(q.shape[1], options[2])
        y, loss = q.new_empty(q.shape), state.new_empty(q.shape[:3])
        return y, state.clone(), state.new_empty(chunks, *state.shape), loss
    options = *options, product_precision(q.dtype)
    plan = forward_plan(q.shape, options, layouts(*operands), q.device)
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    q, k, v, state, *gates, written, rest, resets = operands
    gamma, nu, reach, rounded, rows, wide, sums, step = [x() for x in plan.intermediate]
    y, end, states, loss = [allocate() for allocate in plan.results]
    states[0].copy_(state)
    rounded.copy_(state[:, :, 0, : plan.matrices])
    decays = LaunchCall(plan.find_decays, (*gates, written, gamma, nu, reach, None, step))
    of_rows = k, v, written, gamma, nu, rounded, states, rows, wide, sums, loss, step
    advanced = gamma, nu, reach, rest, resets, rows, wide, states, end, rounded, sums, step
    calls = LaunchCall(plan.rows, of_rows), LaunchCall(plan.advance, advanced)
    reads = [LaunchCall(x, (q, gamma, reach, rest, states, rows, None, y)) for x in plan.reads]
    prepare(decays, *calls, *reads)
    # It sets the count of chunks to zero.
    launch([decays])
    for _ in range(plan.chunks):
        launch(calls)
    launch(reads)
    return y, end, states, loss


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> ForwardPlan:
    """The plan for operands of these layouts: q, k, v, the state, alpha, eta, theta, which tokens
    are written, the rest and which chunks are reset.
    """
    *rows, state, alpha, eta, theta, written, rest, resets = operands
    problem = problem_of(shape, options, rows[0], device)
    gates = ((shape[:3], gate) for gate in (alpha, eta, theta, written))
    optional = (problem.rest_shape, rest), (problem.resets_shape, resets)
    others = (problem.state_shape, state), *gates, *optional
    copies, (q, k, v) = head_strides(shape, rows, *others)
    chunks, heads = problem.chunks, problem.all_heads
    constants = problem.constants
    sizes = problem.tokens, problem.heads, heads
    places = heads * chunks
    return ForwardPlan(
        copies,
        constants.MATRICES,
        chunks,
        decays_launch(kernels.decays_kernel, problem, 0, chunks),
        rows_launch(problem, heads, (*sizes, 0, chunks, *k, *v)),
        problem.launch(kernels_deep.deep_advance_kernel, heads * constants.TILES, (*sizes, chunks)),
        read_launches(problem, q, 0, chunks, keep=False),
        intermediate=(
            *gate_tensors(problem, chunks),
            problem.narrow(problem.batch, problem.heads, constants.MATRICES),
            problem.narrow(*problem.slots(3, places)),
            problem.wide(*problem.slots(2, heads)),
            problem.wide(heads, constants.TOKEN_BLOCKS, 2, problem.biases),
            allocator((2, heads), torch.int32, device),
        ),
        results=(
            problem.narrow(*shape),
            problem.wide(*problem.state_shape),
            problem.wide(chunks, *problem.state_shape),
            problem.wide(*shape[:3]),
        ),
    )


def problem_of(
    shape: tuple[int, int, int, int], options: Options, rows: Layout, device: torch.device
) -> DeepProblem:
    layers, hidden, chunk, activation, read, residual_norm, precision = options
    sizes = *shape, layers, hidden, chunk_of(chunk, shape[1])
    choices = activation, read, residual_norm, precision
    return DeepProblem(*sizes, *choices, rows[0], device)


def gate_tensors(problem: DeepProblem, chunks: int) -> tuple[Allocator, ...]:
    """For gamma, the last row of nu, and keep, carry and decay, of ``chunks`` chunks."""
    heads, chunk = problem.all_heads, problem.chunk
    return (
        problem.wide(heads, chunks, chunk, chunk),
        problem.wide(heads, chunks, chunk),
        problem.wide(heads, chunks, 3, chunk),
    )


def rows_launch(problem: DeepProblem, places: int, integers: tuple[int, ...]) -> Launch:
    """x and p of one chunk at each of these places."""
    kernel = kernels_deep.deep_rows_kernel
    programs = places * problem.constants.TOKEN_BLOCKS
    return problem.launch(kernel, programs, integers, ROWS.num_warps)


def read_launches(
    problem: DeepProblem, q: Sequence[int], first: int, chunks: int, *, keep: bool
) -> tuple[Launch, ...]:
    """The reads of ``chunks`` chunks from ``first`` on, layer by layer."""
    sizes = problem.tokens, problem.heads, problem.all_heads, first, chunks
    blocks = problem.constants.BLOCKS
    return tuple(
        problem.launch(
            kernels_deep.deep_read_kernel,
            problem.all_heads * chunks * (1 if layer == problem.layers else blocks),
            (*sizes, layer, *q),
            KIND=kind_of(layer, problem.layers),
            KEEPS=keep,
        )
        for layer in range(1, problem.layers + 1)
    )


def kind_of(layer: int, layers: int) -> str:
    return KINDS[(layer > 1) + (layer == layers)]
