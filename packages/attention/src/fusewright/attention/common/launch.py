"""The launches and plans that the passes of all attention functions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import Allocator, Launch, allocator, cdiv, contiguous_where
from .._core.lazy import lazy_module
from .problem import KernelConfig, Problem, TileConfig, tile_rows

if TYPE_CHECKING:
    from . import kernels, tiles
else:
    kernels = lazy_module(__package__, "kernels")
    tiles = lazy_module(__package__, "tiles")

Outputs = tuple[torch.Tensor | None, ...]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AddChunksConfig(NamedTuple):
    """One program adds ``block`` elements of the chunks' partial sums."""

    block: int
    num_warps: int


# Unmeasured.
ADD_CHUNKS = AddChunksConfig(block=256, num_warps=4)
# Where tasks and heads are fewer programs than so many for each multiprocessor, the queries of each
# are cut into chunks. Unmeasured.
BACKWARD_PROGRAMS_PER_SM = 2


class TileLaunch:
    """The launch of a kernel that multiplies tiles, in the sizes of a line of the tables; it reads
    the operands by pointers or, with ``descriptors`` in the line, by tensor descriptors.
    ``integers`` are what this kernel takes after the problem's.
    """

    def __init__(
        self,
        kernel: Any,
        problem: Problem,
        config: TileConfig,
        programs: int,
        integers: tuple[int, ...],
    ) -> None:
        # The rows of a tile of an operand like q, and of one like k.
        self.described: tuple[int, int] | None = None
        if config.descriptors:
            self.described = config.queries, config.keys
            # Looked up once: the launch is repeated.
            self.descriptor = tiles.descriptor
        self.launch = Launch(
            kernel,
            grid_of(programs),
            problem.device,
            (*problem.integers, *integers),
            dict(num_warps=config.num_warps),
            CONFIG=KernelConfig(
                D=problem.width,
                BLOCK_Q=config.queries,
                BLOCK_K=config.keys,
                BLOCK_D=tile_rows(problem.width),
                NUM_STAGES=config.num_stages,
                DESCRIPTORS=config.descriptors,
                UPCAST=interpreted(),
                PRECISION=problem.precision,
            ),
        )

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor | None],
        scale: float,
    ) -> None:
        if self.described is None:
            self.launch((*operands, *others), (scale,))
            return
        block_queries, block_keys = self.described
        *like_q, k, v = operands
        described = [self.descriptor(x, block_queries) for x in like_q]
        described += [self.descriptor(k, block_keys), self.descriptor(v, block_keys)]
        self.launch.dispatch((*described, *others), (scale,))


def grid_of(programs: int) -> tuple[int]:
    """A grid of this many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles of rows, got {programs}")
    return (programs,)


class ForwardPlan(NamedTuple):
    """One forward pass: what it launches (nothing where there are no queries), which of q, k and v
    it copies first, and the allocators of o, lse, softmax and o_low, None for one that is not
    asked for.
    """

    launch: TileLaunch | None
    copies: tuple[bool, ...]
    outputs: tuple[Allocator | None, ...]

    def run(
        self,
        operands: Sequence[torch.Tensor],
        others: tuple[torch.Tensor | None, ...],
        scale: float,
    ) -> Outputs:
        """Allocate and launch; ``others`` are what the kernel takes between operands and outputs.

        Returns:
            ``(o, lse, softmax, o_low)``: o contiguous, like q; lse [B, H, Nq] in fp32. The others
            are for the backward pass: softmax [2, B, H, Nq] in fp32, the maximum of each row of
            scores, in base 2, and one over the sum of their exponentials below it; o_low, like o,
            what rounding took from it.
        """
        outputs = tuple([None if make is None else make() for make in self.outputs])
        if self.launch is not None:
            if self.copies:
                operands = contiguous_where(operands, self.copies)
            self.launch(operands, (*others, *outputs), scale)
        return outputs


def plan_outputs(problem: Problem, with_lse: bool, keep: bool) -> tuple[Allocator | None, ...]:
    """The allocators of a ForwardPlan; without ``keep`` nothing is for the backward pass."""
    device, dtype, shape = problem.device, problem.dtype, problem.query_shape
    return (
        allocator(shape, dtype, device),
        allocator(problem.rows, torch.float32, device) if with_lse else None,
        allocator((2, *problem.rows), torch.float32, device) if keep else None,
        allocator(shape, dtype, device) if keep and problem.narrow else None,
    )


def plan_query_tiles(kernel: Any, problem: Problem, config: TileConfig) -> TileLaunch:
    """One program for every tile of queries of every head."""
    rows = problem.all_heads * problem.queries
    programs = problem.all_heads * cdiv(problem.queries, config.queries)
    return TileLaunch(kernel, problem, config, programs, (rows,))


def plan_add_chunks(problem: Problem, chunks: int, keys: int) -> tuple[Launch, Allocator]:
    """The launch that adds the partial sums of dk and dv which chunks of queries have for the first
    ``keys`` keys, and the allocator of those of one of the two.
    """
    head_rows = problem.heads * problem.width
    task_size = keys * head_rows
    launch = Launch(
        kernels.add_chunks_kernel,
        grid_of(problem.batches * cdiv(task_size, ADD_CHUNKS.block)),
        problem.device,
        (problem.batches * task_size, task_size, problem.keys * head_rows, chunks),
        dict(num_warps=ADD_CHUNKS.num_warps),
        BLOCK=ADD_CHUNKS.block,
    )
    partial_sums = (chunks, problem.batches, keys, problem.heads, problem.width)
    return launch, allocator(partial_sums, torch.float32, problem.device)


class BackwardPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or keys), which of do, q, k
    and v it copies first, and the allocators of dq, dk and dv.
    """

    launches: Any
    copies: tuple[bool, ...]
    dq: Allocator
    dk: Allocator
    dv: Allocator


def plan_backward(problem: Problem, launches: Any) -> BackwardPlan:
    dq, dk, dv = (
        allocator(shape, problem.dtype, problem.device)
        for shape in (problem.query_shape, problem.key_shape, problem.key_shape)
    )
    return BackwardPlan(launches, problem.copies, dq, dk, dv)
