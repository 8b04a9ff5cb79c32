"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fusewright.deltanet import gated_delta_rule, gated_delta_rule_step
from fusewright.deltanet.convolution.short_convolution import short_convolution
from fusewright.deltanet.gated_norm.gated_norm import gated_norm
from fusewright.deltanet.rule import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import Operation, Package
from fusewright_testkit.conformance.records import OPCHECKS

Tensor = torch.Tensor

PACKAGE = Package(
    "fusewright.deltanet",
    names=("DeltaNetCache GatedDeltaNet GatedDeltaRule gated_delta_rule gated_delta_rule_step"),
    registered=(
        "gated_delta_rule gated_delta_rule_backward gated_delta_rule_step gated_norm "
        "gated_norm_backward short_convolution short_convolution_backward"
    ),
    without_triton=(
        "layer = GatedDeltaNet(6, head_dim=4, num_heads=2)\n"
        "layer(torch.randn(2, 5, 6)).square().sum().backward()\n"
        "assert all(x.grad.isfinite().all() for x in layer.parameters())\n"
    ),
    absent=("fla",),
)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates, states and weights beside rows of this one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def drawn(*lead: int, dtype: torch.dtype, device: str, heads: tuple[int, int], widths) -> list:
    """q, k of length 1, v, g down to ``-forget`` and beta up to 1, of rows ``lead``."""
    state = state_dtype(dtype)
    normal = [torch.randn(*lead, heads[0], widths[0], device=device, dtype=state) for _ in range(2)]
    q, k = (F.normalize(x, dim=-1) for x in normal)
    v = torch.randn(*lead, heads[1], widths[1], device=device, dtype=state)
    g, beta = (torch.rand(*lead, heads[1], device=device, dtype=state) for _ in range(2))
    return [*(x.to(dtype) for x in (q, k, v)), g, beta]


class FlatOp(Operation):
    """Rows in the dtype that is drawn; gates and states in no less than fp32."""

    low = torch.float16
    gpu_dtypes = (torch.bfloat16, torch.float32)

    def sample(self, sizes: tuple, dtype: torch.dtype, device: str) -> list[Tensor]:
        return self.draw(*sizes, dtype, device)

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*(x.bfloat16() for x in tensors[:3]), *tensors[3:]]


