"""The launches and plans that the passes of all attention functions share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    DescribedLaunch,
    Launch,
    Plan,
    allocator,
    cdiv,
    contiguous_where,
)
from .._core.lazy import lazy_module
from .launch_sinks import SinksPlan, without_keys
from .problem import KernelConfig, Problem, TileConfig, tile_rows

if TYPE_CHECKING:
    from . import kernels, tiles
else:
    kernels = lazy_module(__package__, "kernels")
    tiles = lazy_module(__package__, "tiles")

Outputs = tuple[torch.Tensor | None, ...]
# dq, dk, dv, and dsinks, None without sinks.
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class AddChunksConfig(NamedTuple):
    """One program adds ``block`` elements of the chunks' partial sums."""

    block: int
    num_warps: int


# Unmeasured.
ADD_CHUNKS = AddChunksConfig(block=256, num_warps=4)
# Where tasks and heads are fewer programs than so many for each multiprocessor, the queries of each
# are cut into chunks. Unmeasured.
BACKWARD_PROGRAMS_PER_SM = 2


def tile_launch(
    kernel: Any, problem: Problem, config: TileConfig, programs: int, integers: tuple[int, ...]
) -> Launch:
    """The launch of a kernel that multiplies tiles, in the sizes of a line of the tables; it reads
    the operands by pointers or, with ``descriptors`` in the line, by tensor descriptors.
    ``integers`` are what this kernel takes after the problem's.
    """
    launch = (DescribedLaunch if config.descriptors else Launch)(
        kernel,
        grid_of(programs),
        problem.device,
        (*problem.integers, *integers),
        dict(num_warps=config.num_warps),
        CONFIG=KernelConfig(
            D=problem.width,
            DV=problem.value_width,
            BLOCK_Q=config.queries,
            BLOCK_K=config.keys,
            BLOCK_D=tile_rows(problem.width),
            BLOCK_V=tile_rows(problem.value_width),
            NUM_STAGES=config.num_stages,
            DESCRIPTORS=config.descriptors,
            UPCAST=interpreted(),
            PRECISION=problem.precision,
        ),
    )
    if isinstance(launch, DescribedLaunch):
        like_q = problem.operands - 2
        rows = (*[config.queries] * like_q, config.keys, config.keys)
        launch.descriptors = tuple([partial(tiles.descriptor, block_rows=n) for n in rows])
    return launch


