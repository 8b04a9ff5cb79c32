"""The launches of the backward pass of the narrow second layer of grouped heads, for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import Allocator, DescribedLaunch, Launch, allocator, cdiv
from .._core.lazy import lazy_module

if TYPE_CHECKING:
    from .._core import kernels_gluon
    from . import kernels_hopper_backward as kernels
else:
    kernels = lazy_module(__package__, "kernels_hopper_backward")
    kernels_gluon = lazy_module(f"{__package__.rpartition('.')[0]}._core", "kernels_gluon")

Tensor = torch.Tensor
# Rows and hidden units of a tile, units of a copy, and columns of the terms of three numbers.
ROWS = 64
COLS = 128
HALF = 64
TERMS = 16
# Units of a head are copied from multiples of 16 bytes.
ALIGNED = 16


class Config(NamedTuple):
    """Places for ``stages`` tiles of each group of warps, registers a thread that computes and that
    copies; triples of a program that splits numbers into terms.
    """

    stages: int
    registers: int
    copying_registers: int
    split_block: int


CONFIG = Config(stages=4, registers=232, copying_registers=24, split_block=64)
# From so many rows on it takes less time than the plain kernel.
FEWEST_ROWS = 1024


class HopperPlan(NamedTuple):
    """One backward pass: its launches and its memory."""

    split_dparams: Launch
    split_weight: Launch
    launch: DescribedLaunch
    add: Launch
    dparams_terms: Allocator
    weight_terms: Allocator
    sums: Allocator


def serves(u: Tensor) -> bool:
    """Whether hidden units ``[..., G, S]`` are served."""
    stored = u.shape[-1]
    if u.dtype != torch.bfloat16 or interpreted() or not u.numel():
        return False
    if device_properties(u.device).capability != 90 or u.shape[:-2].numel() < FEWEST_ROWS:
        return False
    return not (stored * u.itemsize % ALIGNED or u.data_ptr() % ALIGNED)


def silu_heads_backward(
    dparams: Tensor, u: Tensor, weight: Tensor, du: Tensor, dweight: Tensor
) -> None:
    """Write du, which may be u, and dweight; all are contiguous."""
    heads, stored = u.shape[-2:]
    rows = u.shape[:-2].numel()
    plan = plan_of(rows, heads, stored, dparams.dtype, u.dtype, weight.dtype, u.device)
    dparams_terms, weight_terms, sums = plan.dparams_terms(), plan.weight_terms(), plan.sums()
    plan.split_dparams((dparams, dparams_terms))
    plan.split_weight((weight, weight_terms))
    shape = rows, heads, stored
    plan.launch((u.view(shape), dparams_terms, weight_terms, du.view(shape), sums))
    plan.add((sums, dweight))


@functools.lru_cache(maxsize=4096)
def plan_of(
    rows: int,
    heads: int,
    stored: int,
    dparams_dtype: torch.dtype,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> HopperPlan:
    """The launches for so many rows and operands of these dtypes."""
    row_tiles, of_head = cdiv(rows, ROWS), cdiv(stored, COLS)
    panels = heads * of_head
    programs = min(device_properties(device).multiprocessors, row_tiles * panels)
    # Programs that have rows of one panel.
    most = cdiv(programs, panels) + 1
    launch = DescribedLaunch(
        kernels.hopper_silu_heads_backward_kernel,
        (programs,),
        device,
        (row_tiles, panels, of_head, stored, most),
        dict(num_warps=4),
        STAGES=CONFIG.stages,
        REGISTERS=CONFIG.registers,
        COPYING_REGISTERS=CONFIG.copying_registers,
    )
    of_u = in_boxes([ROWS, 1, HALF], 128)
    terms_of_rows, terms_of_units = in_boxes([ROWS, TERMS], 32), in_boxes([COLS, TERMS], 32)
    launch.descriptors = (of_u, terms_of_rows, terms_of_units, of_u)
    return HopperPlan(
        split_plan(rows * heads, False, device),
        split_plan(heads * stored, True, device),
        launch,
        Launch(
            kernels.add_tiles_kernel,
            (panels,),
            device,
            (row_tiles, panels, of_head, programs, stored, most),
            dict(num_warps=4),
        ),
        allocator((rows, heads * TERMS), dtype, device),
        allocator((heads * stored, TERMS), dtype, device),
        allocator((panels, most, 2, COLS, TERMS), torch.float32, device),
    )


def split_plan(triples: int, of_weights: bool, device: torch.device) -> Launch:
    """The launch that writes the terms of so many triples."""
    return Launch(
        kernels.split_kernel,
        (cdiv(triples, CONFIG.split_block),),
        device,
        (triples,),
        dict(num_warps=4),
        OF_WEIGHTS=of_weights,
        BLOCK=CONFIG.split_block,
    )


def in_boxes(box: list[int], swizzle: int) -> Callable[[Tensor], Any]:
    """The descriptor of a tensor in boxes of this size, which shared memory has swizzled over so
    many bytes.
    """

    def describe(x: Tensor) -> Any:
        layout = kernels_gluon.gl.NVMMASharedLayout(swizzle, 16, rank=len(box))
        return kernels_gluon.TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)

    return describe
