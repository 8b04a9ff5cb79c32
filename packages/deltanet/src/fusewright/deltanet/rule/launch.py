"""The launches of gated_delta_rule: its configurations, the sizes of a call, which the backward
pass shares, and the plan of the forward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from operator import call
from typing import TYPE_CHECKING, Any, NamedTuple

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
from .._core.precision import allows_tf32, power_of_2
from .reference import CHUNK, count_chunks, decays_shape, splits_decays

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
Shape = tuple[int, ...]

# Columns of keys and of values that the kernels serve: what one program holds of a state.
WIDEST = 256
# Strides and widths in numbers, and addresses in bytes, that are multiples of it are loaded as
# whole vectors. Of others ptxas makes serial kernels for Hopper that read registers which nothing
# has written: such tensors are copied first.
VECTOR = 16

# tl.dot multiplies no tiles of fewer columns.
SMALLEST_TILE = 16
# In bytes: a row of keys, and a tile of a state as it is multiplied.
LONG_ROW = 512
LARGEST_STATE = 16384
# Columns of a tile of fp32: a wider one fills the registers, and with loads ahead shared memory.
WIDEST_EXACT = 64
# Products of fewer rows take other instructions on Hopper, and where one kernel has both kinds
# triton 3.6 reads past the end of its shared memory.
FEWEST_ROWS = SMALLEST_TILE if interpreted() else 64


class RuleConfig(NamedTuple):
    """A program takes at most ``block_k`` columns of keys and ``block_v`` of values at a time; on
    GPUs without wgmma at most ``without_wgmma`` of both, with eight warps.
    """

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    without_wgmma: int = 128


class SerialConfig(NamedTuple):
    """A program carries ``block_v`` columns of a head's state over all chunks; on GPUs without
    wgmma with eight warps.
    """

    block_v: int
    num_warps: int
    num_stages: int


# Source of all lines: results/tuning-h200-torch2.11-triton3.6.csv; unmeasured on other GPUs.
PREPARE = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=3)
OUTPUTS = RuleConfig(block_k=64, block_v=128, num_warps=4, num_stages=2)
# From the line of the fewest programs to that of the most: the first one serves that gives each
# multiprocessor a program.
STATES = (
    SerialConfig(block_v=64, num_warps=4, num_stages=4),
    SerialConfig(block_v=32, num_warps=4, num_stages=4),
    SerialConfig(block_v=16, num_warps=4, num_stages=4),
)


class Constants(NamedTuple):
    """What a kernel of the rule is compiled for, read as ``CONFIG``: the widths of keys and values,
    how many value heads share a head of keys, the columns of its tiles, how operands of its
    products are taken, the precision of the products that invert I + A, whether decays are split,
    and into how many partial sums an earlier kernel has cut what it adds.
    """

    K: int
    V: int
    GROUP: int
    BLOCK_K: int
    BLOCK_V: int
    UPCAST: bool
    PRECISION: str
    INVERSE: str
    SPLIT: bool
    PARTS: int


class RulePlan(NamedTuple):
    """One pass: which of the operands that have strides it copies first, its launches, and the
    memory of what they write, in the order in which the pass names them.
    """

    copies: tuple[bool, ...]
    launches: tuple[Launch, ...]
    memory: tuple[Allocator, ...]


class Problem(NamedTuple):
    """The sizes and options of one call, which its launches depend on."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    keys: int
    width: int
    sequences: int
    chunks: int
    varlen: bool
    has_state: bool
    dtype: torch.dtype
    precision: str
    device: torch.device

    @property
    def units(self) -> int:
        """Chunks of all value heads."""
        return self.chunks * self.value_heads

    @property
    def group(self) -> int:
        """Value heads that share a head of q and k."""
        return self.value_heads // self.heads

    @property
    def counts(self) -> Shape:
        """Tokens of a row, heads, and chunks of a sequence where all have as many."""
        return self.tokens, self.value_heads, cdiv(self.tokens, CHUNK)

    @property
    def inverse_precision(self) -> str:
        """The precision of the products that invert I + A. TF32 is finer than bf16, to which the
        inverse is rounded, but not than float16.
        """
        return "tf32" if self.dtype == torch.bfloat16 else self.precision

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU multiplies tiles in shared memory, which spares registers."""
        return 90 <= device_properties(self.device).capability < 120

    def max_block(self, config: RuleConfig | SerialConfig) -> int:
        """The most columns of a tile."""
        if isinstance(config, SerialConfig):
            return WIDEST
        most = WIDEST if self.has_wgmma else config.without_wgmma
        return min(most, WIDEST_EXACT) if self.dtype == torch.float32 else most

    def block_k(self, config: RuleConfig | SerialConfig) -> int:
        all_keys = max(FEWEST_ROWS, power_of_2(self.keys))
        if isinstance(config, SerialConfig):
            return all_keys
        return min(config.block_k, all_keys, self.max_block(config))

    def block_v(self, config: RuleConfig | SerialConfig) -> int:
        # In narrower ones ptxas reads registers that nothing has written.
        fewest = SMALLEST_TILE if isinstance(config, SerialConfig) else FEWEST_ROWS
        all_values = max(fewest, power_of_2(self.width))
        return min(config.block_v, all_values, self.max_block(config))

    def tiles_k(self, config: RuleConfig) -> int:
        return cdiv(self.keys, self.block_k(config))

    def tiles_v(self, config: RuleConfig | SerialConfig) -> int:
        return cdiv(self.width, self.block_v(config))

    def serial(
        self, configs: tuple[SerialConfig, ...], *, key_rows: int, value_rows: int
    ) -> SerialConfig:
        """The first of the lines that gives nearly each multiprocessor a program; where a line's
        tile of a state is larger than registers should hold, the last one. For each token a chunk
        loads ``key_rows`` rows of K columns and ``value_rows`` of V.
        """
        gpu, size = device_properties(self.device), self.dtype.itemsize
        row = size * self.block_k(configs[0])
        # Hopper multiplies 16-bit tiles where they lie in shared memory.
        in_place = self.has_wgmma and size == 2
        small = [line for line in configs if size * self.state_tile(line) <= LARGEST_STATE]
        lines = small if in_place or row < LONG_ROW else configs[-1:]
        heads, wanted = self.sequences * self.value_heads, 0.75 * gpu.multiprocessors
        enough = (line for line in lines if heads * self.tiles_v(line) >= wanted)
        line = next(enough, configs[-1])
        if in_place:
            token = size * (key_rows * self.block_k(line) + value_rows * self.block_v(line))
            stages = (gpu.shared_bytes - size * self.state_tile(line)) // (CHUNK * token)
        else:
            # Of longer rows loads ahead would take more shared memory than there is.
            longest = LONG_ROW if self.has_wgmma or size == 2 else LONG_ROW // 2
            stages = 2 if row <= longest else 1
        return line._replace(num_stages=max(1, min(line.num_stages, stages)))

    def state_tile(self, config: SerialConfig) -> int:
        """Numbers of a state that one program carries."""
        return self.block_k(config) * self.block_v(config)

    def launch(
        self,
        kernel: Any,
        programs: int,
        strides: Sequence[Shape],
        config: RuleConfig | SerialConfig,
        parts: int = 0,
    ) -> Launch:
        """A kernel of the rule, over operands [B, T, heads, width] of these strides."""
        columns = (self.block_k(config), self.block_v(config))
        return Launch(
            kernel,
            (programs,),
            self.device,
            (*self.counts, *itertools.chain.from_iterable(strides)),
            dict(num_warps=config.num_warps if self.has_wgmma else 8, num_stages=config.num_stages),
            CONFIG=Constants(
                *(self.keys, self.width, self.group, *columns),
                UPCAST=interpreted(),
                PRECISION=self.precision,
                INVERSE=self.inverse_precision,
                SPLIT=splits_decays(self.dtype),
                PARTS=parts,
            ),
        )

    def of_units(self, *shape: int, dtype: torch.dtype | None = None) -> Allocator:
        """The memory of a tile of each unit."""
        shape = (self.chunks, self.value_heads, *shape)
        return allocator(shape, dtype or self.dtype, self.device)

    def of_tokens(self, *shape: int, dtype: torch.dtype) -> Allocator:
        """The memory of numbers of each token and value head: zeros for tokens outside all
        sequences.
        """
        shape = (self.batch, self.tokens, self.value_heads, *shape)
        if self.varlen:
            return functools.partial(torch.zeros, shape, dtype=dtype, device=self.device)
        return allocator(shape, dtype, self.device)

    def operand_shapes(self) -> tuple[Shape, Shape, Shape]:
        """The shapes of q, k and v."""
        rows = self.batch, self.tokens
        q = *rows, self.heads, self.keys
        return q, q, (*rows, self.value_heads, self.width)


def problem_of(q: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Problem:
    tf32 = q.dtype == torch.float32 and allows_tf32()
    batch, tokens, heads, keys = q.shape
    return Problem(
        batch=batch,
        tokens=tokens,
        heads=heads,
        value_heads=v.shape[2],
        keys=keys,
        width=v.shape[3],
        sequences=batch if cu_seqlens is None else cu_seqlens.numel() - 1,
        chunks=count_chunks(q, cu_seqlens),
        varlen=cu_seqlens is not None,
        has_state=state is not None,
        dtype=q.dtype,
        # Three products of TF32 parts are as good as one of fp32, and fit the same units.
        precision="tf32" if tf32 else "tf32x3",
        device=q.device,
    )


class Tables(NamedTuple):
    """Where chunks and sequences lie, computed on the device; None where each row is a sequence.

    Attributes:
        chunks: ``[chunks, 2]``, first token and number of tokens, 0 for a chunk past the last one.
        sequences: ``[N, 3]``, first token, number of tokens and first chunk.
    """

    chunks: Tensor | None
    sequences: Tensor | None


NO_TABLES = Tables(None, None)


def tables_of(problem: Problem, cu_seqlens: Tensor) -> Tables:
    # No check has read them: bounds out of order must not lead out of memory.
    bounds = cu_seqlens.clamp(0, problem.tokens).int().cummax(0).values
    begin, end = bounds[:-1], bounds[1:]
    length = end - begin
    count = (length + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    ends = count.cumsum(0, dtype=torch.int32)
    first_chunk = torch.nn.functional.pad(ends[:-1], (1, 0))
    chunk = torch.arange(problem.chunks, dtype=torch.int32, device=ends.device)
    sequence = torch.searchsorted(ends, chunk, right=True).clamp(max=problem.sequences - 1)
    first = (begin - CHUNK * first_chunk)[sequence] + CHUNK * chunk
    inside = (end[sequence] - first).clamp(0, CHUNK)
    return Tables(torch.stack((first, inside), 1), torch.stack((begin, length, first_chunk), 1))


def aligned(*tensors: Tensor | None) -> list[Any]:
    """The tensors, each that starts within a vector as a contiguous copy."""
    contiguous = torch.contiguous_format
    return [
        x if x is None or x.data_ptr() % VECTOR == 0 else x.clone(memory_format=contiguous)
        for x in tensors
    ]


def read_strides(
    operands: tuple[Layout, ...], shapes: Sequence[Shape]
) -> tuple[tuple[bool, ...], list[Shape]]:
    """Which operands [B, T, heads, width] are copied first, and the strides of batch, tokens and
    heads of all, as they are read.
    """
    copies = tuple(
        (strides[-1] != 1 and shape[-1] > 1) or any(stride % VECTOR for stride in strides[:-1])
        for (_, strides), shape in zip(operands, shapes, strict=True)
    )
    return copies, [
        (tokens * heads * width, heads * width, width) if copy else strides[:-1]
        for copy, (_, strides), (_, tokens, heads, width) in zip(
            copies, operands, shapes, strict=True
        )
    ]


def rule_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(o, end, inverses, states, decays)``."""
    q, k, v, g, beta, state = aligned(q, k, v, g, beta, state)
    problem = problem_of(q, v, state, cu_seqlens)
    plan = forward_plan(problem, layouts(q, k, v))
    # W; and T (beta v), over which V' is written.
    w, values, inverses, states, decays, end, o = map(call, plan.memory)
    if not v.numel():
        # After no token the state is the initial one.
        end = end.zero_() if state is None else end.copy_(state)
        return o, end, inverses, states, decays
    q, k, v = contiguous_where((q, k, v), plan.copies)
    g, beta = g.contiguous(), beta.contiguous()
    state = None if state is None else state.contiguous()
    tables = NO_TABLES if cu_seqlens is None else tables_of(problem, cu_seqlens)
    prepare, carry_states, write_outputs = plan.launches
    launch_in_order(
        LaunchCall(prepare, (k, v, g, beta, tables.chunks, w, values, inverses, decays)),
        LaunchCall(carry_states, (k, w, values, decays, state, tables.sequences, states, end)),
        LaunchCall(write_outputs, (q, k, values, states, decays, tables.chunks, o), (scale,)),
    )
    return o, end, inverses, states, decays


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Layout, ...]) -> RulePlan:
    """The plan for operands of these layouts: q, k and v."""
    copies, (q, k, v) = read_strides(operands, problem.operand_shapes())
    serial = problem.serial(STATES, key_rows=2, value_rows=1)
    heads, keys, width = problem.sequences * problem.value_heads, problem.keys, problem.width
    launches = (
        problem.launch(kernels.prepare_kernel, problem.units, (k, v), PREPARE),
        problem.launch(kernels.states_kernel, heads * problem.tiles_v(serial), (k,), serial),
        problem.launch(
            kernels.outputs_kernel, problem.units * problem.tiles_v(OUTPUTS), (q, k), OUTPUTS
        ),
    )
    memory = (
        problem.of_units(CHUNK, keys),
        problem.of_units(CHUNK, width),
        problem.of_units(CHUNK, CHUNK),
        problem.of_units(keys, width),
        problem.of_units(*decays_shape(problem.dtype), dtype=torch.float32),
        allocator(
            (problem.sequences, problem.value_heads, keys, width), torch.float32, problem.device
        ),
        problem.of_tokens(width, dtype=problem.dtype),
    )
    return RulePlan(copies, launches, memory)
