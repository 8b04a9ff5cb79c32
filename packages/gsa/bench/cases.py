"""What is timed: cases of every op, their inputs, and what they are checked against."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from fusewright.gsa import indexer_topk, sparse_attention_with_lse
from fusewright.gsa.indexer import reference as indexer_reference
from fusewright.gsa.loss import reference as loss_reference
from fusewright.gsa.selection import reference as selection_reference
from fusewright.gsa.sparse import reference as sparse_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass

from .selections import WHOLE, of_blocks

BF16 = torch.bfloat16
INDEX_HEADS, INDEX_WIDTH = 4, 64
# Tokens and selected keys.
SELECTIONS = ((4096, 512), (16384, 1024), (32768, 1024))
# Tokens, selected keys, heads, heads of keys, width.
ATTENTIONS = (
    (4096, 256, 16, 16, 64),
    (4096, 512, 16, 4, 64),
    (16384, 1024, 16, 16, 64),
    (16384, 1024, 16, 2, 64),
)
# The same, of queries that select whole blocks, which fla serves for 16 heads on one head of keys.
OF_BLOCKS = (16384, 1024, 16, 1, 64)
# Tokens, selected keys (0: all are met), heads, heads of keys, width, of the attention.
LOSSES = ((4096, 0, 16, 4, 64), (4096, 512, 16, 4, 64))
TEMPERATURE = 8.0
# The reference holds all scores, and in fp64.
SAMPLE_TOKENS = 1024

Tensor = torch.Tensor
Op = Callable[..., Tensor]


def cases() -> list[Case]:
    """Scores, selections of them, attention to selected keys, and the indexer's loss, in bf16."""
    return [
        indexer_case("gated_indexer", 4096),
        *(indexer_case("indexer_topk", tokens, slots) for tokens, slots in SELECTIONS),
        inverse_case(*SELECTIONS[0]),
        *(attention_case(*sizes) for sizes in ATTENTIONS),
        blocks_case(*OF_BLOCKS),
        *(loss_case(*sizes) for sizes in LOSSES),
    ]


def indexer_case(op: str, tokens: int, slots: int = 0) -> Case:
    """Of a selection the law "fixed"."""
    flops = tokens * tokens * INDEX_HEADS * INDEX_WIDTH
    operands = 2 * tokens * (INDEX_HEADS + 1) * (INDEX_WIDTH + 1)
    size = operands + 4 * tokens * (slots or tokens)
    sizes = {"B": 1, "T": tokens, "H": INDEX_HEADS, "D": INDEX_WIDTH}
    formula = functools.partial(indexer_reference.gated_indexer, scale=1 / math.sqrt(INDEX_WIDTH))
    return Case(
        op,
        sizes | ({"k": slots} if slots else {}),
        BF16,
        reference=statistics if slots else formula,
        inputs=functools.partial(indexer_inputs, tokens),
        sample=functools.partial(indexer_inputs, SAMPLE_TOKENS),
        bytes_moved={"step": size} | by_pass(size),
        # A causal half of all products; the backward pass computes them again.
        flops={"step": flops} | by_pass(flops, 3 * flops),
    )


def inverse_case(tokens: int, slots: int) -> Case:
    """A selection by the default law and an average of the variance; ``slots`` of a typical
    row, and at most twice as many.
    """
    case = indexer_case("indexer_topk", tokens, slots)
    return dataclasses.replace(
        case,
        sizes={**case.sizes, "law": "inverse"},
        inputs=functools.partial(inputs_and_average, tokens),
        sample=functools.partial(inputs_and_average, SAMPLE_TOKENS),
    )


def inputs_and_average(tokens: int, device: str) -> list[Tensor]:
    """q, k, w, bias, and the average of the variance."""
    q, k, w, bias = indexer_inputs(tokens, device)
    stats = indexer_topk(q, k, w, bias, **counts(tokens))[2]
    return [q, k, w, bias, stats.variance.mean()]


def indexer_inputs(tokens: int, device: str) -> list[Tensor]:
    """q, k, w and bias."""
    draw = functools.partial(torch.randn, dtype=BF16, device=device)
    return [
        draw(1, tokens, INDEX_HEADS, INDEX_WIDTH),
        draw(1, tokens, INDEX_WIDTH),
        draw(1, tokens, INDEX_HEADS),
        draw(INDEX_HEADS),
    ]


