"""The scans, as the conformance suite asks about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fusewright.memory_mlp import MemoryWeights, memory_scan
from fusewright.memory_mlp.common.deep_weights import deep_shapes
from fusewright.memory_mlp.common.weights import weight_shapes
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan

from .drawn import F32, INTERNAL, MANY, FlatOp, drawn_memory, normal

Tensor = torch.Tensor


@dataclass(frozen=True)
class ScanOp(FlatOp):
    """memory_scan on flat lists of tensors: q, k, v, the memory, its momentum and the three gates.
    A start that all rows share is given without their axis.
    """

    function = "memory_scan"
    # Rows, tokens, heads, D, hidden units.
    small = (1, 2, 1, 2, 3)
    tiny = (1, 2, 1, 1, 2)
    several = (1, 3, 2, 3, 5)
    growing = ((1, 5, 1, 3, 4), (1, 7, 1, 3, 4), (1, 9, 1, 3, 4))
    empty = ((0, 3, 2, 4, 5), (2, 3, 0, 4, 5))
    gpu = ((2, 300, 3, 64, 128), (2, 300, 3, 64, 256))
    exempt: ClassVar = MANY | {
        "test_strides_change_no_bit_and_outputs_are_contiguous": (
            "weights and momentum are views of one tensor"
        )
    }

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """y, then weights and momentum after the last token."""
        q, k, v, *others = tensors
        start = [
            x.expand(len(q), *x.shape) if getattr(x, "ndim", 4) < axes else x
            for x, axes in zip(others[:8], (4, 3) * 4, strict=True)
        ]
        state = MemoryWeights(*start[:4]), MemoryWeights(*start[4:])
        done = memory_scan(q, k, v, *state, *others[8:], **self.options | options)
        return done.y, *done.weights, *done.momentum

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*(x.bfloat16() for x in tensors[:3]), *tensors[3:]]

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        """Keys of length 1, gates of a memory that stays small, theta up to ``rate``, which is the
        lower the more tokens write.
        """
        rate = min(0.05, 0.6 / max(tokens, 1)) if rate is None else rate
        draw = normal(dtype, device)
        q, k, v = (draw(batch, tokens, heads, width) for _ in range(3))
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        lead = batch, heads
        memory = drawn_memory(draw, lead, hidden, width)
        momentum = [draw(*shape, spread=0.01) for shape in weight_shapes(lead, hidden, width)]
        gates = [
            least + (most - least) * torch.rand(batch, tokens, heads, device=device, dtype=q.dtype)
            for least, most in ((0.0, 0.02), (0.85, 0.95), (0.0, rate))
        ]
        return [*(x.to(dtype) for x in (q, k, v)), *memory, *momentum, *gates]


@dataclass(frozen=True)
class DeepOp(ScanOp):
    """deep_memory_scan on flat lists of tensors: q, k, v, the memory of ``layers`` layers, its
    momentum, the three gates and, with ``rests``, what it forgets towards. Chunks are of 2 tokens
    where there are few; every third token is not written where it is ``masked``, and every second
    chunk is reset where it is ``packed``.
    """

    layers: int = 3
    rests: bool = False
    masked: bool = False
    packed: bool = False

    function = "deep_scan"
    # The memory is packed first.
    saves = 0
    exempt: ClassVar = ScanOp.exempt | INTERNAL

    def having(self, **options: Any) -> DeepOp:
        """The op with fields or options of its own."""
        names = "layers", "rests", "masked", "packed"
        fields = {x: options.pop(x) for x in names if x in options}
        return replace(self, **fields, options=self.options | options)

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """y, then weights and momentum after the last token."""
        q, k, v, *others = tensors
        size = 2 * self.layers
        halves = [tuple(others[:size]), tuple(others[size : 2 * size])]
        gates, rest = others[2 * size :][:3], tuple(others[2 * size + 3 :])
        chunk = 2 if q.shape[1] < 64 else 64
        mask = None
        if self.masked:
            token = torch.arange(q.shape[1], device=q.device)
            mask = (token % 3 != 1).view(1, -1, 1).expand(q.shape[:3])
        given = dict(chunk=chunk) | self.options | options
        resets = resets_of(q, given["chunk"]) if self.packed else None
        y, weights, momentum, *_ = deep_memory_scan(
            *(q, k, v, *halves, *gates, mask), rest or None, resets, **given
        )
        return y, *weights, *momentum

    def kept(self, tensors: list[Tensor]) -> int:
        """Weights and momentum, packed: at the start, and at that of every chunk; and the rest."""
        chunks, size = -(-tensors[0].shape[1] // 2), 4 * self.layers
        memory, rest = tensors[3 : 3 + size], tensors[6 + size :]
        return sum(x.numel() for x in memory) * (1 + chunks) + sum(x.numel() for x in rest)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        """As those of the scan of two layers."""
        scan = super().draw(batch, tokens, heads, width, hidden, dtype, device, rate=rate)
        draw = normal(dtype, device)

        def memory(lead: tuple[int, ...], spread: float) -> list[Tensor]:
            # Weights whose outputs are of the size of their inputs.
            return [
                draw(*x, spread=spread * (0.1 if len(x) == len(lead) + 1 else x[-1] ** -0.5))
                for x in deep_shapes(lead, self.layers, hidden, width)
            ]

        weights, momentum = memory((batch, heads), 1.0), memory((batch, heads), 0.1)
        rest = memory((heads,), 1.0) if self.rests else []
        alpha, eta, theta = scan[11:]
        if self.rests:
            # Of few tokens most are forgotten, of many half.
            alpha = min(15.0, 600.0 / max(tokens, 1)) * alpha
        return [*scan[:3], *weights, *momentum, alpha, eta, theta, *rest]


def resets_of(q: Tensor, chunk: int) -> Tensor:
    """``[B, chunks]``: every second chunk, those of every second row first."""
    chunks = torch.arange(-(-q.shape[1] // chunk), device=q.device)
    return (torch.arange(len(q), device=q.device).unsqueeze(1) + chunks) % 2 == 1


@dataclass(frozen=True)
class ShortChunksOp(ScanOp):
    """The scan in chunks of 2 tokens where there are few; every third token is not written where it
    is ``masked``, and every second chunk is reset where it is ``packed``.
    """

    masked: bool = False
    packed: bool = False

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        q = tensors[0]
        if isinstance(q, Tensor):
            options["chunk"] = self.options.get("chunk", 2 if q.shape[1] < 64 else 64)
            if self.masked:
                token = torch.arange(q.shape[1], device=q.device)
                options["write_mask"] = (token % 3 != 1).expand(q.shape[:2])
            if self.packed:
                options["resets"] = resets_of(q, options["chunk"])
        return super().public(*tensors, **options)


@dataclass(frozen=True)
class RestOp(ShortChunksOp):
    """The scan with a rest, whose tensors stand last, and gates that forget enough to see it."""

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        *others, w1, b1, w2, b2 = tensors
        options["rest"] = MemoryWeights(w1, b1, w2, b2)
        return super().public(*others, **options)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        sizes = batch, tokens, heads, width, hidden
        *tensors, alpha, eta, theta = super().draw(*sizes, dtype, device, rate=rate)
        rest = drawn_memory(normal(dtype, device), (heads,), hidden, width)
        # Of few tokens most are forgotten, of many half.
        return [*tensors, min(15.0, 600.0 / max(tokens, 1)) * alpha, eta, theta, *rest]
