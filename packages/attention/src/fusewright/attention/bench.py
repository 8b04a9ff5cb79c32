"""What is timed and against whom: ``python -m fusewright_testkit.bench attention``."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import rectangular_attention, reference, sdpa_backend

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# B, M keys, N further queries, and up to which M and N a case is checked against fp64, whose scores
# of all queries and keys would not fit beside each other.
SHAPES = ((256, 64, 500), (4, 10000, 1000))
CHECKED_KEYS, CHECKED_QUERIES = 1000, 100
HEADS, WIDTH = 8, 64
ANY_SDPA = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
# The forward pass multiplies twice, the backward pass five times.
PRODUCTS = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}


class Case(NamedTuple):
    """One op at one size; ``sample`` are inputs of the same kind at which it is checked."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Attention
    inputs: Callable[[str], list[Tensor]]
    sample: Callable[[str], list[Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


def cases() -> list[Case]:
    """Context and targets that attend to the context, in bf16."""
    return [case_of(*shape) for shape in SHAPES]


def case_of(batches: int, keys: int, targets: int) -> Case:
    queries, dtype = keys + targets, torch.bfloat16
    wide, narrow = (batches * rows * HEADS * WIDTH * dtype.itemsize for rows in (queries, keys))
    # q, k, v and o; q, k, v, do and the three gradients.
    forward, backward = 2 * wide + 2 * narrow, 3 * wide + 4 * narrow
    product = 2 * batches * HEADS * WIDTH * queries * keys
    sample = (min(batches, 4), min(keys, CHECKED_KEYS), min(targets, CHECKED_QUERIES))
    return Case(
        op="rectangular_attention",
        sizes={"B": batches, "M": keys, "N": targets, "H": HEADS, "D": WIDTH},
        dtype=dtype,
        reference=functools.partial(reference.rectangular_attention, scale=WIDTH**-0.5),
        inputs=functools.partial(inputs, batches, keys, targets, dtype),
        sample=functools.partial(inputs, *sample, dtype),
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={name: count * product for name, count in PRODUCTS.items()},
    )


def inputs(batches: int, keys: int, targets: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k and v from normal distributions."""
    rows = (keys + targets, keys, keys)
    return [torch.randn(batches, n, HEADS, WIDTH, dtype=dtype, device=device) for n in rows]


def providers() -> dict[str, dict[str, Attention]]:
    """Ours, torch's own backends each asked for by name, FlexAttention, and FlashAttention where it
    is installed.
    """
    found: dict[str, Attention] = {
        "fusewright": rectangular_attention,
        "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flex": flex(),
    }
    with contextlib.suppress(ImportError):
        name, call = flash_attention()
        found[name] = call
    return {name: {"rectangular_attention": call} for name, call in found.items()}


def sdpa(wanted: SDPBackend) -> Attention:
    """torch's attention by one of its backends alone. The first call of a size says that this one
    runs, or warns which one torch would take in its place; then torch raises.
    """
    in_order = [wanted, *(one for one in ANY_SDPA if one != wanted)]
    stated = set()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = tuple(q.shape), tuple(k.shape)
        if sizes not in stated:
            stated.add(sizes)
            with sdpa_kernel(in_order, set_priority=True):
                taken = sdpa_backend(q, k, v)
            if taken == wanted:
                print(f"scaled_dot_product_attention{sizes} runs {taken.name}")
            else:
                warnings.warn(f"wanted {wanted.name}, torch takes {taken.name}", stacklevel=2)
        with sdpa_kernel(wanted):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return call


def flex() -> Attention:
    """torch's FlexAttention without a mask, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return call


def flash_attention() -> tuple[str, Attention]:
    """FlashAttention-4's function; its backward pass adds in any order unless told not to."""
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v)
        return found[0] if isinstance(found, tuple) else found

    return f"fa4-{importlib.metadata.version('flash-attn-4')}", call