@dataclass(frozen=True)
class RuleOp(FlatOp):
    """gated_delta_rule on flat lists of tensors: q, k, v, g, beta and, with ``starts``, a state."""

    starts: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    # Whether the tokens of a row are two sequences, the last of one token.
    sequences: bool = False
    form: str = ""

    # Rows, tokens, heads, K, V.
    small = (1, 2, 1, 2, 3)
    tiny = (1, 3, 1, 2, 2)
    several = (1, 3, (1, 2), 2, 3)
    # One chunk is a kind of its own: torch treats a length of 1 as a constant.
    growing = ((1, 66, 1, 4, 3), (1, 70, 1, 4, 3), (1, 130, 1, 4, 3))
    empty = ((0, 3, 2, 4, 5),)
    # Of narrower heads the state is a slice.
    strided = (1, 3, (1, 2), 16, 16)
    gpu = ((2, 300, 8, 128, 128), (1, 300, 3, 64, 64))
    exempt: ClassVar = {
        "test_input_changed_after_the_forward_pass_is_noticed": "of narrow heads there are copies"
    }

    @property
    def name(self) -> str:
        return "gated_delta_rule" + self.form

    def opchecks(self, registered: str) -> tuple[str, ...]:
        # Of sequences plain torch, which is the second derivative, reads the bounds on the host.
        host_reads = self.sequences and registered.endswith("_backward")
        return OPCHECKS[:-1] if host_reads else OPCHECKS

    def having(self, starts: bool = True, **options: Any) -> RuleOp:
        """The op with options of its own."""
        return replace(self, starts=starts, options=self.options | options)

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """o and the state after the last token."""
        state = tensors[5] if self.starts else None
        if self.sequences:
            tokens = tensors[0].shape[1]
            ends = torch.tensor([0, tokens - 1, tokens], device=tensors[0].device)
            options = {"cu_seqlens": ends} | options
        done = gated_delta_rule(
            *tensors[:5],
            initial_state=state,
            output_final_state=True,
            **self.options | options,
        )
        return done.o, done.state

    @staticmethod
    def laid(x: Tensor, first: int, gap: int) -> Tensor:
        """The same numbers, ``first`` numbers into their memory and with ``gap`` between rows."""
        memory = x.new_zeros(first + x[..., 0].numel() * (x.shape[-1] + gap))
        return memory[first:].view(*x.shape[:-1], -1)[..., : x.shape[-1]].copy_(x)

    def recurrence(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The definition where the truth is asked for, in fp64; the chunked form elsewhere, whose
        error is the yardstick.
        """
        q = tensors[0]
        if q.dtype != torch.float64:
            return self.reference(*tensors)
        state = tensors[5] if self.starts else None
        scale = self.options.get("scale", q.shape[-1] ** -0.5)
        lengths = self.options.get("cu_seqlens")
        return reference.gated_delta_rule_by_token(*tensors[:5], state, lengths, scale=scale)

    def check_by_token(self, tensors: list[Tensor]) -> None:
        """The same with the recurrence for the truth, which takes longer."""
        Yardstick(self.recurrence, tensors).check(self.kernels)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int | tuple[int, int],
        keys: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        forget: float = 0.2,
        sequences: int | None = None,
    ) -> list[Tensor]:
        heads = (heads, heads) if isinstance(heads, int) else heads
        tensors = drawn(
            *(batch, tokens), dtype=dtype, device=device, heads=heads, widths=(keys, width)
        )
        tensors[3] = -forget * tensors[3]
        if not self.starts:
            return tensors
        rows = sequences or batch + self.sequences
        shape = (rows, heads[1], keys, width)
        return [*tensors, torch.randn(shape, device=device, dtype=tensors[3].dtype)]


@dataclass(frozen=True)
class StepOp(FlatOp):
    """gated_delta_rule_step on flat lists of tensors."""

    name: str = "gated_delta_rule_step"

    # Rows, heads, K, V.
    small = (2, (1, 2), 3, 5)
    tiny = (1, (1, 2), 2, 2)
    several = (3, (2, 2), 24, 40)
    growing = ((3, (1, 2), 4, 5), (6, (1, 2), 4, 5), (9, (1, 2), 4, 5))
    empty = ((0, (1, 2), 3, 5),)
    gpu = ((3, (2, 4), 128, 128), (1, (1, 1), 200, 72))
    exempt: ClassVar = dict.fromkeys(
        (
            "test_traced_graph_calls_the_op_and_its_backward",
            "test_strides_change_no_bit_and_outputs_are_contiguous",
            "test_inductor_compiles_forward_and_backward",
        ),
        "the derivative is plain torch, whose sums follow strides and compilers",
    )

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return tuple(gated_delta_rule_step(*tensors, **options))

    def draw(
        self,
        batch: int,
        heads: tuple[int, int],
        keys: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[Tensor]:
        tensors = drawn(batch, dtype=dtype, device=device, heads=heads, widths=(keys, width))
        tensors[3] = -tensors[3]
        shape = (batch, heads[1], keys, width)
        return [*tensors, torch.randn(shape, device=device, dtype=tensors[3].dtype)]


@dataclass(frozen=True)
class SharedHeadsOp(RuleOp):
    """The rule of two value heads for each head of keys."""

    small = (1, 2, (1, 2), 2, 3)
    tiny = (1, 3, (1, 2), 2, 2)


@dataclass(frozen=True)
class SequencesOp(RuleOp):
    """The rule on sequences that fill all chunks that are launched."""

    small = (1, 65, 1, 2, 3)


@dataclass(frozen=True)
class ConvolutionOp(FlatOp):
    """short_convolution of x, the taps and, with ``bias``, a bias; with a ``period`` a sequence
    begins after so many tokens.
    """

    heads: int = 0
    bias: bool = True
    period: int = 0

    # Rows, tokens, channels, taps.
    small = (1, 5, 4, 3)
    tiny = (1, 5, 4, 3)

    @property
    def name(self) -> str:
        return "short_convolution" + "-bias" * self.bias

    def public(self, x, weight, bias=None, place=None, **options: Any) -> Tensor:
        if self.period:
            place = torch.arange(x.shape[1], device=x.device) % self.period
        return short_convolution(x, weight, bias, place=place, heads=self.heads, **options)

    def draw(
        self,
        batch: int,
        tokens: int,
        channels: int,
        taps: int = 4,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[Tensor]:
        draw = partial(torch.randn, dtype=state_dtype(dtype), device=device)
        others = [draw(channels, taps), *([draw(channels)] if self.bias else [])]
        return [draw(batch, tokens, channels).to(dtype), *others]


@dataclass(frozen=True)
class NormOp(FlatOp):
    """gated_norm of o, weight and, with ``gated``, a gate."""

    gated: bool = True

    small = ((2, 3, 5),)
    tiny = ((2, 3, 4),)

    @property
    def name(self) -> str:
        return "gated_norm" + "-gated" * self.gated

    def public(self, o, weight, gate=None, **options: Any) -> Tensor:
        return gated_norm(o, weight, gate, 1e-5, **options)

    def draw(self, shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        draw = partial(torch.randn, dtype=state_dtype(dtype), device=device)
        o, gate = draw(shape).to(dtype), draw(shape).to(dtype)
        return [o, draw(shape[-1]), *([gate] if self.gated else [])]


RULE, STEP, CONVOLUTION, NORM = RuleOp(), StepOp(), ConvolutionOp(), NormOp()
OPERATIONS = {op.name: op for op in (RULE, STEP)}
FORMS = {
    op.name: op
    for op in (
        RuleOp(starts=False, form="-zeros"),
        SharedHeadsOp(form="-shared"),
        SequencesOp(sequences=True, form="-sequences"),
        *(ConvolutionOp(heads=2, bias=bias, period=3) for bias in (False, True)),
        *(NormOp(gated) for gated in (False, True)),
    )
}
