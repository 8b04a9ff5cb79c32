"""What each of our ways saves in a training step of TitanMAC: all of them taken back, and put in
one at a time.

    syncs       every step reads its loss on the host, and every call of a memory whether it is
                finite; ours reads nothing
    attention   scores, mask, softmax and values as products of torch; ours the banded kernels
    norms       root mean squares in elementwise operations; ours one kernel
    gating      SiLU and product apart; ours one kernel
    memory      every inner gradient by autograd, chunk after chunk; ours the scan's kernels

All compute the same loss. Rotary positions and the loss over the vocabulary are ours throughout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from fusewright.feed_forward.swiglu import swiglu
from fusewright.memory_mlp import MemoryWeights, NeuralMemory
from fusewright.memory_mlp.common.reference import Rows, activated, linear
from fusewright.memory_mlp.scan import reference as scan_reference
from fusewright.norm import RMSNorm
from torch import Tensor

from ..models.titan_mac import TitanMAC
from ..models.titan_mac import layers as titan_mac_layers
from .harness import Line
from .results import gib, keep_beside, mib, table_of
from .step import Measurement, Step
from .text import TextShape
from .titan_mac import TitanMACHarness

SWITCHES = ("syncs", "attention", "norms", "gating", "memory")
# Of a file of its own: the shares are of no pass.
COLUMNS = ["case", "ours", "ms", "mem_mib", "waiting", "evaluation"]


def manual_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, prefix: int, *, every: int = 1, **options: Any
) -> Tensor:
    """Attention with its scores and its mask in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    key = torch.arange(k.shape[2], device=k.device)
    first = key.shape[0] - 1 - (q.shape[2] - 1) * every
    back = key[first::every].unsqueeze(-1) - key
    seen = (key < prefix) | ((back >= 0) & (back < window))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def manual_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def manual_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float | None, backend: str
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return manual_norm(total, weight, eps), total


def manual_gating(x: Tensor, joint_weight: Tensor, output_weight: Tensor, **options: Any) -> Tensor:
    gate, up = F.linear(x, joint_weight).chunk(2, -1)
    return F.linear(F.silu(gate) * up, output_weight)


def rows_by_autograd(
    k: Tensor,
    v: Tensor,
    row_weights: Tensor | None,
    weights: MemoryWeights,
    factor: float,
    activation: str,
    residual_norm: bool = False,
) -> Rows:
    """The inner gradients of a chunk, by a graph that is kept for the outer ones."""
    # Inner gradients are wanted where no outer ones are.
    outer = torch.is_grad_enabled()
    with torch.enable_grad():
        z = linear(k, weights.w1, weights.b1)
        z = z if z.requires_grad else z.requires_grad_()
        h = activated(z, activation)[0]
        out = linear(h, weights.w2, weights.b2)
        r = (k + F.layer_norm(out, out.shape[-1:]) if residual_norm else out) - v
        loss = 0.5 * factor * r.square().sum()
        p, e = torch.autograd.grad(loss, (z, out), create_graph=outer)
    unused = torch.empty(0, device=k.device)
    return Rows([k, h], [unused], [unused], r, [unused], [p, e])


def waiting(memory: NeuralMemory, *arguments: Any, **options: Any) -> Any:
    """Write and read, then read on the host whether the memory is finite."""
    found = NeuralMemory.advance(memory, *arguments, **options)
    if not all(bool(x.isfinite().all().item()) for x in found[1].weights):
        raise ArithmeticError("a memory is not finite")
    return found


