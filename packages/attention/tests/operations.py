"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from fusewright import attention
from fusewright_testkit.conformance import Operation, Package

SCALE = 0.3
Tensors = list[torch.Tensor]

PACKAGE = Package(
    "fusewright.attention",
    names=(
        "apply_rotary rectangular_attention rectangular_attention_with_lse rotary sdpa_backend "
        "sliding_window_attention sliding_window_attention_with_lse"
    ),
    registered=(
        "apply_rotary rectangular_attention rectangular_attention_backward rotary rotary_backward "
        "sliding_window_attention sliding_window_attention_backward"
    ),
    without_triton=(
        "q = torch.randn(1, 3, 2, 8, requires_grad=True)\n"
        "rectangular_attention(q, q, q).square().sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    ),
)


@dataclass(frozen=True)
class AttentionOp(Operation):
    """One public function of q [B, Nq, H, D] and k and v [B, M, G, D]."""

    name: str
    # H / G: how many heads of q share a head of k and v.
    group: int = 1

    # B, Nq, M, H, D. The rule of vmap takes one sample at a time: tasks would prove nothing that
    # heads do not.
    small = (1, 5, 6, 2, 8)
    tiny = (1, 2, 3, 1, 8)
    several = (2, 20, 24, 1, 16)
    growing = ((2, 3, 6, 2, 8), (2, 5, 6, 2, 8), (2, 8, 6, 2, 8))
    empty = ((2, 0, 3, 1, 16), (2, 3, 0, 1, 16), (0, 3, 4, 1, 16))
    gpu = ((4, 300, 64, 8, 64), (2, 300, 700, 4, 64))

    @property
    def function(self) -> str:
        """The name without what is said of a form."""
        return self.name.partition("-")[0]

    def public(self, q, k, v, key_lengths=None, **options: Any) -> Any:
        options = {"scale": SCALE} | options
        return getattr(attention, self.function)(q, k, v, key_lengths=key_lengths, **options)

    def check(self, tensors: Tensors, lengths: list[int] | None = None, **options: Any) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        key_lengths = None if lengths is None else torch.tensor(lengths, device=tensors[0].device)
        super().check([*tensors, key_lengths], **options)

    def draw(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensors:
        """q, k and v of a (B, Nq, M, H, D) from normal distributions."""
        batches, queries, keys, heads, width = shape
        of_keys = (keys, heads // self.group)
        rows = ((queries, heads), of_keys, of_keys)
        return [torch.randn(batches, *n, width, device=device).to(dtype) for n in rows]

    def autocast(self, tensors: Tensors) -> Tensors:
        return [x.bfloat16() for x in tensors]


@dataclass(frozen=True)
class LengthsOp(AttentionOp):
    """The same with as many keys as follow from the sizes."""

    small = (2, 5, 6, 2, 8)
    tiny = (2, 2, 4, 1, 8)

    def public(self, q, k, v, **options: Any) -> Any:
        lengths = k.shape[1] - 3 * (torch.arange(len(q), device=q.device) % 2)
        return super().public(q, k, v, lengths, **options)


@dataclass(frozen=True)
class ManyKeysOp(AttentionOp):
    """The same with more keys than one tile has."""

    small = (1, 5, 140, 1, 8)


@dataclass(frozen=True)
class ManyLengthsOp(LengthsOp):
    """The same with both."""

    small = (2, 5, 140, 1, 8)


@dataclass(frozen=True)
class GroupedOp(LengthsOp):
    """The same with lengths and with heads that share keys."""

    group: int = 2

    small = (1, 5, 6, 4, 8)
    tiny = (2, 2, 4, 2, 8)
    several = (2, 20, 24, 4, 16)
    empty = ((2, 0, 3, 2, 16), (2, 3, 0, 2, 16), (0, 3, 4, 2, 16))


@dataclass(frozen=True)
class GroupedKeysOp(GroupedOp):
    """The same with more keys than one tile has."""

    small = (1, 5, 140, 2, 8)


class WithSinks(AttentionOp):
    """Sinks beside q, k and v, a fourth operand that has a gradient; values wider than keys."""

    def public(self, q, k, v, sinks, **options: Any) -> Any:
        return super().public(q, k, v, sinks=sinks, **options)

    def draw(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensors:
        *drawn, v = super().draw(shape, dtype, device)
        # Values wider than keys.
        drawn.append(torch.cat([v, torch.randn_like(v)], -1))
        wide = torch.promote_types(dtype, torch.float32)
        return [*drawn, torch.randn(drawn[0].shape[2], device=device, dtype=wide)]

    def autocast(self, tensors: Tensors) -> Tensors:
        return [*super().autocast(tensors[:3]), tensors[3]]


@dataclass(frozen=True)
class SinksOp(WithSinks, GroupedOp):
    """Heads that share keys, lengths, and sinks."""


@dataclass(frozen=True)
class SinksKeysOp(SinksOp):
    """The same with more keys than one tile has."""

    small = (1, 5, 140, 2, 8)


@dataclass(frozen=True)
class WindowOp(AttentionOp):
    """One public function of q [B, Nq, H, D], the last rows of a sequence, and k and v
    [B, T, G, D].
    """

    window: int = 3
    prefix: int = 2

    # The last row does not see all keys.
    tiny = (1, 2, 6, 1, 8)
    strided = (2, 18, 18, 2, 16)
    # A prefix is a part of the keys.
    empty = ()
    growing = ((1, 12, 12, 1, 8), (1, 17, 17, 1, 8), (1, 40, 40, 1, 8))
    gpu = ((2, 700, 700, 4, 64),)
    saves_outputs = True

    def given(self, k: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        # As a model's, of a sequence as long.
        long = isinstance(k, torch.Tensor) and k.shape[1] >= 500
        band = (130, 17) if long else (self.window, self.prefix)
        return dict(scale=SCALE, window=band[0], prefix=band[1]) | options

    def public(self, *tensors: torch.Tensor, **options: Any) -> Any:
        return getattr(attention, self.function)(*tensors, **self.given(tensors[1], options))

    check = Operation.check


@dataclass(frozen=True)
class LongWindowOp(WindowOp):
    """The same of a sequence of many tiles."""

    small = (1, 5, 140, 1, 8)


@dataclass(frozen=True)
class GroupedWindowOp(WindowOp):
    """The same with heads that share keys."""

    group: int = 2

    tiny = (1, 2, 6, 2, 8)
    several = (2, 20, 24, 4, 16)
    strided = (2, 18, 18, 2, 16)
    growing = ((1, 12, 12, 2, 8), (1, 17, 17, 2, 8), (1, 40, 40, 2, 8))


@dataclass(frozen=True)
class SinksWindowOp(WithSinks, GroupedWindowOp):
    """The same with sinks."""


@dataclass(frozen=True)
class PackedWindowOp(WindowOp):
    """The same of documents that are packed into each row of the batch, of other lengths in each,
    with padding before them.
    """

    def given(self, k: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        options = super().given(k, options)
        rows = k.shape[1] - options["prefix"]
        ends = torch.arange(4, device=k.device) * rows // 3
        return dict(cu_seqlens=ends + torch.arange(len(k), device=k.device)[:, None]) | options


@dataclass(frozen=True)
class PaddedWindowOp(WindowOp):
    """The same of rows of the batch that are padded to one length."""

    def given(self, k: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        options = super().given(k, options)
        rows = k.shape[1] - options["prefix"]
        return dict(key_lengths=rows - torch.arange(len(k), device=k.device) % 3) | options


@dataclass(frozen=True)
class RotaryOp(Operation):
    """rotary of rows [B, T, K, H, D] and optionally of a second operand and a prefix; cos
    and sin are those of the tokens' positions.
    """

    base: float = 100.0
    # Whether there are rows beside, and the leading axes of a prefix.
    beside: bool = True
    prefix: tuple[int, ...] | None = (3,)
    # Whether each row of the batch has positions of its own.
    each: bool = False

    small = (2, 2, 2, 1, 4)
    tiny = (2, 2, 2, 1, 2)
    several = (2, 5, 2, 3, 8)
    strided = (2, 5, 2, 3, 8)
    growing = ((2, 5, 2, 3, 8), (2, 8, 2, 3, 8), (2, 13, 2, 3, 8))
    gpu = ((4, 512, 2, 8, 40), (3, 333, 2, 5, 6), (2, 65, 2, 3, 256), (50, 9, 2, 8, 64))
    exempt: ClassVar = {
        "test_input_changed_after_the_forward_pass_is_noticed": "cos and sin alone are read",
        "test_refused_input_touches_no_memory": "the angles follow from the rows",
        "test_inductor_compiles_forward_and_backward": "it would compile the angles, too",
    }

    @property
    def name(self) -> str:
        beside = "-beside" * self.beside
        prefix = "" if self.prefix is None else "-prefix" + "x".join(map(str, self.prefix))
        return f"rotary{beside}{prefix}{'-each' * self.each}"

    def public(self, rows, *others: torch.Tensor | None, **options: Any) -> torch.Tensor:
        beside, prefix = self.parts(others)
        return attention.rotary(rows, *self.angles(rows), beside=beside, prefix=prefix, **options)

    def parts(self, others: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """The rows beside and the prefix."""
        return (*([] if self.beside else [None]), *others, None, None)[:2]

    def angles(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of position / base^(2 i / D), [T, D / 2], or [B, T, D / 2]."""
        batches, tokens, *_, width = rows.shape
        steps = torch.arange(0, width, 2, device=rows.device, dtype=torch.float64)
        positions = torch.arange(tokens, device=rows.device, dtype=torch.float64)
        if self.each:
            positions = positions + 3 * torch.arange(batches, device=rows.device).unsqueeze(-1)
        angles = positions.unsqueeze(-1) * self.base ** (-steps / width)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)

    def draw(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        beside: bool = True,
        prefix: tuple[int, ...] | None = (3,),
    ) -> list[torch.Tensor | None]:
        """Rows, a second operand, and a prefix with these leading axes; None for what is absent."""
        _, _, *row = shape
        before = None if prefix is None else (*prefix, *row)
        shapes = (shape, shape if beside else None, before)
        return [None if x is None else torch.randn(x, device=device).to(dtype) for x in shapes]

    def sample(self, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        drawn = self.draw(sizes, dtype, device, self.beside, self.prefix)
        return [x for x in drawn if x is not None]

    def kept(self, tensors: Tensors) -> int:
        """cos and sin."""
        batches, tokens, *_, width = tensors[0].shape
        return (batches if self.each else 1) * tokens * width


@dataclass(frozen=True)
class ApplyRotaryOp(Operation):
    """apply_rotary of x [B, T, H, D], all columns of which are rotated or but those behind the
    first R; the angles are a shuffle of fixed numbers, of each row of the batch or of all.
    """

    interleaved: bool = False
    # Columns that stay as they are, and whether each row of the batch has positions of its own.
    rest: int = 0
    each: bool = False

    small = (2, 3, 1, 4)
    tiny = (2, 2, 1, 4)
    several = (2, 5, 3, 10)
    strided = (2, 5, 3, 10)
    growing = ((2, 5, 3, 10), (2, 8, 3, 10), (2, 13, 3, 10))
    gpu = ((4, 512, 8, 40), (3, 333, 5, 6), (2, 65, 3, 256), (50, 9, 8, 64))
    exempt: ClassVar = RotaryOp.exempt | {
        "test_traced_graph_calls_the_op_and_its_backward": "it is its own derivative"
    }

    @property
    def name(self) -> str:
        pairing = "-interleaved" * self.interleaved
        return f"apply_rotary{pairing}{'-partial' * bool(self.rest)}{'-each' * self.each}"

    def public(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        options = {"interleaved": self.interleaved} | options
        return attention.apply_rotary(x, *self.angles(x), **options)

    def angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [T, R / 2], or [B, T, R / 2] of positions of each row of the batch."""
        batches, tokens, _, width = x.shape
        half = (width - self.rest) // 2
        shape = (batches, tokens, half) if self.each else (tokens, half)
        numbers = torch.arange(math.prod(shape), device=x.device, dtype=torch.float64)
        angles = (numbers * 0.7).reshape(shape)
        wide = torch.promote_types(x.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)

    def draw(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Tensors:
        return [torch.randn(shape, device=device).to(dtype)]

    def kept(self, tensors: Tensors) -> int:
        """cos and sin."""
        batches, tokens, _, width = tensors[0].shape
        return (batches if self.each else 1) * tokens * (width - self.rest)


@contextmanager
def tf32() -> Iterator[None]:
    """torch multiplies fp32 matrices in TF32."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


RECTANGULAR = {
    op.name: op
    for op in map(AttentionOp, ("rectangular_attention", "rectangular_attention_with_lse"))
}
LSE_OP = RECTANGULAR["rectangular_attention_with_lse"]
WINDOW_OP = WindowOp("sliding_window_attention_with_lse")
OPERATIONS = {op.name: op for op in (*RECTANGULAR.values(), WINDOW_OP, RotaryOp(), ApplyRotaryOp())}
# Rows beside, and the leading axes of a prefix for a batch of two.
PARTS = {
    "alone": (False, None),
    "beside": (True, None),
    "prefix": (False, (3,)),
    "prefix-of-each": (False, (2, 4)),
    "beside-prefix": (True, (5,)),
    "beside-prefix-of-each": (True, (2, 1)),
    "prefix-of-no-tokens": (True, (0,)),
}
FORMS = {
    op.name: op
    for op in (
        LengthsOp("rectangular_attention_with_lse-lengths"),
        ManyKeysOp("rectangular_attention-keys"),
        ManyLengthsOp("rectangular_attention_with_lse-keys-lengths"),
        LongWindowOp("sliding_window_attention_with_lse-long"),
        GroupedOp("rectangular_attention_with_lse-grouped"),
        GroupedKeysOp("rectangular_attention_with_lse-grouped-keys"),
        GroupedWindowOp("sliding_window_attention_with_lse-grouped"),
        SinksOp("rectangular_attention_with_lse-sinks"),
        SinksKeysOp("rectangular_attention-sinks-keys"),
        SinksWindowOp("sliding_window_attention_with_lse-sinks"),
        PackedWindowOp("sliding_window_attention_with_lse-packed"),
        PaddedWindowOp("sliding_window_attention-padded"),
        *(RotaryOp(100.0, *part) for part in PARTS.values()),
        RotaryOp(each=True),
        ApplyRotaryOp(interleaved=True),
        ApplyRotaryOp(rest=2, each=True),
        ApplyRotaryOp(interleaved=True, rest=2, each=True),
    )
}
