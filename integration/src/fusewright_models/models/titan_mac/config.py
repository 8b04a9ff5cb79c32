"""The shape of a TitanMAC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fusewright.attention import sliding_window_attention

from ...choices import MemoryRule, Variant
from ..checks import check_config, check_head_width

Gate = Literal["sigmoid", "normalized"]
OuterGrad = Literal["full", "detach_state", "none"]

FEED_FORWARD_MULTIPLE = 32
MEMORY_HEAD_WIDTH = 64


@dataclass(frozen=True)
class TitanMACConfig:
    """The shape of a TitanMAC; the defaults are the model of dim 320 and 6 layers.

    Attributes:
        vocab_size: V; the embedding is also the matrix of the logits.
        dim: d, divisible by ``heads``, each head as wide as the attention takes: a multiple of 8
            up to 256.
        layers: number of blocks.
        heads: H, of the attention.
        variant: "mac" (memory as context), "mag" (memory as gate), "mal" (memory as layer) or "lmm"
            (memory alone).
        segment: tokens of an attention segment in "mac", the window of the attention in "mag" and
            "mal"; "lmm" has none.
        persistent: P, learned rows that every token attends to; 0 for none.
        feed_forward_width: F; None is 8 d / 3, rounded up to a multiple of 32.
        memory: False leaves the memory out of every block and everything else as it is.
        memory_chunk: C, tokens whose gradients are taken at the same weights of the memory; in
            "mac" a divisor of ``segment``.
        memory_heads: memories beside each other in a block, each of width d / memory_heads; None is
            one for every 64 columns.
        memory_hidden: hidden width of each.
        memory_layers: of each; 1 is a matrix and a bias.
        memory_length: tokens that a memory is meant for: the share that it forgets with each token
            starts at 1 / memory_length.
        convolution: width of the causal convolutions of the memory's keys, values and queries; 0
            for none.
        memory_rule: "paper": every token is a step of the memory, with gates of its own; what is
            forgotten tends to zero. "normed": likewise, but the memory is x + N(layers of x), N a
            layer norm without gain, and what is forgotten tends to the learned weights with which
            a sequence begins. "origin": one step for each ``segment`` tokens, on their mean loss,
            as TitanMAC was first published, but for every row by itself.
        gate: how "mac" and "mag" let the memory gate the attention: "sigmoid" or "normalized".
        outer_grad: how far the gradient of the loss goes through the memory's updates: "full", to
            those of earlier calls of the model too; "detach_state", to all of this call, since the
            memory in the state that a call returns is detached; or "none".
        rope_base: of the rotary positions.
        checkpointing: compute every block again in the backward pass instead of keeping what it
            needs there. Changes no gradient.

    Raises:
        TypeError: a size is no int, or a switch no bool.
        ValueError: a number or a name is none that the model takes.
    """

    vocab_size: int = 32000
    dim: int = 320
    layers: int = 6
    heads: int = 8
    variant: Variant = "mac"
    segment: int = 512
    persistent: int = 16
    feed_forward_width: int | None = None
    memory: bool = True
    memory_chunk: int = 64
    memory_heads: int | None = None
    memory_hidden: int = 128
    memory_layers: int = 2
    memory_length: float = 16384.0
    convolution: int = 4
    memory_rule: MemoryRule = "normed"
    gate: Gate = "sigmoid"
    outer_grad: OuterGrad = "full"
    rope_base: float = 10000.0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        numbers = ("rope_base", "memory_length")
        check_config(self, from_zero=("persistent", "convolution"), above_one=numbers)
        for name, count in (("heads", self.heads), ("memory_heads", self.number_of_memories)):
            if self.dim % count:
                raise ValueError(
                    f"dim must be divisible by {name}; got dim {self.dim}, {name} {count}"
                )
        if self.attends:
            check_head_width(
                self, "dim", lambda q: sliding_window_attention(q, q, q, 1, 0, backend="reference")
            )
        if self.variant == "mac" and self.memory and self.segment % self.memory_chunk:
            raise ValueError(
                "segment must be divisible by memory_chunk in variant 'mac', whose segments read "
                f"the memory as the one before left it; got segment {self.segment}, memory_chunk "
                f"{self.memory_chunk}"
            )

    @property
    def attends(self) -> bool:
        """Whether blocks have attention."""
        return self.variant != "lmm"

    @property
    def document_unit(self) -> int:
        """Tokens of which documents that lie in one row take whole ones: of a segment in "mac",
        else of a chunk of the memory.
        """
        if self.variant == "mac" or (self.memory and self.memory_rule == "origin"):
            return self.segment
        return self.memory_chunk if self.memory else 1

    @property
    def hidden_width(self) -> int:
        """F, whether given or not."""
        if self.feed_forward_width is not None:
            return self.feed_forward_width
        return math.ceil(8 * self.dim / 3 / FEED_FORWARD_MULTIPLE) * FEED_FORWARD_MULTIPLE

    @property
    def number_of_memories(self) -> int:
        """Memories of a block, whether given or not."""
        return self.memory_heads or max(1, self.dim // MEMORY_HEAD_WIDTH)
