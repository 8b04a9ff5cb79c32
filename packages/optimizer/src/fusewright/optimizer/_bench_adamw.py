"""AdamW and DeepNestedOptimizer's AdamW, and torch's, as benchmark cases."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._bench_steps import LR, MAX_GRAD_NORM, SHAPES, Case, Stepped, Tensor
from .adamw import AdamW
from .deep_nested import DeepNestedOptimizer

ADAMW, CLIPPING, NESTED = "AdamW", "AdamW with clipping", "DeepNestedOptimizer"
# For the host, which looks where they are.
MOVED = "AdamW, gradients in turns of two memories"


def cases() -> list[Case]:
    """Sizes in fp32 and bf16, with clipping and without; and many tensors for the host."""
    dtypes = torch.float32, torch.bfloat16
    # Parameter, gradient and state read, parameter and state written; squares read gradients
    # anew, and a controller's parameters too.
    sizes = [(ADAMW, name, 7) for name in ("small", "large")]
    sizes += [(CLIPPING, name, 8) for name in ("small", "large")]
    sizes += [(NESTED, name, 9) for name in ("small", "large")]
    found = [
        Case(op, SHAPES[name], dtype, functools.partial(torch_step, clips=op != ADAMW), passes)
        for op, name, passes in sizes
        for dtype in dtypes
    ]
    plain = functools.partial(torch_step, clips=False)
    many = [Case(op, SHAPES["many"], torch.float32, plain, 7) for op in (ADAMW, MOVED)]
    return [*found, *many]


def torch_step(*tensors: Tensor, clips: bool) -> tuple[Tensor, ...]:
    """Parameters after two steps, by the formula, in at least fp32."""
    half = len(tensors) // 2
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    found = [x.detach().to(wide) for x in tensors]
    ps, gs = found[:half], found[half:]
    if clips:
        norm = torch.stack([g.square().sum() for g in gs]).sum().sqrt()
        gs = [g * (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0) for g in gs]
    results = []
    for p, g, kept in zip(ps, gs, tensors, strict=False):
        m, v = torch.zeros_like(g), torch.zeros_like(g)
        for step in (1, 2):
            m = (m + (1 - 0.9) * (g - m)).to(kept.dtype).to(wide)
            v = (0.999 * v + (1 - 0.999) * g * g).to(kept.dtype).to(wide)
            root = (v / (1 - 0.999**step)).sqrt() + 1e-8
            p = p * (1 - LR * 0.01) - LR / (1 - 0.9**step) * m / root
            p = p.to(kept.dtype).to(wide)
        results.append(p.to(kept.dtype))
    return tuple(results)


def nested(parameters: list) -> DeepNestedOptimizer:
    """In three groups, whose controller looks in every step and trains apart from them."""
    named = [(f"layers.{i}.{'norm' if p.ndim < 2 else 'w'}", p) for i, p in enumerate(parameters)]
    return DeepNestedOptimizer(
        named, LR, weight_decay=0.01, max_grad_norm=MAX_GRAD_NORM, mode="explicit"
    )


def compiled(parameters: list) -> Any:
    """torch.compile's fusion of torch's own loop over tensors."""

    class Compiled:
        optimizer = torch.optim.AdamW(parameters, lr=LR, foreach=True)
        step = staticmethod(torch.compile(optimizer.step))

    return Compiled


def providers() -> dict[str, dict[str, Stepped]]:
    """Ours and torch's own, by op."""
    rivals: dict[str, dict[str, Any]] = {
        "torch-fused": dict(fused=True),
        "torch-fused-capturable": dict(fused=True, capturable=True),
        "torch-foreach": dict(foreach=True, capturable=True),
    }
    clipping = functools.partial(AdamW, lr=LR, max_grad_norm=MAX_GRAD_NORM)
    found = {
        "fusewright": {
            ADAMW: Stepped(functools.partial(AdamW, lr=LR)),
            CLIPPING: Stepped(clipping),
            MOVED: Stepped(functools.partial(AdamW, lr=LR), captures=False, alternates=True),
            NESTED: Stepped(nested, loss=True),
        },
        # What a step whose rates are numbers takes.
        "fusewright-adamw": {NESTED: Stepped(clipping)},
    }
    for name, options in rivals.items():
        make = functools.partial(torch.optim.AdamW, lr=LR, **options)
        captures = "capturable" in options
        found[name] = {
            ADAMW: Stepped(make, captures=captures),
            CLIPPING: Stepped(make, clips=True, captures=captures),
            MOVED: Stepped(make, captures=False, alternates=True),
        }
    found["compile"] = {ADAMW: Stepped(compiled, captures=False)}
    return found
