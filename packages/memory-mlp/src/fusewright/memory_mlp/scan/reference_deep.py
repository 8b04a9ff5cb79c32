"""The scan of a memory of three layers or more as its op sees it, in plain torch: what a CPU runs.

Weights and momentum are packed as in ``common.deep_weights``. With ``rest``, R, the memory forgets
towards R, W_t = (1 - alpha_t) W_(t-1) + alpha_t R + S_t, so that each chunk adds (1 - keep_t) R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.precision import wide
from ..common.deep_weights import pack_deep, unpack_deep
from ..common.reference import ACTIVATIONS, Rows, layers_of, linear, over, rows_of
from ..common.weights import Weights, mapped
from .reference import Decays, chunk_end, decays_of
from .reference_clip import FACTOR

Tensor = torch.Tensor


def deep_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    gates: Sequence[Tensor],
    written: Tensor | None,
    rest: Weights | None,
    chunk: int,
    activation: str,
    read: str,
) -> tuple[Tensor, list[tuple[Weights, Weights]]]:
    """y, and weights and momentum at the start of every chunk and after the last. q, k, v are
    [*lead, T, D], the gates and ``written`` [*lead, T].
    """
    numbers = [*gates] if written is None else [*gates, written]
    if written is not None:
        k, v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
    out, states = [q[..., :0, :]], [(weights, momentum)]
    parts = [x.split(chunk, -2) for x in (q, k, v)] + [x.split(chunk, -1) for x in numbers]
    for part in zip(*parts, strict=True) if q.shape[-2] else ():
        decays = decays_of(*part[3:])
        rows = rows_of(part[1], part[2], None, weights, FACTOR, activation)
        out.append(deep_reads(part[0], rows, weights, momentum, rest, decays, activation, read))
        old = weights
        weights, momentum = chunk_end(rows, old, momentum, decays)
        if rest is not None:
            forgotten = 1.0 - decays.keep[..., -1]
            weights = mapped(lambda w, r: w + over(forgotten, r) * r, weights, rest)  # noqa: B023
        states.append((weights, momentum))
    return torch.cat(out, -2), states


def deep_reads(
    q: Tensor,
    rows: Rows,
    weights: Weights,
    momentum: Weights,
    rest: Weights | None,
    decays: Decays,
    activation: str,
    read: str,
) -> Tensor:
    """What the queries of one chunk read, as ``reference.reads_of``."""
    seen, keep, carry = -decays.gamma, decays.keep, decays.carry
    if read == "before":
        # Every query reads what the token before it has left.
        seen = torch.nn.functional.pad(seen, (0, 0, 1, 0))[..., :-1, :]
        keep = torch.nn.functional.pad(keep, (1, 0), value=1.0)[..., :-1]
        carry = torch.nn.functional.pad(carry, (1, 0))[..., :-1]
    x = q
    halves = [weights, momentum] if rest is None else [weights, momentum, rest]
    factors = [keep, carry, 1.0 - keep]
    layers = zip(*(layers_of(half) for half in halves), strict=True)
    for each, keys, p in zip(layers, rows.inputs, rows.by_z, strict=True):
        if x is not q:
            x = ACTIVATIONS[activation](x)
        z = ((seen * (x @ keys.mT + 1.0)) @ p)
        for factor, layer in zip(factors, each, strict=False):
            z = z + factor.unsqueeze(-1) * linear(x, *layer)
        x = z
    return x


def packed_deep_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    layers: int,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan as its op sees it: q, k, v [B, T, heads, D], gates and ``written`` [B, T, heads],
    weights and momentum packed [B, heads, 2, SIZE], ``rest`` [B, heads, SIZE].

    Returns:
        (y, the packed state after the last token, the states with which the chunks began
        [chunks, B, heads, 2, SIZE], none of them without ``starts``).
    """
    dtype, sizes = q.dtype, (layers, hidden, q.shape[-1])
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    weights, momentum = unpack_deep(state, *sizes)
    gates = [gate.mT for gate in (alpha, eta, theta)]
    mask = None if written is None else written.mT
    home = None if rest is None else unpack_deep(rest.unsqueeze(-2), *sizes)[0]
    y, states = deep_chunks(
        q, k, v, weights, momentum, gates, mask, home, chunk, activation, read
    )
    *begins, end = [pack_deep(*halves) for halves in (states if starts else states[-1:])]
    began = torch.stack(begins) if begins else state.new_empty(0, *state.shape)
    return y.transpose(1, 2).to(dtype).contiguous(), end, began


def packed_deep_backward(
    dy: Tensor,
    dend: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    *options: int | str,
) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta, rest), the last one empty where there is no
    rest; chunk by chunk from the last one, each recomputed from the state with which it began.
    """
    chunk = int(options[2])
    operands = q, k, v, state, alpha, eta, theta, written, rest
    states = packed_deep_scan(*operands, *options)[2]
    rows: list[tuple[Tensor, ...]] = []
    drest = state.new_empty(0) if rest is None else torch.zeros_like(rest)
    for index in reversed(range(len(states))):
        part = slice(index * chunk, (index + 1) * chunk)
        mask = None if written is None else written[:, part]

        def step(q, k, v, state, alpha, eta, theta, *rest, mask=mask):
            tensors = q, k, v, state, alpha, eta, theta, mask, *(rest or (None,))
            return packed_deep_scan(*tensors, *options, False)[:2]

        pullback = torch.func.vjp(
            step,
            *(wide(x[:, part]) for x in (q, k, v)),
            states[index],
            *(x[:, part] for x in (alpha, eta, theta)),
            *(() if rest is None else (rest,)),
        )[1]
        dq, dk, dv, dend, *others = pullback((wide(dy[:, part]), dend))
        rows.append((dq, dk, dv, *others[:3]))
        if rest is not None:
            drest = drest + others[3]
    if not rows:
        gradients = [torch.zeros_like(x) for x in (q, k, v)]
        return *gradients, dend.clone(), *map(torch.zeros_like, (alpha, eta, theta)), drest
    dq, dk, dv, *dgates = (torch.cat(parts[::-1], 1) for parts in zip(*rows, strict=True))
    return *(x.to(q.dtype) for x in (dq, dk, dv)), dend, *dgates, drest