@contextmanager
def taken_back(model: TitanMAC, switches: tuple[str, ...]) -> Iterator[None]:
    """The model with these of our ways replaced by the plain ones."""
    memories = [module for module in model.modules() if isinstance(module, NeuralMemory)]
    layers: Any = titan_mac_layers
    plain: dict[str, list[tuple[Any, str, Any]]] = {
        "syncs": [(memory, "advance", functools.partial(waiting, memory)) for memory in memories],
        "attention": [(layers, "sliding_window_attention", manual_attention)],
        "norms": [
            (layers, "add_rms_norm", manual_add_norm),
            (RMSNorm, "forward", lambda self, x: manual_norm(x, self.weight, self.eps)),
        ],
        "gating": [(swiglu, "gated_feed_forward", manual_gating)],
        "memory": [
            (scan_reference, "rows_of", rows_by_autograd),
            *((each, "rules", each.rules._replace(backend="reference")) for each in memories),
        ],
    }
    with ExitStack() as stack:
        for switch in switches:
            for owner, name, replacement in plain[switch]:
                stack.enter_context(patch.object(owner, name, replacement))
        yield


class Shares(NamedTuple):
    """Of the host's time in a step, what it waits; of a run's time, what evaluation takes."""

    waiting: float
    evaluation: float


class SwitchesHarness(NamedTuple):
    """Measures the switches.

    Attributes:
        harness: everything but the switches.
        evaluate_every: steps between two evaluations.
        evaluation_batches: batches of an evaluation.
    """

    harness: TitanMACHarness
    evaluate_every: int
    evaluation_batches: int

    def bench(self, shape: TextShape) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        harness = self.harness
        columns = ("ms", "tokens/s", "times before", "GiB", "host waits", "evaluation")
        title, caption = harness.case(shape), "a step, everything eager"
        table = table_of(title, caption, ("ours",), columns)
        others = {name: tuple(each for each in SWITCHES if each != name) for name in SWITCHES}
        settings = {"none": SWITCHES, **others, "all": ()}
        before: float | None = None

        def line_of(name: str, plain: tuple[str, ...]) -> Line:
            def told(found: tuple[Measurement, Shares]) -> list[str]:
                nonlocal before
                (measured, shares), case = found, harness.case(shape)
                ms, memory = measured.step.ms, measured.memory_mib
                before = ms if name == "none" else before
                kept = f"{ms:.4f}", mib(memory), *(f"{share:.4f}" for share in shares)
                keep_beside(harness.file, "switches", COLUMNS, (case, name, *kept))
                cells = [f"{ms:,.2f}", f"{1e3 * shape.tokens / ms:,.0f}"]
                cells += ["" if before is None else f"{before / ms:.2f}", gib(memory, 2)]
                return cells + [f"{100 * share:.1f} %" for share in shares]

            return Line((name,), name == "all", lambda: self.measure(shape, plain), told)

        return harness.tabulate(table, [line_of(*setting) for setting in settings.items()])

    def measure(self, shape: TextShape, plain: tuple[str, ...]) -> tuple[Measurement, Shares]:
        """A step, and its shares, with these of our ways taken back."""
        harness = self.harness
        step = replace(harness.step(shape, "fusewright"), reads="syncs" in plain)
        with taken_back(cast(TitanMAC, step.model), plain):
            loss = step.timed().loss
            measured = step.measure(harness.seconds, loss, "")
            # Once before, since it is the first call without gradients.
            evaluation = min(self.evaluation_seconds(step) for _ in range(2))
            steps = self.evaluate_every * measured.step.ms / 1e3
            shares = Shares(waiting_share(step), evaluation / (evaluation + steps))
        return measured, shares

    @torch.no_grad()
    def evaluation_seconds(self, step: Step) -> float:
        """Losses of ``evaluation_batches`` batches, read at the end."""
        start = time.perf_counter()
        with torch.autocast(step.device.type, torch.bfloat16):
            batch = step.sampler.sample(step.batch)
            losses = [step.loss_function(step.model, batch) for _ in range(self.evaluation_batches)]
        torch.stack(losses).mean().item()
        return time.perf_counter() - start


def waiting_share(step: Step) -> float:
    """The share of the host's time in a step that it spends in reading numbers of the device."""
    waited, read = 0.0, Tensor.item

    def timed(x: Tensor) -> Any:
        nonlocal waited
        start = time.perf_counter()
        value = read(x)
        waited += time.perf_counter() - start
        return value

    step.timed()
    with patch.object(Tensor, "item", timed):
        start = time.perf_counter()
        step.run()
        return waited / (time.perf_counter() - start)
