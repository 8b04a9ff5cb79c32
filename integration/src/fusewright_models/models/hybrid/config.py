"""The shape of a HybridLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fusewright.reversible import Mode

from ...choices import Checkpointing, IndexerForm
from ..checks import check_config

MODES = get_args(Mode)
Embedding = Literal["plain", "bytes"]
Law = Literal["inverse", "proportional", "entropy", "fixed"]
# Every so many layers one is sparse attention.
SPARSE_EVERY = 4


@dataclass(frozen=True)
class HybridConfig:
    """The shape of a HybridLM; the defaults are the smallest, for tests.

    Attributes:
        vocab_size: V.
        dim: C, the width of a stream.
        layers: L; every fourth mixes tokens by sparse attention, the others by the gated delta
            rule.
        delta_heads, delta_width: heads of the delta rule and their width.
        sparse_heads, sparse_width: query heads of the sparse attention and their width, even.
        key_heads: heads of keys that these share; None is as many.
        index_heads, index_width: of the indexer.
        form: of its scores; "relu" is that of DeepSeek-V3.2.
        index_rotary: how many of the first columns of its queries and keys have rotary positions,
            even.
        k_base, k_min, k_max, law: how many keys a query selects.
        sinks, window: how many of these are the first of all, and the last up to its own.
        index_temperature: where the indexers' learned temperatures start; about the logarithm of
            the tokens of a row.
        feed_forward_width: of each layer's SwiGLU.
        streams: n, residual streams.
        sinkhorn_iterations: of their mixing.
        rope_base: of the sparse attention's rotary positions.
        embedding: "plain", or "bytes": tokens by their bytes.
        step, mode, fraction_bits: of the midpoint stack.
        checkpointing: of mode "plain": "block" computes every layer again in the backward pass
            instead of keeping what it needs there, "keep-attention" all of it but what mixes
            tokens. Changes no gradient.
        second_weight: of the loss of the token after next.
        index_weight: of the loss that the indexers learn by.

    Raises:
        TypeError: a size is no int, or a number no number.
        ValueError: a field is out of its range, or they do not go together.
    """

    vocab_size: int = 256
    dim: int = 64
    layers: int = 4
    delta_heads: int = 2
    delta_width: int = 32
    sparse_heads: int = 2
    sparse_width: int = 32
    key_heads: int | None = None
    index_heads: int = 2
    index_width: int = 16
    form: IndexerForm = "gated"
    index_rotary: int = 0
    k_base: int = 8
    k_min: int = 4
    k_max: int = 16
    law: Law = "inverse"
    sinks: int = 2
    window: int = 0
    index_temperature: float = 8.0
    feed_forward_width: int = 128
    streams: int = 4
    sinkhorn_iterations: int = 20
    rope_base: float = 10_000.0
    embedding: Embedding = "plain"
    step: float = 0.25
    mode: Mode = "exact"
    fraction_bits: int = 20
    checkpointing: Checkpointing = "none"
    second_weight: float = 0.3
    index_weight: float = 1.0

    def __post_init__(self) -> None:
        check_config(self, from_zero=("sinks", "window", "index_rotary"), above_one=("rope_base",))
        check_recomputed_once(self.mode, self.checkpointing)
        always = self.sinks + self.window
        if not always <= self.k_min <= self.k_base <= self.k_max:
            raise ValueError(
                "wanted sinks + window <= k_min <= k_base <= k_max; got "
                f"{always}, {self.k_min}, {self.k_base}, {self.k_max}"
            )
        if self.sparse_width % 2:
            raise ValueError(f"sparse_width must be even; got {self.sparse_width}")
        if self.index_rotary % 2 or self.index_rotary > self.index_width:
            raise ValueError(
                f"index_rotary must be even, up to index_width {self.index_width}; "
                f"got {self.index_rotary}"
            )
        if self.key_heads is not None and self.sparse_heads % self.key_heads:
            raise ValueError(
                f"sparse_heads must be a multiple of key_heads; got {self.sparse_heads} and "
                f"{self.key_heads}"
            )

    def is_sparse(self, place: int) -> bool:
        """Whether the layer of this place mixes tokens by sparse attention."""
        return (place + 1) % SPARSE_EVERY == 0


def check_recomputed_once(mode: Mode, checkpointing: Checkpointing) -> None:
    """Refuse checkpointing where the stack computes its layers again itself."""
    if checkpointing != "none" and mode != "plain":
        raise ValueError(
            f"checkpointing is for mode 'plain'; got {checkpointing!r} with mode {mode!r}"
        )


HYBRID: dict[str, HybridConfig] = {
    # Bytes, minutes on a CPU.
    "tiny": HybridConfig(),
    "mini": HybridConfig(
        vocab_size=8192,
        dim=512,
        layers=12,
        delta_heads=8,
        delta_width=64,
        sparse_heads=8,
        sparse_width=64,
        index_heads=4,
        index_width=64,
        k_base=64,
        k_min=8,
        k_max=128,
        sinks=4,
        feed_forward_width=1376,
    ),
    "350m": HybridConfig(
        vocab_size=32_000,
        dim=1024,
        layers=24,
        delta_heads=8,
        delta_width=128,
        sparse_heads=8,
        sparse_width=128,
        index_heads=4,
        index_width=64,
        k_base=256,
        k_min=32,
        k_max=512,
        sinks=4,
        feed_forward_width=1792,
    ),
    "1b": HybridConfig(
        vocab_size=131_072,
        dim=4096,
        layers=8,
        delta_heads=32,
        delta_width=128,
        sparse_heads=16,
        sparse_width=256,
        index_heads=4,
        index_width=64,
        k_base=512,
        k_min=32,
        k_max=1024,
        sinks=4,
        feed_forward_width=2048,
    ),
}
