"""Blocks that are computed again in the backward pass, in place of keeping all that it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..choices import Checkpointing

# What mixes tokens: of our kernels and of torch's, which plain models take.
KEPT = {
    "fusewright_attention::rectangular_attention",
    "fusewright_deltanet::gated_delta_rule",
    "fusewright_gsa::sparse_attention",
    "fusewright_gsa::indexer_kl_loss",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}
Found = TypeVar("Found")


def recomputed(
    checkpointing: Checkpointing, block: Callable[..., Found], *arguments: Any, **options: Any
) -> Found:
    """What ``block`` returns of these arguments.

    With "block" it is computed again in the backward pass, for which its arguments alone are kept;
    with "keep-attention" what its attention returned is kept too, so that all but that is computed
    again. No gradient changes by a bit. Nothing may be drawn at random in a block.
    """
    if checkpointing == "none" or not torch.is_grad_enabled():
        return block(*arguments, **options)
    if checkpointing == "keep-attention":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """The outputs of ``KEPT`` alone are kept. Their inputs come again from a norm and a product:
    q, k and v would be three times as much.
    """
    if op.name() in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
