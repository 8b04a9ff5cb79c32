"""The ops of the package as functions of flat lists of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusewright.deltanet import gated_delta_rule, gated_delta_rule_step
from fusewright.deltanet.rule import reference
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)

Tensor = torch.Tensor


def drawn(*lead: int, dtype: torch.dtype, device: str, heads: tuple[int, int], widths) -> list:
    """q, k of length 1, v, g down to ``-forget`` and beta up to 1, of rows ``lead``."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    normal = [torch.randn(*lead, heads[0], widths[0], device=device, dtype=state) for _ in range(2)]
    q, k = (F.normalize(x, dim=-1) for x in normal)
    v = torch.randn(*lead, heads[1], widths[1], device=device, dtype=state)
    g, beta = (torch.rand(*lead, heads[1], device=device, dtype=state) for _ in range(2))
    return [*(x.to(dtype) for x in (q, k, v)), g, beta]


@dataclass(frozen=True)
class RuleOp:
    """gated_delta_rule on flat lists of tensors: q, k, v, g, beta and, with ``starts``, a state."""

    starts: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def having(self, starts: bool = True, **options: Any) -> RuleOp:
        """The op with options of its own."""
        return replace(self, starts=starts, options=self.options | options)

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """o and the state after the last token."""
        state = tensors[5] if self.starts else None
        done = gated_delta_rule(
            *tensors[:5],
            initial_state=state,
            output_final_state=True,
            **self.options | options,
        )
        return done.o, done.state

    def kernels(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.public(*tensors, backend="triton")

    def reference(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.public(*tensors, backend="reference")

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

    def check(self, tensors: list[Tensor]) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        Yardstick(self.reference, tensors).check(self.kernels)

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
        shape = (sequences or batch, heads[1], keys, width)
        return [*tensors, torch.randn(shape, device=device, dtype=tensors[3].dtype)]


@dataclass(frozen=True)
class StepOp:
    """gated_delta_rule_step on flat lists of tensors."""

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return tuple(gated_delta_rule_step(*tensors, **options))

    def kernels(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.public(*tensors, backend="triton")

    def reference(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.public(*tensors, backend="reference")

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


@pytest.fixture
def rule_op() -> RuleOp:
    return RuleOp()


@pytest.fixture
def step_op() -> StepOp:
    return StepOp()


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
