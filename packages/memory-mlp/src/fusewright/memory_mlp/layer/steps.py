"""How a call changes a memory: token by token, or by one pooled step for each chunk or call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from .._core.backends import Backend
from ..common.reference import over
from ..common.weights import MemoryWeights, Weights, mapped
from ..inputs.memory_input import Writes
from ..read.memory_read import deep_memory_read, fits, memory_read
from ..scan.deep_scan import deep_memory_scan
from ..scan.memory_scan import memory_scan
from ..scan.reference_clip import kept_where
from ..update.memory_update import deep_memory_update, memory_update

Tensor = torch.Tensor

Granularity = Literal["token", "chunk", "segment"]
Reduction = Literal["sum", "mean_feature", "mean_all"]
Scope = Literal["sequence", "batch_pooled"]
Read = Literal["after", "before"]
Forget = Literal["zero", "initial"]


class Rules(NamedTuple):
    """How a memory is written and read: arguments of NeuralMemory."""

    layers: int
    activation: str
    chunk: int
    granularity: Granularity
    reduction: Reduction
    scope: Scope
    max_grad_norm: float | None
    read: Read
    backend: Backend
    theta: Literal["learned"] | float
    forget: Forget = "zero"
    residual_norm: bool = False


class Memory(NamedTuple):
    """A memory before a call.

    Attributes:
        weights, momentum: at the start of the running chunk.
        rest: what the weights are forgotten towards, ``[heads, ...]``; None is zero.
    """

    weights: Weights
    momentum: Weights
    rest: Weights | None


class StepResult(NamedTuple):
    """A memory after a call.

    Attributes:
        y: ``[B, T, heads, D]``, the memory's outputs for the queries.
        weights, momentum: at the start of the running chunk.
        tail: the running chunk's tokens.
        skipped: ``[B, heads]``, tokens of pooled steps that were skipped, or that a clipped scan
            lost in the chunks that are complete; None without such.
        loss: the inner loss: of each token, ``[B, T, heads]``, or of pooled steps, of each step,
            ``[B, steps, heads]``.
    """

    y: Tensor
    weights: Weights
    momentum: Weights
    tail: Writes
    skipped: Tensor | None
    loss: Tensor


def run_steps(
    rules: Rules,
    q: Tensor,
    writes: Writes,
    memory: Memory,
    tail: Writes,
    resets: Tensor | None = None,
) -> StepResult:
    """Write T tokens after those of the tail and read q ``[B, T, heads, D]`` on the way. Of whole
    chunks without a tail, those that ``resets [B, chunks]`` names begin with ``memory`` again.
    """
    steps = token_steps if rules.granularity == "token" else pooled_steps
    return steps(rules, q, writes, memory, tail, resets)


def token_steps(
    rules: Rules, q: Tensor, writes: Writes, memory: Memory, tail: Writes, resets: Tensor | None
) -> StepResult:
    """Every token changes the memory; the tail is written again, for its chunk began before it."""
    known = tail.length
    if not known and writes.length and writes.length % rules.chunk == 0:
        # Whole chunks alone. A view of all tokens is a node of autograd too: twelve of them here.
        y, weights, momentum, lost, loss = scan(rules, q, writes, memory, resets)
        return StepResult(y, weights, momentum, tail, lost, loss)
    if known:
        q = F.pad(q, (0, 0, 0, 0, known, 0))
    joined = tail.then(writes)
    closed = joined.length // rules.chunk * rules.chunk
    new_tail = joined.part(closed, joined.length)
    out, losses = [], []
    lost = None
    if closed:
        part = joined.part(0, closed)
        y, weights, momentum, lost, loss = scan(rules, q[:, :closed], part, memory)
        memory = Memory(weights, momentum, memory.rest)
        out.append(y)
        losses.append(loss)
    if new_tail.length:
        y, _, _, _, loss = scan(rules, q[:, closed:], new_tail, memory)
        out.append(y)
        losses.append(loss)
    y = torch.cat(out, 1) if len(out) > 1 else out[0] if out else q
    loss = torch.cat(losses, 1) if losses else joined.alpha.detach()
    new_tail = new_tail.kept(tail)
    return StepResult(
        *(y[:, known:], memory.weights, memory.momentum, new_tail),
        *(lost, loss[:, known:]),
    )


def scan(
    rules: Rules, q: Tensor, writes: Writes, memory: Memory, resets: Tensor | None = None
) -> tuple[Tensor, Weights, Weights, Tensor | None, Tensor]:
    """Write and read token by token, from the start of a chunk; last, how many tokens were lost,
    and the inner loss of each.
    """
    theta, limit = writes.theta, rules.max_grad_norm
    if rules.reduction != "sum":
        # A step is one token: both means are over its features. The scan's gradient is the sum's.
        theta = theta / q.shape[-1]
        limit = None if limit is None else limit * q.shape[-1]
    rows, gates = (q, writes.k, writes.v), (writes.alpha, writes.eta, theta, writes.written)
    options: dict[str, Any] = {
        "chunk": rules.chunk,
        "activation": rules.activation,
        "read": rules.read,
        "residual_norm": rules.residual_norm,
        "max_grad_norm": limit,
    }
    found: tuple[Tensor, Weights, Weights, Tensor | None, Tensor]
    weights, momentum, rest = memory
    if isinstance(weights, MemoryWeights) and isinstance(momentum, MemoryWeights):
        resting = rest if isinstance(rest, MemoryWeights) else None
        options |= {"backend": rules.backend}
        found = memory_scan(*rows, weights, momentum, *gates, resting, resets, **options)
    else:
        # One layer is plain torch.
        options |= {"backend": rules.backend if rules.layers > 2 else "reference"}
        found = deep_memory_scan(*rows, weights, momentum, *gates, rest, resets, **options)
    y, weights, momentum, skipped, loss = found
    loss = loss if rules.reduction == "sum" else loss / q.shape[-1]
    return y, weights, momentum, skipped, loss


def pooled_steps(
    rules: Rules, q: Tensor, writes: Writes, memory: Memory, tail: Writes, resets: Tensor | None
) -> StepResult:
    """One step for every chunk that is complete, or for the call; queries read the memory as it was
    at the start of their chunk.
    """
    known = tail.length
    joined = tail.then(writes)
    size = rules.chunk if rules.granularity == "chunk" else max(joined.length, 1)
    closed = joined.length // size * size
    out, losses = [], []
    skipped = None
    first = memory
    for start in range(0, joined.length, size):
        stop = min(start + size, joined.length)
        if resets is not None:
            reset = resets[:, start // size].unsqueeze(1)
            weights = kept_where(reset, first.weights, memory.weights)
            momentum = kept_where(reset, first.momentum, memory.momentum)
            memory = Memory(weights, momentum, memory.rest)
        out.append(read(rules, q[:, max(start - known, 0) : stop - known], memory.weights))
        if stop <= closed:
            part = joined.part(start, stop)
            weights, momentum, lost, loss = pooled_step(rules, part, memory)
            memory = Memory(weights, momentum, memory.rest)
            losses.append(loss.expand(len(lost), -1))
            skipped = lost if skipped is None else skipped + lost
    y = torch.cat(out, 1) if len(out) > 1 else out[0] if out else q
    new_tail = joined.part(closed, joined.length).kept(tail)
    none = joined.alpha.detach()[:, :0]
    return StepResult(
        *(y, memory.weights, memory.momentum, new_tail, skipped),
        torch.stack(losses, 1) if losses else none,
    )


def pooled_step(
    rules: Rules, writes: Writes, memory: Memory
) -> tuple[Weights, Weights, Tensor, Tensor]:
    """(weights, momentum, ``[B, heads]`` how many tokens a skipped step does not write, the inner
    loss ``[B or 1, heads]``).
    """
    weights, momentum, rest = memory
    tokens = writes.written.sum(1)
    if rules.scope == "batch_pooled":
        writes = writes.map(lambda x: x.flatten(0, 1).unsqueeze(0))
    written, count = writes.written, writes.written.sum(1)
    at_least_one = count.clamp(min=1)
    alpha, eta, theta = (
        torch.where(written, gate, 0.0).sum(1) / at_least_one
        for gate in (writes.alpha, writes.eta, writes.theta)
    )
    if (
        rules.theta == "learned"
        and rules.reduction != "mean_all"
        and written.shape[1] > rules.chunk
    ):
        # It is bounded for a sum over a chunk. This one is over more tokens, none of which sees the
        # gradient of another.
        theta = theta * rules.chunk / count.clamp(min=rules.chunk).to(theta.dtype)
    k, v = (
        torch.where(written.unsqueeze(-1), x, 0.0).transpose(1, 2) for x in (writes.k, writes.v)
    )
    row_weights = written.transpose(1, 2).to(writes.alpha.dtype)
    if rules.reduction == "mean_all":
        # The mean is over the tokens that are written.
        row_weights = row_weights * (k.shape[2] / at_least_one.to(row_weights.dtype)).unsqueeze(-1)
    operands = (alpha, eta, theta, row_weights)
    options: dict[str, Any] = {
        "activation": rules.activation,
        "reduction": rules.reduction,
        "max_grad_norm": rules.max_grad_norm,
    }
    if isinstance(weights, MemoryWeights) and isinstance(momentum, MemoryWeights):
        update = memory_update(k, v, weights, momentum, *operands, backend=rules.backend, **options)
    else:
        update = deep_memory_update(k, v, weights, momentum, *operands, **options)
    new_weights: Weights = update.weights
    if rest is not None:
        # A step that is skipped leaves the memory as it is.
        share = torch.where(update.skipped, 0.0, alpha)
        new_weights = mapped(lambda w, r: w + over(share, w) * r, new_weights, rest)
    # Where no token is written, momentum does not change the memory either.
    some = count > 0

    lost = torch.where(update.skipped, tokens, 0)
    new = kept_where(some, new_weights, weights), kept_where(some, update.momentum, momentum)
    return *new, lost, update.loss.detach()


def read(rules: Rules, q: Tensor, weights: Weights) -> Tensor:
    """M(q) for q ``[B, T, heads, D]``."""
    rows, tokens = q.shape[:2]
    if rules.scope == "batch_pooled":
        q = q.flatten(0, 1).unsqueeze(0)
    if isinstance(weights, MemoryWeights):
        # Pooled steps take wider heads than the read's kernels do.
        served = fits(q.shape[-1], weights.b1.shape[-1])
        backend = rules.backend if served else "reference"
        form: dict[str, Any] = {"backend": backend, "residual_norm": rules.residual_norm}
        y = memory_read(q, weights, activation=rules.activation, **form)
    else:
        form = {"activation": rules.activation, "residual_norm": rules.residual_norm}
        y = deep_memory_read(q, weights, **form)
    return y.squeeze(0).unflatten(0, (rows, tokens)) if rules.scope == "batch_pooled" else y


def weights_at_end(rules: Rules, memory: Memory, tail: Writes) -> Weights:
    """The weights after the tail's tokens; before them where only complete chunks are written."""
    if rules.granularity != "token" or tail.length == 0:
        return memory.weights
    return scan(rules, tail.k, tail, memory)[1]
