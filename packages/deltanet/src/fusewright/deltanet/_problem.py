"""One call of gated_delta_rule as its kernels see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ._backends import card_of, interpreted
from ._configs import VECTOR, WIDEST, RuleConfig, SerialConfig
from ._launch import Allocate, Kind, Launch, memory
from .reference import CHUNK, most_chunks

Tensor = torch.Tensor
Strides = tuple[int, ...]

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


class Problem(NamedTuple):
    """A call as its kernels see it."""

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
        return self.chunks * self.value_heads

    @property
    def group(self) -> int:
        return self.value_heads // self.heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a row, heads, and chunks of a sequence where all have as many."""
        return self.tokens, self.value_heads, -(-self.tokens // CHUNK)

    @property
    def inverse_precision(self) -> str:
        """Of the products that invert I + A. TF32 is finer than bf16, to which the inverse is
        rounded, but not than float16.
        """
        return "tf32" if self.dtype == torch.bfloat16 else self.precision

    @property
    def on_hopper(self) -> bool:
        """Whether the card has products of tiles in shared memory, which spare registers."""
        return 90 <= card_of(self.device).capability < 120

    def widest(self, config: RuleConfig | SerialConfig) -> int:
        """The most columns of a tile."""
        if isinstance(config, SerialConfig):
            return WIDEST
        most = WIDEST if self.on_hopper else config.elsewhere
        return min(most, WIDEST_EXACT) if self.dtype == torch.float32 else most

    def block_k(self, config: RuleConfig | SerialConfig) -> int:
        whole = max(FEWEST_ROWS, triton.next_power_of_2(self.keys))
        if isinstance(config, SerialConfig):
            return whole
        return min(config.block_k, whole, self.widest(config))

    def block_v(self, config: RuleConfig | SerialConfig) -> int:
        # In narrower ones ptxas reads registers that nothing has written.
        fewest = SMALLEST_TILE if isinstance(config, SerialConfig) else FEWEST_ROWS
        whole = max(fewest, triton.next_power_of_2(self.width))
        return min(config.block_v, whole, self.widest(config))

    def tiles_v(self, config: RuleConfig | SerialConfig) -> int:
        return triton.cdiv(self.width, self.block_v(config))

    def tiles_k(self, config: RuleConfig) -> int:
        return triton.cdiv(self.keys, self.block_k(config))

    def serial(
        self, configs: tuple[SerialConfig, ...], *, key_rows: int, value_rows: int
    ) -> SerialConfig:
        """The first of the lines whose programs are as many as the card's multiprocessors, but for
        a few; of lines with larger tiles of a state than registers should hold the last. A chunk
        loads ``key_rows`` rows as long as keys and ``value_rows`` as values for each token.
        """
        card, size = card_of(self.device), self.dtype.itemsize
        row = size * self.block_k(configs[0])
        # Hopper multiplies 16-bit tiles where they lie in shared memory.
        in_place = self.on_hopper and size == 2
        small = [line for line in configs if size * self.state_tile(line) <= LARGEST_STATE]
        lines = small if in_place or row < LONG_ROW else configs[-1:]
        heads, wanted = self.sequences * self.value_heads, 0.75 * card.multiprocessors
        enough = (line for line in lines if heads * self.tiles_v(line) >= wanted)
        line = next(enough, configs[-1])
        if in_place:
            token = size * (key_rows * self.block_k(line) + value_rows * self.block_v(line))
            stages = (card.shared_bytes - size * self.state_tile(line)) // (CHUNK * token)
        else:
            # Of longer rows loads ahead would take more shared memory than there is.
            longest = LONG_ROW if self.on_hopper or size == 2 else LONG_ROW // 2
            stages = 2 if row <= longest else 1
        return line._replace(num_stages=max(1, min(line.num_stages, stages)))

    def state_tile(self, config: SerialConfig) -> int:
        """Numbers of a state that one program carries."""
        return self.block_k(config) * self.block_v(config)

    def launch(
        self,
        kernel: Any,
        programs: int,
        strides: Sequence[Strides],
        config: RuleConfig | SerialConfig,
        **constants: Any,
    ) -> Launch:
        """A kernel of the rule, over operands [B, T, heads, width] of these strides."""
        extra = {name: constants.pop(name) for name in ("INVERSE",) if name in constants}
        return Launch(
            kernel,
            (programs,),
            self.device,
            (*self.sizes, *(stride for operand in strides for stride in operand)),
            dict(num_warps=config.num_warps if self.on_hopper else 8, num_stages=config.num_stages),
            VARLEN=self.varlen,
            UPCAST=interpreted(),
            PRECISION=self.precision,
            **extra,
            GROUP=self.group,
            K=self.keys,
            V=self.width,
            BLOCK_K=self.block_k(config),
            BLOCK_V=self.block_v(config),
            **constants,
        )

    def of_units(self, *shape: int, dtype: torch.dtype | None = None) -> Allocate:
        """Memory for a tile of every unit."""
        shape = (self.chunks, self.value_heads, *shape)
        return memory(shape, dtype or self.dtype, self.device)

    def of_tokens(self, *shape: int, dtype: torch.dtype) -> Allocate:
        """Memory for numbers of every token and value head. Tokens that no sequence holds have
        zeros.
        """
        shape = (self.batch, self.tokens, self.value_heads, *shape)
        if self.varlen:
            return functools.partial(torch.zeros, shape, dtype=dtype, device=self.device)
        return memory(shape, dtype, self.device)


def problem_of(q: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Problem:
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    batch, tokens, heads, keys = q.shape
    return Problem(
        *(batch, tokens, heads, v.shape[2], keys, v.shape[3]),
        sequences=batch if cu_seqlens is None else cu_seqlens.numel() - 1,
        chunks=most_chunks(q, cu_seqlens),
        varlen=cu_seqlens is not None,
        has_state=state is not None,
        dtype=q.dtype,
        # Three products of TF32 parts are as good as one of fp32, and fit the same units.
        precision="tf32" if tf32 else "tf32x3",
        device=q.device,
    )


class Tables(NamedTuple):
    """Where chunks and sequences lie, for the device alone; None where all rows are one sequence.

    Attributes:
        chunks: ``[chunks, 2]``, first token and number of tokens, 0 of a chunk that is not there.
        sequences: ``[N, 3]``, first token, number of tokens and first chunk.
    """

    chunks: Tensor | None
    sequences: Tensor | None


def tables_of(problem: Problem, cu_seqlens: Tensor | None) -> Tables:
    if cu_seqlens is None:
        return Tables(None, None)
    # Nobody has read them: what is out of order must not lead out of memory.
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
    """The tensors, in the place of each that starts within a vector a contiguous copy."""
    contiguous = torch.contiguous_format
    return [
        x if x is None or x.data_ptr() % VECTOR == 0 else x.clone(memory_format=contiguous)
        for x in tensors
    ]


def walks(operands: tuple[Kind, ...], shapes: Sequence[Strides]) -> tuple[tuple[bool, ...], list]:
    """Which operands [B, T, heads, width] are copied first, and the strides of batch, tokens and
    heads of all, as they are read.
    """
    copies = tuple(
        (strides[-1] != 1 and shape[-1] > 1) or any(stride % VECTOR for stride in strides[:-1])
        for (_, strides), shape in zip(operands, shapes, strict=True)
    )
    return copies, [
        (tokens * heads * width, heads * width, width) if copied_first else strides[:-1]
        for copied_first, (_, strides), (_, tokens, heads, width) in zip(
            copies, operands, shapes, strict=True
        )
    ]