def grid_of(programs: int) -> tuple[int]:
    """A grid of this many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles of rows, got {programs}")
    return (programs,)


def plan_forward(problem: Problem, launch: Launch | None, with_lse: bool, keep: bool) -> Plan:
    """The plan of a forward pass, whose outputs are ``(o, lse, softmax, o_low)``.

    o is contiguous, [B, Nq, H, Dv]; lse [B, H, Nq] in fp32, with ``with_lse``. The others are for
    the backward pass, with ``keep``: softmax [2, B, H, Nq] in fp32, the maximum of each row of
    scores, in base 2, or another number near it, and one over the sum of exponentials below it;
    o_low [B, Nq, H, Dv / 8] in words, what rounding took from o (``tiles_rounding``).
    """
    device, dtype, shape = problem.device, problem.dtype, problem.output_shape
    outputs = (
        allocator(shape, dtype, device),
        allocator(problem.rows, torch.float32, device) if with_lse else None,
        allocator((2, *problem.rows), torch.float32, device) if keep else None,
        allocator(problem.low_shape, torch.int32, device) if keep and problem.narrow else None,
    )
    return Plan(launch, problem.copies, outputs)


def plan_query_tiles(
    kernel: Any, problem: Problem, config: TileConfig, tiles: int | None = None
) -> Launch:
    """One program for every tile of queries of every head, of which there may be another number
    than whole ones need.
    """
    rows = problem.all_heads * problem.queries
    if tiles is None:
        tiles = cdiv(problem.queries, config.queries)
    return tile_launch(kernel, problem, config, problem.all_heads * tiles, (rows,))


def plan_add_chunks(problem: Problem, chunks: int, keys: int) -> dict[str, Any]:
    """The fields of a BackwardPlan for the partial sums of dk and dv which chunks of queries have
    for the first ``keys`` keys.
    """
    add, sums = plan_add_sums(problem, chunks, keys, problem.width)
    fields = dict(add_chunks=add, partial_sums=sums, value_sums=sums)
    if problem.value_width != problem.width:
        add, sums = plan_add_sums(problem, chunks, keys, problem.value_width)
        fields |= dict(add_value_chunks=add, value_sums=sums)
    return fields


def plan_add_sums(problem: Problem, chunks: int, keys: int, width: int) -> tuple[Launch, Allocator]:
    """The launch that adds partial sums of keys or values of this width, and their allocator."""
    head_rows = problem.key_heads * width
    task_size = keys * head_rows
    launch = Launch(
        kernels.add_chunks_kernel,
        grid_of(problem.batches * cdiv(task_size, ADD_CHUNKS.block)),
        problem.device,
        (problem.batches * task_size, task_size, problem.keys * head_rows, chunks),
        dict(num_warps=ADD_CHUNKS.num_warps),
        BLOCK=ADD_CHUNKS.block,
    )
    partial_sums = (chunks, problem.batches, keys, problem.key_heads, width)
    return launch, allocator(partial_sums, torch.float32, problem.device)


class BackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first, the allocators of dq, dk and dv, and its
    launches, none where there are no queries or keys.

    One launch is for dq and for delta, which the next needs: dk and dv. Where keys are one tile,
    the first is for all three. Gradients of keys that all queries see may come as partial sums of
    chunks of queries, which ``add_chunks`` adds; where both are written, the second launch takes
    ``sums_beside`` the gradients. The gradient of sinks always comes as partial sums.
    """

    copies: tuple[bool, ...]
    dq: Allocator
    dk: Allocator
    dv: Allocator
    launch_dq: Launch | None = None
    add_chunks: Launch | None = None
    partial_sums: Allocator | None = None
    value_sums: Allocator | None = None
    # Where values have another width than keys: those of dv; the other is for dk alone.
    add_value_chunks: Launch | None = None
    launch_dkdv: Launch | None = None
    delta: Allocator | None = None
    sums_beside: bool = False
    sinks: SinksPlan | None = None

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        saved: tuple[torch.Tensor | None, ...],
        scale: float,
    ) -> Gradients:
        """Allocate and launch.

        Args:
            operands: do, q, k, v, dlse, what else the kernels read, and last sinks.
            saved: o, o_low and softmax of the forward pass; not read where keys are one tile.
            scale: factor of the scores.
        """
        dq, dk, dv = self.dq(), self.dk(), self.dv()
        if self.launch_dq is None:
            for grad in (dq, dk, dv):
                grad.zero_()
            *_, dlse, sinks = operands[:5] + operands[-1:]
            return dq, dk, dv, None if sinks is None else without_keys(sinks, dlse)
        if self.copies:
            operands = contiguous_where(operands, self.copies)
        sums = dk, dv
        partial = None if self.sinks is None else self.sinks.partial()
        if self.partial_sums is not None and self.value_sums is not None:
            sums = self.partial_sums(), self.value_sums()
        if self.launch_dkdv is None or self.delta is None:
            self.launch_dq((*operands, dq, *sums, partial), (scale,))
        else:
            do, q, k, v, _, *others, _ = operands
            delta, (*_, softmax) = self.delta(), saved
            self.launch_dq((*operands, *saved, delta, dq, partial), (scale,))
            results = (*sums, dk, dv) if self.sums_beside else (dk, dv)
            self.launch_dkdv((do, q, k, v, *others, softmax, delta, *results), (scale,))
        if self.add_value_chunks is not None and self.add_chunks is not None:
            self.add_chunks((sums[0], None, dk, None))
            self.add_value_chunks((sums[1], None, dv, None))
        elif self.add_chunks is not None:
            self.add_chunks((*sums, dk, dv))
        return dq, dk, dv, None if self.sinks is None else self.sinks.add(partial)


def plan_backward(problem: Problem, *launches: Any, **more: Any) -> BackwardPlan:
    """The plan of these launches, in the order of its fields."""
    dq, dk, dv = (
        allocator(shape, problem.dtype, problem.device)
        for shape in (problem.query_shape, problem.key_shape, problem.value_shape)
    )
    return BackwardPlan(problem.copies, dq, dk, dv, *launches, **more)
