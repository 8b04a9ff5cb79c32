"""What is timed and against whom: ``python -m fusewright_testkit.bench attention``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.attention import (
    apply_rotary,
    rectangular_attention,
    rotary,
    sdpa_backend,
    sliding_window_attention,
)
from fusewright.attention.positions import reference as rotary_reference
from fusewright.attention.rectangular import reference as rectangular_reference
from fusewright.attention.window import reference as window_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled, installed
from torch.nn.attention import SDPBackend, sdpa_kernel

# What the names in cases count, in the picture.
WORDS = {"N": "{} targets", "window": "window {}", "K": "{} operands", "P": "{} prefix rows"}
Tensor = torch.Tensor
Attention = Callable[..., Tensor]
Shape = tuple[int, ...]

# B, M keys, N further queries, and up to which M and N a case is checked against fp64, whose scores
# of all queries and keys would not fit beside each other.
SHAPES = ((256, 64, 500), (4, 10000, 1000))
# B, queries and M keys of few queries that see very many keys.
FEW_QUERIES = ((1, 1024, 200_000), (1, 5000, 200_000))
CHECKED_KEYS, CHECKED_QUERIES = 1000, 100
HEADS, WIDTH = 8, 64
# B, T and H of a causal window, and the T at which it is checked.
WINDOW, WINDOW_SHAPES = 512, ((4, 4096, 8), (4, 4096, 5), (4, 16384, 8))
CHECKED_TOKENS = 1500
# T and H of documents of these lengths, over and over, in one row of the batch.
PACKED_SHAPES, DOCUMENTS = ((16384, 8),), (700, 100, 1, 2300, 48, 1500, 900)
# A mask of so many tokens squared is what SDPA holds; beyond, it would not fit beside the copies.
LONGEST_MASK = 4096
# B, T, H and D of keys and values whose keys are rotated, and P of a prefix; with one there is a
# second operand.
ROTARY_SHAPES = ((4, 4096, 8, 64, 0), (4, 512, 8, 40, 16))
# B, T, H and D of queries, all of whose columns are rotated.
APPLY_SHAPES = ((4, 4096, 8, 64), (4, 4096, 8, 128))
ROPE_BASE = 10000.0
ANY_SDPA = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def cases() -> list[Case]:
    """Context and targets that attend to the context, a sequence to a window of itself, and rotary
    positions, in bf16.
    """
    rectangles = [
        # One tile serves the first, Hopper's own kernels the second.
        *(dataclasses.replace(context_case(*shape), first_call=True) for shape in SHAPES),
        *(few_queries_case(*shape) for shape in FEW_QUERIES),
    ]
    windows = [window_case(*shape) for shape in WINDOW_SHAPES]
    windows += [packed_case(*shape) for shape in PACKED_SHAPES]
    rotations = [rotary_case(*shape) for shape in ROTARY_SHAPES]
    return rectangles + windows + rotations + [apply_case(*shape) for shape in APPLY_SHAPES]


def context_case(batches: int, keys: int, targets: int) -> Case:
    """Keys and further rows all look at the keys."""
    sizes = {"B": batches, "M": keys, "N": targets}
    checked_keys = min(keys, CHECKED_KEYS)
    checked = min(batches, 4), checked_keys + min(targets, CHECKED_QUERIES), checked_keys
    return rectangular_case(sizes, (batches, keys + targets, keys), checked)


def few_queries_case(batches: int, queries: int, keys: int) -> Case:
    sizes = {"B": batches, "Nq": queries, "M": keys}
    checked = batches, min(queries, CHECKED_QUERIES), min(keys, CHECKED_KEYS)
    return rectangular_case(sizes, (batches, queries, keys), checked)


def rectangular_case(sizes: dict[str, int], whole: Shape, checked: Shape) -> Case:
    """B, queries and keys that are timed, and those that are checked."""

    def shapes(batches: int, queries: int, keys: int) -> list[Shape]:
        return [(batches, rows, HEADS, WIDTH) for rows in (queries, keys, keys)]

    return attention_case(
        "rectangular_attention",
        sizes | {"H": HEADS, "D": WIDTH},
        rectangular_reference.rectangular_attention,
        shapes(*whole),
        shapes(*checked),
        pairs=whole[1] * whole[2],
    )


def window_case(batches: int, tokens: int, heads: int) -> Case:
    shorter = min(WINDOW, tokens)
    return attention_case(
        "sliding_window_attention",
        {"B": batches, "T": tokens, "window": WINDOW, "H": heads, "D": WIDTH},
        reference_window,
        [(batches, tokens, heads, WIDTH)] * 3,
        [(1, CHECKED_TOKENS, heads, WIDTH)] * 3,
        pairs=tokens * shorter - shorter * (shorter - 1) // 2,
    )


def packed_case(tokens: int, heads: int) -> Case:
    """Documents in a window, one after the other in one row of the batch."""
    lengths = lengths_of(tokens)
    shorter = [min(WINDOW, length) for length in lengths]
    case = attention_case(
        "sliding_window_attention",
        {"B": 1, "T": tokens, "window": WINDOW, "H": heads, "D": WIDTH, "documents": len(lengths)},
        reference_window,
        [(1, tokens, heads, WIDTH)] * 3,
        [],
        pairs=sum(n * m - m * (m - 1) // 2 for n, m in zip(lengths, shorter, strict=True)),
    )

    def inputs(tokens: int, device: str) -> list[Tensor | None]:
        drawn = normal([(1, tokens, heads, WIDTH)] * 3, case.dtype, device)
        return [*drawn, bounds_of(tokens, device)]

    return dataclasses.replace(
        case,
        inputs=functools.partial(inputs, tokens),
        sample=functools.partial(inputs, CHECKED_TOKENS),
    )


def lengths_of(tokens: int) -> list[int]:
    """Those of DOCUMENTS, over and over, until they are so many tokens."""
    lengths: list[int] = []
    for length in itertools.cycle(DOCUMENTS):
        if not tokens:
            break
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
    return lengths


def bounds_of(tokens: int, device: str) -> Tensor:
    """Where the documents of so many tokens begin and end."""
    ends = [0, *itertools.accumulate(lengths_of(tokens))]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def reference_window(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, scale: float
) -> Tensor:
    bounds = None if cu_seqlens is None else cu_seqlens.unsqueeze(0)
    return window_reference.sliding_window_attention(q, k, v, WINDOW, bounds=bounds, scale=scale)


def ours_window(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return sliding_window_attention(q, k, v, WINDOW, cu_seqlens=cu_seqlens)


def attention_case(
    op: str,
    sizes: dict[str, int],
    reference: Attention,
    shapes: list[Shape],
    sample: list[Shape],
    pairs: int,
) -> Case:
    """Attention in bf16: the shapes of q, k and v, and those that are checked; how many pairs of
    queries and keys a head multiplies.
    """
    dtype = torch.bfloat16
    wide, narrow, _ = (math.prod(shape) * dtype.itemsize for shape in shapes)
    batches, _, heads, width = shapes[0]
    product = 2 * batches * heads * width * pairs
    return Case(
        op=op,
        sizes=sizes,
        dtype=dtype,
        reference=functools.partial(reference, scale=WIDTH**-0.5),
        inputs=functools.partial(normal, shapes, dtype),
        sample=functools.partial(normal, sample, dtype),
        # q, k, v and o; q, k, v, do and the three gradients.
        bytes_moved=by_pass(2 * wide + 2 * narrow, 3 * wide + 4 * narrow),
        # The forward pass multiplies twice, the backward pass five times.
        flops=by_pass(2 * product, 5 * product),
    )


def rotary_case(batches: int, tokens: int, heads: int, width: int, prefix: int) -> Case:
    dtype = torch.bfloat16
    shape, prefix_shape = (batches, tokens, 2, heads, width), (prefix, 2, heads, width)
    # With a prefix there is a second operand too.
    shapes = [shape, shape, prefix_shape] if prefix else [shape]
    row = 2 * heads * width * dtype.itemsize
    rows = batches * tokens * row * (2 if prefix else 1)
    angles = tokens * width * torch.float32.itemsize
    # What is read and what is written; a prefix is read once and written for each row.
    moved = 2 * rows + angles + (batches + 1) * prefix * row
    return Case(
        op="rotary",
        sizes={"B": batches, "T": tokens, "K": 2, "H": heads, "D": width, "P": prefix},
        dtype=dtype,
        reference=with_angles(rotary_reference.rotary),
        inputs=functools.partial(normal, shapes, dtype),
        bytes_moved=by_pass(moved, moved),
    )


def apply_case(batches: int, tokens: int, heads: int, width: int) -> Case:
    dtype = torch.bfloat16
    shape = (batches, tokens, heads, width)
    # x and the result, cos and sin.
    moved = 2 * math.prod(shape) * dtype.itemsize + tokens * width * torch.float32.itemsize
    return Case(
        op="apply_rotary",
        sizes={"B": batches, "T": tokens, "H": heads, "D": width},
        dtype=dtype,
        reference=of_queries(rotary_reference.apply_rotary),
        inputs=functools.partial(normal, [shape], dtype),
        bytes_moved=by_pass(moved, moved),
    )


def normal(shapes: list[Shape], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Tensors from normal distributions."""
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