def counts(tokens: int, average: Tensor | None = None) -> dict[str, Any]:
    """How many of so many tokens a row selects; by the variance where there is an average."""
    return limits(dict(SELECTIONS).get(tokens, tokens // 8), average)


def limits(slots: int, average: Tensor | None = None) -> dict[str, Any]:
    """Of rows that select ``slots`` keys, or a typical one as many."""
    law, most = ("fixed", slots) if average is None else ("inverse", 2 * slots)
    bounds = dict(k_base=slots, k_min=min(slots, 16), k_max=most, sinks=4)
    return dict(law=law, variance_ema=average, **bounds)


def statistics(
    q: Tensor, k: Tensor, w: Tensor, bias: Tensor, average: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    places: dict[str, Any] = dict(scale=1 / math.sqrt(INDEX_WIDTH), causal=True, q_offset=0)
    limits = counts(k.shape[1], average)
    _, count, variance, _ = selection_reference.indexer_topk(q, k, w, bias, **places, **limits)
    return variance, counted(count, average)


def counted(count: Tensor, average: Tensor | None) -> Tensor:
    """Each row's count, or of a law their mean, in bf16: a row whose number of keys is nearly whole
    may go either way.
    """
    return count.float() if average is None else count.double().mean().to(BF16)


def attention_case(tokens: int, slots: int, heads: int, key_heads: int, width: int) -> Case:
    flops = 4 * tokens * slots * heads * width
    size = 2 * tokens * width * 2 * (heads + key_heads) + 4 * tokens * slots
    inputs = functools.partial(attention_inputs, slots, heads, key_heads, width)
    return Case(
        "sparse_attention",
        {"B": 1, "T": tokens, "H": heads, "Hkv": key_heads, "D": width, "k": slots},
        BF16,
        reference=functools.partial(reference_attention, scale=1 / math.sqrt(width)),
        inputs=functools.partial(inputs, tokens),
        sample=functools.partial(inputs, SAMPLE_TOKENS),
        bytes_moved=by_pass(size),
        flops=by_pass(flops, 5 * flops // 2),
    )


def blocks_case(tokens: int, slots: int, heads: int, key_heads: int, width: int) -> Case:
    """Of a sample a quarter of the keys is selected; else it would be all of them."""
    case = attention_case(tokens, slots, heads, key_heads, width)
    inputs = functools.partial(blocks_inputs, heads, key_heads, width)
    return dataclasses.replace(
        case,
        sizes={**case.sizes, "block": WHOLE},
        inputs=functools.partial(inputs, tokens, slots),
        sample=functools.partial(inputs, SAMPLE_TOKENS, SAMPLE_TOKENS // 4),
    )


def blocks_inputs(
    heads: int, key_heads: int, width: int, tokens: int, slots: int, device: str
) -> list[Tensor]:
    """q, k, v, indices and count."""
    draw = functools.partial(torch.randn, dtype=BF16, device=device)
    q, k, v = (draw(1, tokens, each, width) for each in (heads, key_heads, key_heads))
    return [q, k, v, *of_blocks(tokens, slots, device)]


def attention_inputs(
    slots: int, heads: int, key_heads: int, width: int, tokens: int, device: str
) -> list[Tensor]:
    """q, k, v, and the selection of an indexer: indices and count."""
    draw = functools.partial(torch.randn, dtype=BF16, device=device)
    k, v = (draw(1, tokens, key_heads, width) for _ in "kv")
    indices, count, _ = indexer_topk(*indexer_inputs(tokens, device), **limits(slots))
    return [draw(1, tokens, heads, width), k, v, indices, count]


def loss_case(tokens: int, slots: int, heads: int, key_heads: int, width: int) -> Case:
    pairs = tokens * (slots or tokens // 2)
    scores, target = 2 * pairs * INDEX_HEADS * INDEX_WIDTH, 2 * pairs * heads * width
    size = 2 * tokens * ((INDEX_HEADS + 1) * (INDEX_WIDTH + 1) + width * (heads + key_heads))
    size += 4 * tokens * (heads + slots)
    inputs = functools.partial(loss_inputs, slots, heads, key_heads, width)
    sizes = {"B": 1, "T": tokens, "Hi": INDEX_HEADS, "H": heads, "Hkv": key_heads, "D": width}
    return Case(
        "indexer_kl_loss",
        sizes | ({"k": slots} if slots else {}),
        BF16,
        reference=functools.partial(loss_of, reference_loss),
        inputs=functools.partial(inputs, tokens),
        sample=functools.partial(inputs, SAMPLE_TOKENS),
        bytes_moved=by_pass(size, size),
        # None for the backward pass alone: our forward pass computes the slopes.
        flops={"fwd": scores + target, "fwd+bwd": 4 * scores + target},
    )


def loss_inputs(
    slots: int, heads: int, key_heads: int, width: int, tokens: int, device: str
) -> list[Tensor]:
    """The indexer's operands and the temperature; q, k and lse of the attention as the integers of
    their bits, since floating tensors would get gradients; and the selection, if any.
    """
    draw = functools.partial(torch.randn, dtype=BF16, device=device)
    of_indexer = indexer_inputs(tokens, device)
    q, k = (draw(1, tokens, each, width) for each in (heads, key_heads))
    nothing = torch.zeros(1, tokens, 1, dtype=torch.int32, device=device)
    selection = indexer_topk(*of_indexer, **counts(tokens))[:2] if slots else (nothing,)
    _, lse = sparse_attention_with_lse(
        *(q, k, k, *selection), dense_below=0 if slots else tokens + 1
    )
    constants = q.view(torch.int16), k.view(torch.int16), lse.view(torch.int32)
    temperature = torch.tensor(TEMPERATURE, device=device)
    return [*of_indexer, temperature, *constants, *(selection if slots else ())]


def loss_of(op: Op, *tensors: Tensor) -> Tensor:
    *operands, temperature, q, k, lse = tensors[:8]
    dtype = operands[0].dtype
    attention = q.view(BF16).to(dtype), k.view(BF16).to(dtype), lse.view(torch.float32)
    return op(*operands, *attention, *tensors[8:], temperature=temperature)


def reference_loss(*tensors: Tensor, temperature: Tensor) -> Tensor:
    of_indexer, (q, *of_attention) = tensors[:4], tensors[4:]
    widths = dict(index_scale=INDEX_WIDTH, scale=q.shape[-1])
    scales: dict[str, Any] = {name: 1 / math.sqrt(width) for name, width in widths.items()}
    operands: tuple[Any, ...] = (*of_indexer, temperature, q, *of_attention)
    return loss_reference.indexer_kl_loss(*operands, **scales)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, count: Tensor, *, scale: float
) -> Tensor:
    selection = indices.unsqueeze(1), count.unsqueeze(1)
    return sparse_reference.sparse_attention_with_lse(q, k, v, *selection, scale=scale)[0]
