"""What is timed and against whom: ``python -m fusewright_testkit.bench hyper-connections``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from fusewright.hyper_connections import stream_read, stream_write
from fusewright.hyper_connections.streams import reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled

# What the names in cases count, in the picture.
WORDS = {"n": "{} streams", "C": "width {}"}
Tensor = torch.Tensor
Op = Callable[..., Tensor | tuple[Tensor, ...]]

F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
# Tokens, streams and their width: of HybridLM's presets mini, 350m and 1b.
SIZES = (
    dict(tokens=16384, n=4, C=512),
    dict(tokens=16384, n=4, C=1024),
    dict(tokens=4096, n=4, C=4096),
)


def cases() -> list[Case]:
    """A reading, and a writing of bf16 to fp32 streams, at sizes of models."""
    return [case for sizes in SIZES for case in (read_case(sizes), write_case(sizes))]


def read_case(sizes: dict[str, int]) -> Case:
    """Phi's products are of fp32."""
    tokens, n, width = sizes["tokens"], sizes["n"], sizes["C"]
    x, u = 4 * tokens * n * width, 4 * tokens * width
    gates = 4 * tokens * (n + n * n)
    product = 2 * tokens * n * (n + 2) * n * width
    return Case(
        op="stream_read",
        sizes=sizes,
        dtype=F32,
        reference=plain_read,
        inputs=functools.partial(read_inputs, sizes),
        bytes_moved=by_pass(x + u + gates, 2 * x + u + gates),
        flops=by_pass(product),
    )


def write_case(sizes: dict[str, int]) -> Case:
    tokens, n, width = sizes["tokens"], sizes["n"], sizes["C"]
    x, y = 4 * tokens * n * width, 2 * tokens * width
    gates = 4 * tokens * (n + n * n)
    return Case(
        op="stream_write",
        sizes=sizes,
        dtype=F32,
        reference=plain_write,
        inputs=functools.partial(write_inputs, sizes),
        bytes_moved=by_pass(2 * x + y + gates, 3 * x + 2 * y + 2 * gates),
    )


def read_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """x, phi, alpha and bias, with logits of about 1."""
    tokens, n, width = sizes["tokens"], sizes["n"], sizes["C"]
    parts = n * (n + 2)
    x = torch.randn(tokens, n, width, device=device)
    phi = torch.randn(parts, n * width, device=device) * (n * width) ** -0.5
    return [x, phi, torch.ones(3, device=device), torch.randn(parts, device=device)]


def write_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """x, res, post and y."""
    tokens, n, width = sizes["tokens"], sizes["n"], sizes["C"]
    draw = functools.partial(torch.randn, device=device)
    res = draw(tokens, n, n).softmax(-1)
    return [draw(tokens, n, width), res, draw(tokens, n), draw(tokens, width).to(BF16)]


def our_read(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return stream_read(x, phi, alpha, bias, eps=EPS)[:3]


def plain_read(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return reference.stream_read(x, phi, alpha, bias, eps=EPS, dtype=x.dtype)[:3]


def plain_write(x: Tensor, res: Tensor, post: Tensor, y: Tensor) -> Tensor:
    return reference.stream_write(x, res, post, y, None)


def providers() -> dict[str, dict[str, Op]]:
    """Ours, torch and torch.compile."""
    plain: dict[str, Op] = {"stream_read": plain_read, "stream_write": plain_write}
    return {
        "fusewright": {"stream_read": our_read, "stream_write": stream_write},
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
    }