@functools.cache
def angles_of(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position / base^(2 i / D), [T, D / 2]."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float64)
    positions = torch.arange(tokens, device=device, dtype=torch.float64)
    angles = positions.unsqueeze(-1) * ROPE_BASE ** (-steps / width)
    return angles.cos().float(), angles.sin().float()


def with_angles(call: Callable[..., Tensor]) -> Attention:
    """A function of rows, cos, sin, a second operand and a prefix as one of the three that get a
    gradient.
    """

    def of_rows(rows: Tensor, beside: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        angles = angles_of(rows.shape[1], rows.shape[-1], rows.device)
        wide = torch.promote_types(rows.dtype, torch.float32)
        cos, sin = (x.to(wide) for x in angles)
        return call(rows, cos, sin, beside, prefix)

    return of_rows


def of_queries(call: Callable[..., Tensor]) -> Attention:
    """A function of x, cos and sin as one of x."""

    def of_x(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (each.to(wide) for each in angles_of(x.shape[1], x.shape[-1], x.device))
        return call(x, cos, sin)

    return of_x


def torch_apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation as models write it."""
    cos, sin = (torch.cat([each, each], -1).unsqueeze(1) for each in (cos, sin))
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def ours_rotary(
    rows: Tensor, cos: Tensor, sin: Tensor, beside: Tensor | None, prefix: Tensor | None
) -> Tensor:
    return rotary(rows, cos, sin, beside=beside, prefix=prefix)


def torch_rotary(
    rows: Tensor, cos: Tensor, sin: Tensor, beside: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """The rotation as a user of plain torch writes it."""
    parts = [torch_rotated(x, cos, sin) for x in (rows, beside) if x is not None]
    joint = torch.stack(parts, 2).flatten(1, 2) if len(parts) > 1 else parts[0]
    if prefix is None:
        return joint
    return torch.cat([prefix.expand(len(rows), *prefix.shape), joint], 1)


def torch_rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated keys with their values."""
    cos, sin = (torch.cat([x, x], -1).unsqueeze(1) for x in (cos, sin))
    k, v = rows.unbind(2)
    x, y = k.chunk(2, -1)
    rotated = k * cos + torch.cat([-y, x], -1) * sin
    return torch.stack([rotated.to(v.dtype), v], 2)


def providers() -> dict[str, dict[str, Attention]]:
    """Ours, torch's own backends each asked for by name, FlexAttention, and FlashAttention where it
    is installed; of a window, SDPA with the mask that it then needs; of rotary positions, torch and
    torch.compile.
    """
    return {
        "fusewright": {
            "rectangular_attention": rectangular_attention,
            "sliding_window_attention": ours_window,
            "rotary": with_angles(ours_rotary),
            "apply_rotary": of_queries(apply_rotary),
        },
        "torch": {"rotary": with_angles(torch_rotary), "apply_rotary": of_queries(torch_apply)},
        "compile": {
            "rotary": with_angles(compiled(torch_rotary)),
            "apply_rotary": of_queries(compiled(torch_apply)),
        },
        "sdpa-flash": {"rectangular_attention": sdpa(SDPBackend.FLASH_ATTENTION)},
        "sdpa-cudnn": {"rectangular_attention": sdpa(SDPBackend.CUDNN_ATTENTION)},
        "sdpa-mask": {"sliding_window_attention": sdpa_with_mask},
        "flex": {
            "rectangular_attention": flex(),
            "sliding_window_attention": flex(in_window),
        },
        **installed(("fa4", "flash-attn-4", flash_attention)),
    }


@functools.cache
def window_mask(tokens: int, device: torch.device, packed: bool) -> Tensor:
    """Which keys a token sees, [T, T]."""
    token = torch.arange(tokens, device=device)
    sees = in_document(tokens, str(device)) if packed else in_window
    return sees(token, token, token[:, None], token)


def sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """torch's attention with an explicit mask, by whichever backend it takes then."""
    tokens = q.shape[1]
    if tokens > LONGEST_MASK:
        raise ValueError(f"a mask of {tokens} x {tokens} is not timed")
    mask = window_mask(tokens, q.device, cu_seqlens is not None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


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


def in_window(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """The window as FlexAttention asks for it."""
    return (row >= key) & (row - key < WINDOW)


def in_document(tokens: int, device: str) -> Callable[..., Tensor]:
    """The same of packed documents."""
    token = torch.arange(tokens, device=device)
    document = torch.searchsorted(bounds_of(tokens, device), token, right=True)

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return in_window(batch, head, row, key) & (document[row] == document[key])

    return sees


def flex(sees: Callable | None = None) -> Attention:
    """torch's FlexAttention, compiled: of all keys, or with the block mask of those that a row
    sees.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def block_mask(tokens: int, device: str, packed: bool) -> Any:
        wanted = in_document(tokens, device) if packed else sees
        return wanted and create_block_mask(wanted, None, None, tokens, tokens, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        mask = block_mask(q.shape[1], str(q.device), cu_seqlens is not None)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, block_mask=mask).transpose(1, 2)

    return call


def flash_attention() -> dict[str, Attention]:
    """FlashAttention-4's function, of all keys or of a window, causal; its backward pass adds in
    any order unless told not to.
    """
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def call(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Tensor:
        function = flash_attn_func
        if cu_seqlens is not None:
            function = flash_attn_varlen_func
            q, k, v = (x.squeeze(0) for x in (q, k, v))
            longest = max(lengths_of(len(q)))
            options |= dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
            options |= dict(max_seqlen_q=longest, max_seqlen_k=longest)
        outputs = function(q, k, v, **options)
        o: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return o if cu_seqlens is None else o.unsqueeze(0)

    # So many before and after a row.
    window = dict(causal=True, window_size=(WINDOW - 1, 0))
    return {
        "rectangular_attention": call,
        "sliding_window_attention": functools.partial(call, **window),
    }
