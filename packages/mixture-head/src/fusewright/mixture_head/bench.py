"""What is timed and against whom: ``python -m fusewright.mixture_head.bench`` prints a short table
of this machine's GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.utils.checkpoint import checkpoint

from . import grouped_heads, mixture_nll, reference
from ._checks import checked_scale

ROWS = (4000, 128000)
COMPONENTS = 10
WIDTH, HIDDEN, STORED = 512, 1365, 1376
# fp64 hidden layers of so many rows fit beside what is timed.
REFERENCE_ROWS = 8192

Tensor = torch.Tensor
Op = Callable[..., Tensor]


class Case(NamedTuple):
    """One op at one size."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Op
    inputs: Callable[[str], list[Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


def cases() -> list[Case]:
    """The mean log-likelihood in fp32 and the heads in bf16, at the sizes of the model."""
    return [case_of(rows) for case_of in (mixture_case, heads_case) for rows in ROWS]


def mixture_case(rows: int) -> Case:
    size = rows * (3 * COMPONENTS + 1) * torch.float32.itemsize
    form = checked_scale("log_sigma", (-7.0, 5.0), 1e-3)
    return Case(
        op="mixture_nll",
        sizes={"L": rows, "K": COMPONENTS},
        dtype=torch.float32,
        reference=functools.partial(reference.mixture_nll, **form._asdict()),
        inputs=functools.partial(mixture_inputs, rows),
        # The loss itself is one number; each gradient is as large as what it belongs to.
        bytes_moved={"fwd": size, "bwd": 2 * size, "fwd+bwd": 3 * size},
        flops={},
    )


def mixture_inputs(rows: int, device: str) -> list[Tensor]:
    """params and y."""
    return [torch.randn(rows, COMPONENTS, 3, device=device), torch.randn(rows, device=device)]


def heads_case(rows: int) -> Case:
    dtype = torch.bfloat16
    units = COMPONENTS * STORED
    weights = (units * (WIDTH + 3)) * dtype.itemsize
    size = rows * (WIDTH * dtype.itemsize + 3 * COMPONENTS * torch.float32.itemsize) + weights
    # The dense product and the narrow layer, of the width that is used.
    flops = 2 * rows * COMPONENTS * HIDDEN * (WIDTH + 3)
    return Case(
        op="grouped_heads",
        sizes={"L": rows, "D": WIDTH, "F": HIDDEN, "K": COMPONENTS},
        dtype=dtype,
        reference=heads_by_rows,
        inputs=functools.partial(heads_inputs, rows, dtype),
        # The hidden layer is no input and no output.
        bytes_moved={"fwd": size, "bwd": 2 * size, "fwd+bwd": 3 * size},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops},
    )


def heads_inputs(rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, and the weights of both layers, stored padded."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    hidden, output = draw(COMPONENTS, STORED, WIDTH), draw(COMPONENTS, STORED, 3)
    for weight in (hidden, output):
        weight[:, HIDDEN:] = 0.0
    return [draw(rows, WIDTH), hidden.flatten(0, 1) / WIDTH**0.5, output / HIDDEN**0.5]


def heads_by_rows(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """The reference, which keeps the hidden layer of a part of the rows alone."""
    return torch.cat(
        [
            checkpoint(
                reference.grouped_heads, part, hidden_weight, output_weight, use_reentrant=False
            )
            for part in x.split(REFERENCE_ROWS)
        ]
    )


def providers() -> dict[str, dict[str, Op]]:
    """Ours, torch, torch.compile, torch.distributions, and the loop over the heads that one writes
    first, compiled.
    """
    plain: dict[str, Op] = {"mixture_nll": torch_mixture_nll, "grouped_heads": torch_heads}
    # Every case is compiled with and without gradients, more often than torch allows by default.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(ROWS))
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    return {
        "fusewright": {"mixture_nll": mixture_nll, "grouped_heads": grouped_heads},
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
        "distributions": {"mixture_nll": distributions_mixture_nll},
        "compile-loop": {"grouped_heads": compiled(looped_heads)},
    }


def torch_mixture_nll(params: Tensor, y: Tensor) -> Tensor:
    """The loss as a user of plain torch writes it."""
    logits, mean, raw = params.unbind(-1)
    log_sigma = raw.clamp(-7.0, 5.0)
    z = (y[..., None] - mean) * torch.exp(-log_sigma)
    component = logits.log_softmax(-1) - 0.5 * z.square() - log_sigma - reference.HALF_LOG_2_PI
    return -component.logsumexp(-1).mean()


def distributions_mixture_nll(params: Tensor, y: Tensor) -> Tensor:
    """The loss from torch's own mixture; arguments unchecked, as a check waits for the card."""
    logits, mean, raw = params.unbind(-1)
    mixture = MixtureSameFamily(
        Categorical(logits=logits, validate_args=False),
        Normal(mean, raw.clamp(-7.0, 5.0).exp(), validate_args=False),
        validate_args=False,
    )
    return -mixture.log_prob(y).mean()


def torch_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """All heads at once: one dense product, then one batched product."""
    hidden = F.silu(F.linear(x, hidden_weight)).unflatten(-1, output_weight.shape[:2])
    return torch.einsum("lgs,gsp->lgp", hidden, output_weight).float()


def looped_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """One head after the other."""
    heads = zip(hidden_weight.unflatten(0, output_weight.shape[:2]), output_weight, strict=True)
    return torch.stack([F.silu(F.linear(x, a)) @ c for a, c in heads], -2).float()


def main() -> int:
    """Print what each op and its peers take on this machine's GPU."""
    if not torch.cuda.is_available():
        print(
            "fusewright.mixture_head.bench: needs a CUDA device, and torch sees none",
            file=sys.stderr,
        )
        return 1
    # A compiled backward pass may otherwise not run twice over one forward pass.
    torch._functorch.config.donated_buffer = False
    rivals = providers()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}. Microseconds of one call in a"
    )
    print(
        "CUDA graph, its inputs in the L2 cache where they fit; the forward pass for no gradient."
    )
    print(f"{'':13}{'rows':>8}         ", *(f"{name:>13}" for name in rivals))
    for case in cases():
        times = [microseconds(name, ops.get(case.op), case) for name, ops in rivals.items()]
        for direction in ("fwd", "fwd+bwd"):
            told = (f"{t[direction]:13.1f}" if t else f"{'-':>13}" for t in times)
            print(f"{case.op:13}{case.sizes['L']:>8} {direction:8}", *told, flush=True)
    return 0


def microseconds(provider: str, op: Op | None, case: Case) -> dict[str, float]:
    """Medians of the forward pass and of both passes; nothing where a peer has no such op or cannot
    run it here.
    """
    from triton.testing import do_bench_cudagraph

    if op is None:
        return {}
    leaves = [x.requires_grad_() for x in case.inputs("cuda")]

    def forward() -> Tensor:
        with torch.no_grad():
            return op(*leaves)

    def both() -> tuple[Tensor, ...]:
        y = op(*leaves)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    try:
        calls = {"fwd": forward, "fwd+bwd": both}
        found = {
            name: do_bench_cudagraph(call, return_mode="median") for name, call in calls.items()
        }
    except Exception as error:
        if provider == "fusewright":
            raise
        print(f"{provider} did not run {case.op}: {type(error).__name__}", file=sys.stderr)
        return {}
    return {name: 1e3 * time for name, time in found.items()}


if __name__ == "__main__":
    sys.exit(main())
