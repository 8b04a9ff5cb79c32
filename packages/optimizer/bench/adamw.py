"""AdamW and DeepNestedOptimizer's AdamW, and torch's, as benchmark cases."""

from __future__ import annotations

import functools
from typing import Any

import torch
from fusewright.optimizer import AdamW, DeepNestedOptimizer
from fusewright_testkit import Case

from .steps import LR, MAX_GRAD_NORM, SHAPES, Stepped, Tensor, step_case

ADAMW, CLIPPING, NESTED = "AdamW", "AdamW with clipping", "DeepNestedOptimizer"
# The host looks up their addresses in each step.
MOVED = "AdamW, gradients in turns of two memories"


def cases() -> list[Case]:
    """Sizes in fp32 and bf16, with clipping and without; and many tensors for the host."""
    dtypes = torch.float32, torch.bfloat16
    # Parameter, gradient and state are read, parameter and state written; squares read gradients
    # again, and those of a controller parameters too.
    sizes = [(ADAMW, name, 7) for name in ("small", "large")]
    sizes += [(CLIPPING, name, 8) for name in ("small", "large")]
    sizes += [(NESTED, name, 9) for name in ("small", "large")]
    large = [
        step_case(op, SHAPES[name], dtype, functools.partial(reference, clips=op != ADAMW), passes)
        for op, name, passes in sizes
        for dtype in dtypes
    ]
    plain = functools.partial(reference, clips=False)
    many = [step_case(op, SHAPES["many"], torch.float32, plain, 7) for op in (ADAMW, MOVED)]
    return [*large, *many]


def reference(*tensors: Tensor, clips: bool) -> tuple[Tensor, ...]:
    """Parameters after two steps of AdamW in plain torch."""
    options: dict[str, Any] = dict(max_grad_norm=MAX_GRAD_NORM) if clips else {}
    return Stepped(functools.partial(AdamW, lr=LR, backend="reference", **options))(*tensors)


def nested(parameters: list) -> DeepNestedOptimizer:
    """In two groups, whose controller sets rates in each step and is trained outside of steps."""
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
    merged = {
        "fusewright": {
            ADAMW: Stepped(functools.partial(AdamW, lr=LR)),
            CLIPPING: Stepped(clipping),
            MOVED: Stepped(functools.partial(AdamW, lr=LR), captures=False, alternates=True),
            NESTED: Stepped(nested, loss=True),
        },
        # A step whose rates are numbers.
        "fusewright-adamw": {NESTED: Stepped(clipping)},
    }
    for name, options in rivals.items():
        make = functools.partial(torch.optim.AdamW, lr=LR, **options)
        captures = "capturable" in options
        merged[name] = {
            ADAMW: Stepped(make, captures=captures),
            CLIPPING: Stepped(make, clips=True, captures=captures),
            MOVED: Stepped(make, captures=False, alternates=True),
        }
    merged["compile"] = {ADAMW: Stepped(compiled, captures=False)}
    return merged
