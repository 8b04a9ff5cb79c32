"""How a call moves a memory on: the tokens one by one, or pooled into one step per chunk."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from . import deep_memory
from ._backends import Backend
from .memory_read import fits, memory_read
from .memory_scan import memory_scan
from .memory_state import Weights, Writes, like
from .memory_update import MemoryUpdate, memory_update
from .reference import over
from .weights import MemoryWeights

Tensor = torch.Tensor

Granularity = Literal["token", "chunk", "segment"]
Reduction = Literal["sum", "mean_feature", "mean_all"]
Scope = Literal["sequence", "batch_pooled"]
Read = Literal["after", "before"]


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


class Moved(NamedTuple):
    """A memory after a call.

    Attributes:
        y: ``[B, T, heads, D]``, what the queries read.
        weights, momentum: at the start of the running chunk.
        tail: the running chunk's tokens.
        skipped: ``[B, heads]``, tokens of pooled steps that were skipped; None without such steps.
    """

    y: Tensor
    weights: Weights
    momentum: Weights
    tail: Writes
    skipped: Tensor | None


def move(
    rules: Rules, q: Tensor, writes: Writes, weights: Weights, momentum: Weights, tail: Writes
) -> Moved:
    """Write T tokens after those of the tail and read q ``[B, T, heads, D]`` on the way."""
    steps = token_steps if rules.granularity == "token" else pooled_steps
    return steps(rules, q, writes, weights, momentum, tail)


def token_steps(
    rules: Rules, q: Tensor, writes: Writes, weights: Weights, momentum: Weights, tail: Writes
) -> Moved:
    """Every token changes the memory; the tail is written again, for its chunk began before it."""
    known = tail.length
    if known:
        q = F.pad(q, (0, 0, 0, 0, known, 0))
    joined = tail.then(writes)
    closed = joined.length // rules.chunk * rules.chunk
    rest = joined.part(closed, joined.length)
    out = []
    if closed:
        y, weights, momentum = scan(rules, q[:, :closed], joined.part(0, closed), weights, momentum)
        out.append(y)
    if rest.length:
        out.append(scan(rules, q[:, closed:], rest, weights, momentum)[0])
    y = torch.cat(out, 1) if len(out) > 1 else out[0] if out else q
    return Moved(y[:, known:], weights, momentum, rest.kept(tail), None)


def scan(
    rules: Rules, q: Tensor, writes: Writes, weights: Weights, momentum: Weights
) -> tuple[Tensor, Weights, Weights]:
    """Write and read token by token, from the start of a chunk."""
    theta = writes.theta
    if rules.reduction != "sum":
        # A step is one token: both means are over its features.
        theta = theta / q.shape[-1]
    operands = (writes.k, writes.v), (writes.alpha, writes.eta, theta, writes.written)
    options: dict[str, Any] = {
        "chunk": rules.chunk,
        "activation": rules.activation,
        "read": rules.read,
    }
    if isinstance(weights, MemoryWeights) and isinstance(momentum, MemoryWeights):
        return memory_scan(
            q, *operands[0], weights, momentum, *operands[1], backend=rules.backend, **options
        )
    return deep_memory.memory_scan(q, *operands[0], weights, momentum, *operands[1], **options)


def pooled_steps(
    rules: Rules, q: Tensor, writes: Writes, weights: Weights, momentum: Weights, tail: Writes
) -> Moved:
    """One step for every chunk that is complete, or for the call; queries read what the chunk
    found.
    """
    known = tail.length
    joined = tail.then(writes)
    size = rules.chunk if rules.granularity == "chunk" else max(joined.length, 1)
    closed = joined.length // size * size
    out = []
    skipped = None
    for start in range(0, joined.length, size):
        stop = min(start + size, joined.length)
        out.append(read(rules, q[:, max(start - known, 0) : stop - known], weights))
        if stop <= closed:
            part = joined.part(start, stop)
            weights, momentum, lost = pooled_step(rules, part, weights, momentum)
            skipped = lost if skipped is None else skipped + lost
    y = torch.cat(out, 1) if len(out) > 1 else out[0] if out else q
    rest = joined.part(closed, joined.length)
    return Moved(y, weights, momentum, rest.kept(tail), skipped)


def pooled_step(
    rules: Rules, writes: Writes, weights: Weights, momentum: Weights
) -> tuple[Weights, Weights, Tensor]:
    """(weights, momentum, ``[B, heads]`` how many tokens a skipped step leaves unwritten)."""
    tokens = writes.written.sum(1)
    if rules.scope == "batch_pooled":
        writes = writes.map(lambda x: x.flatten(0, 1).unsqueeze(0))
    written, count = writes.written, writes.written.sum(1)
    at_least_one = count.clamp(min=1)
    gates = (
        torch.where(written, gate, 0.0).sum(1) / at_least_one
        for gate in (writes.alpha, writes.eta, writes.theta)
    )
    k, v = (
        torch.where(written.unsqueeze(-1), x, 0.0).transpose(1, 2) for x in (writes.k, writes.v)
    )
    row_weights = written.transpose(1, 2).to(writes.alpha.dtype)
    if rules.reduction == "mean_all":
        # The mean is over the tokens that are written.
        row_weights = row_weights * (k.shape[2] / at_least_one.to(row_weights.dtype)).unsqueeze(-1)
    operands = (*gates, row_weights)
    options: dict[str, Any] = {
        "activation": rules.activation,
        "reduction": rules.reduction,
        "max_grad_norm": rules.max_grad_norm,
    }
    done: MemoryUpdate | deep_memory.DeepUpdate
    if isinstance(weights, MemoryWeights) and isinstance(momentum, MemoryWeights):
        done = memory_update(k, v, weights, momentum, *operands, backend=rules.backend, **options)
    else:
        done = deep_memory.memory_update(k, v, weights, momentum, *operands, **options)
    # Where no token is written, momentum does not move the memory either.
    some = count > 0

    def moved(new: Weights, old: Weights) -> Weights:
        pairs = zip(new, old, strict=True)
        return like(old, [torch.where(over(some, x), x, y) for x, y in pairs])

    lost = torch.where(done.skipped, tokens, 0)
    return moved(done.weights, weights), moved(done.momentum, momentum), lost


def read(rules: Rules, q: Tensor, weights: Weights) -> Tensor:
    """M(q) for q ``[B, T, heads, D]``."""
    rows, tokens = q.shape[:2]
    if rules.scope == "batch_pooled":
        q = q.flatten(0, 1).unsqueeze(0)
    if isinstance(weights, MemoryWeights):
        # Pooled steps take wider heads than the read's kernels do.
        served = fits(q.shape[-1], weights.b1.shape[-1])
        backend = rules.backend if served else "reference"
        y = memory_read(q, weights, activation=rules.activation, backend=backend)
    else:
        y = deep_memory.memory_read(q, weights, activation=rules.activation)
    return y.squeeze(0).unflatten(0, (rows, tokens)) if rules.scope == "batch_pooled" else y


def weights_at_end(rules: Rules, weights: Weights, momentum: Weights, tail: Writes) -> Weights:
    """The weights after the tail's tokens; before them where only complete chunks are written."""
    if rules.granularity != "token" or tail.length == 0:
        return weights
    return scan(rules, tail.k, tail, weights, momentum)[1]
