"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.gsa._core.backends import DeviceProperties
from fusewright.gsa.common import launches
from fusewright.gsa.indexer.launch import SCORES, scores_backward, scores_forward
from fusewright.gsa.loss.launch import divergence
from fusewright.gsa.selection import launch as selection
from fusewright.gsa.sparse.launch import SPARSE, UNION, sparse_forward
from fusewright.gsa.sparse.launch_backward import sparse_backward

# The GPU that is compiled for.
GPU = DeviceProperties(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
launches.device_properties = selection.device_properties = lambda device: GPU
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOKENS, HEADS = 8192, 4


def launch_indexer(
    width: int,
    dtype: torch.dtype,
    causal: bool = True,
    ranged: bool = False,
    form: str = "gated",
) -> None:
    """Scores and all their gradients."""
    operands = (*indexer(TOKENS, width, dtype), ranges_of(TOKENS, ranged))
    dscores = scores_forward(*operands, 0.125, causal, 0, form)
    scores_backward(dscores, *operands, 0.125, causal, 0, form)


def launch_topk(
    tokens: int,
    law: str,
    causal: bool = True,
    window: int = 0,
    ranged: bool = False,
    form: str = "gated",
) -> None:
    """One selection of so many tokens, which is cut into parts."""
    operands = (*indexer(tokens, 64, BF16), ranges_of(tokens, ranged))
    counts = (1024, 128, 2048, 4, window)
    selection.select_keys(*operands, torch.empty(()), 0.125, law, *counts, causal, 0, form)


def launch_attention(
    width: int,
    dtype: torch.dtype,
    heads: int = 8,
    key_heads: int = 8,
    per_head: bool = False,
    path: str = "queries",
) -> None:
    """Attention to a selection, and all its gradients."""
    q = torch.empty(1, TOKENS, heads, width, dtype=dtype)
    k = torch.empty(1, TOKENS, key_heads, width, dtype=dtype)
    # The lists of keys are sorted: indices are read.
    indices = torch.zeros(1, heads if per_head else 1, TOKENS, 8, dtype=torch.int32)
    count = None if per_head else indices[..., 0].contiguous()
    o, lse, softmax, _ = sparse_forward(q, k, k, indices, count, 0.125, path)
    assert softmax is not None
    dlse = lse if per_head else None
    saved = (o.float(), softmax)
    sparse_backward(o, dlse, q, k, k, indices, count, *saved, 0.125, path)


def launch_loss(width: int, dtype: torch.dtype, selected: bool, ranged: bool = False) -> None:
    """The loss of an indexer of 64 columns and its slopes, and the loss alone."""
    q = torch.empty(1, 300, 8, width, dtype=dtype)
    lse = torch.empty(1, 8, 300)
    indices = torch.zeros(1, 300, 8, dtype=torch.int32) if selected else None
    operands = (*indexer(300, 64, dtype), torch.empty(()), q, q, lse, indices, None)
    operands = (*operands, ranges_of(300, ranged))
    for slopes in (True, False):
        divergence(*operands, 0.125, 0.125, True, 0, slopes=slopes)


def ranges_of(tokens: int, ranged: bool) -> torch.Tensor | None:
    """One document, or none."""
    return torch.tensor([[[0, tokens]] * tokens], dtype=torch.int32) if ranged else None


def indexer(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(1, tokens, HEADS, width, dtype=dtype),
        torch.empty(1, tokens, width, dtype=dtype),
        torch.empty(1, tokens, HEADS, dtype=dtype),
        torch.empty(HEADS),
    )


def one_of_each() -> None:
    """Every kernel once, at the sizes of the model."""
    launch_indexer(64, BF16)
    launch_topk(2048, "inverse")
    launch_topk(2048, "inverse", window=64, ranged=True)
    launch_topk(2048, "inverse", window=64, ranged=True, form="relu")
    launch_indexer(64, BF16, ranged=True)
    launch_indexer(64, BF16, ranged=True, form="relu")
    launch_attention(128, BF16)
    launch_attention(64, BF16, heads=16, path="tiles")
    launch_loss(128, BF16, selected=True)
    launch_loss(128, BF16, selected=True, ranged=True)


def every_line() -> None:
    """Every line of the tables in every form."""
    for config in SCORES:
        for dtype in (F32, BF16, F16):
            if dtype.itemsize <= config.max_bytes:
                launch_indexer(config.max_width, dtype)
                launch_indexer(config.max_width, dtype, ranged=True)
                launch_indexer(config.max_width, dtype, ranged=True, form="relu")
    launch_indexer(20, F32, causal=False)
    for gather in SPARSE:
        for dtype in (F32, BF16, F16):
            if dtype.itemsize <= gather.max_bytes:
                launch_attention(gather.max_width, dtype)
                launch_attention(gather.max_width, dtype, key_heads=1)
    launch_attention(20, F32, key_heads=2, per_head=True)
    for union in UNION:
        for dtype in (F32, BF16, F16):
            if dtype.itemsize <= union.max_bytes:
                for key_heads in (8, 2, 1):
                    launch_attention(union.max_width, dtype, key_heads=key_heads, path="tiles")
    for dtype in (F32, BF16):
        launch_attention(20, dtype, key_heads=2, per_head=True, path="tiles")
    for width in (64, 128, 256):
        for dtype in (F32, BF16, F16):
            launch_loss(width, dtype, selected=False)
            launch_loss(width, dtype, selected=False, ranged=True)
    # A row that is held whole, of each size, and one that is not.
    for law in ("inverse", "proportional", "entropy", "fixed"):
        launch_topk(20_000, law)
        launch_topk(20_000, law, window=64, ranged=True)
        launch_topk(20_000, law, window=64, ranged=True, form="relu")
    launch_topk(4096, "inverse", causal=False)
