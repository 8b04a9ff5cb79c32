"""What `nox -s bench` times, and against whom; ``python -m fusewright.deltanet.bench`` prints a
short table of this machine's GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F

from . import reference
from ._fla import fla_rule
from .gated_delta_rule import gated_delta_rule
from .gated_delta_rule_step import gated_delta_rule_step

Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, ...]]

# Rows, tokens, heads of keys and of values, columns of keys and of values.
RULES = (
    dict(B=4, T=4096, H=8, D=128),
    dict(B=1, T=32768, H=16, D=128),
    dict(B=8, T=2048, H=8, D=64),
    dict(B=4, T=4096, H=4, HV=8, D=128),
    dict(B=4, T=4096, H=4, D=256),
)
STEPS = (dict(B=64, H=8, D=128),)
# What the rule is checked at: all chunks of the whole in fp64 would take minutes.
CHECKED = dict(B=1, T=300)
DTYPE = torch.bfloat16


class Case(NamedTuple):
    """One op at one size; ``sample``: inputs of the same kind at which it is checked."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Op
    inputs: Callable[[str], list[Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]
    sample: Callable[[str], list[Tensor]]


def cases() -> list[Case]:
    """The rule at sizes of models, in bf16, and the step of a batch that is decoded."""
    return [*map(rule_case, RULES), *map(step_case, STEPS)]


def rule_case(sizes: dict[str, int]) -> Case:
    tokens = sizes["B"] * sizes["T"]
    heads, width = sizes.get("HV", sizes["H"]), sizes["D"]
    moved = tokens * (2 * (2 * sizes["H"] + 2 * heads) * width + 8 * heads)
    # Of a head and token: in a chunk, and with the state.
    products = reference.CHUNK * 5 * width + reference.CHUNK**2 // 3 + 3 * width**2
    return Case(
        op="gated_delta_rule",
        sizes=sizes,
        dtype=DTYPE,
        reference=chunked_rule,
        inputs=functools.partial(rule_inputs, sizes),
        # Backward reads the gradient of o, too, and writes three gradients and two of gates.
        bytes_moved={"fwd": moved, "bwd": 2 * moved, "fwd+bwd": 3 * moved},
        flops={"fwd": 2 * tokens * heads * products},
        sample=functools.partial(rule_inputs, sizes | CHECKED),
    )


def step_case(sizes: dict[str, int]) -> Case:
    state = 4 * sizes["B"] * sizes["H"] * sizes["D"] ** 2
    inputs = functools.partial(step_inputs, sizes)
    return Case(
        op="gated_delta_rule_step",
        sizes=sizes,
        dtype=DTYPE,
        reference=reference_step,
        inputs=inputs,
        bytes_moved={"fwd": 2 * state, "bwd": 4 * state, "fwd+bwd": 6 * state},
        flops={},
        sample=inputs,
    )


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
    return (reference.gated_delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5)[0],)


def reference_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.gated_delta_rule_step(q, k, v, g, beta, state, q.shape[-1] ** -0.5)


def rule_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """q and k of length 1, v, decays of a trained layer's size, rates."""
    lead = sizes["B"], sizes["T"]
    return drawn(lead, sizes, device)


def step_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    state = (sizes["B"], sizes["H"], sizes["D"], sizes["D"])
    return [*drawn((sizes["B"],), sizes, device), torch.randn(state, device=device)]


def drawn(lead: tuple[int, ...], sizes: dict[str, int], device: str) -> list[Tensor]:
    heads, width = sizes.get("HV", sizes["H"]), sizes["D"]
    q, k = (torch.randn(*lead, sizes["H"], width, device=device) for _ in range(2))
    v = torch.randn(*lead, heads, width, device=device)
    g = F.logsigmoid(torch.randn(*lead, heads, device=device) + 3.0)
    beta = torch.rand(*lead, heads, device=device)
    rows = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
    return [*(x.to(DTYPE) for x in rows), g, beta]


def providers() -> dict[str, dict[str, Op]]:
    """Ours, the chunks in plain torch, eager and compiled, and fla where it is installed."""

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (gated_delta_rule(*tensors, backend="triton").o,)

    def our_step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gated_delta_rule_step(*tensors, backend="triton"))  # type: ignore[arg-type]

    found: dict[str, dict[str, Op]] = {
        "fusewright": {"gated_delta_rule": ours, "gated_delta_rule_step": our_step},
        "torch": {"gated_delta_rule": chunked_rule, "gated_delta_rule_step": reference_step},
        # The loop over chunks would be unrolled, which takes a compiler minutes.
        "compile": {"gated_delta_rule_step": torch.compile(reference_step, fullgraph=True)},
    }
    try:
        name, op = fla()
    except ImportError:
        return found
    return found | {name: {"gated_delta_rule": op}}


def fla() -> tuple[str, Op]:
    """fla-core's function. Its backward pass raises on Hopper with triton 3.4.0 to 3.7.0."""
    import fla.ops.gated_delta_rule  # noqa: F401

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
        return (fla_rule(q, k, v, g, beta, None, None, q.shape[-1] ** -0.5)[0],)

    return f"fla-{importlib.metadata.version('fla-core')}", rule


def main() -> int:
    """Print what each op and its peers take on this machine's GPU."""
    if not torch.cuda.is_available():
        print("the benchmark needs a CUDA device, and torch sees none", file=sys.stderr)
        return 1
    # A compiled backward pass may otherwise not run twice over one forward pass.
    torch._functorch.config.donated_buffer = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16. Microseconds of one")
    print("forward pass, and of one backward pass, with a cold L2 cache.")
    for case in cases():
        print(case.op, " ".join(f"{name}={size}" for name, size in case.sizes.items()))
        for name, ops in providers().items():
            if case.op in ops:
                times = (f"{time:10.1f}" for time in microseconds(name, ops[case.op], case))
                print(f"  {name:12}", *times, flush=True)
    return 0


def microseconds(provider: str, op: Op, case: Case) -> list[float]:
    """Medians of one forward pass and, where the provider has it here, one backward pass."""
    from triton.testing import do_bench

    leaves = [x.requires_grad_() for x in case.inputs("cuda")]
    times: list[float] = []
    try:
        with torch.no_grad():
            times.append(1e3 * do_bench(lambda: op(*leaves), return_mode="median"))
        outputs = op(*leaves)
        grads = [torch.randn_like(y) for y in outputs]
        backward = functools.partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True)
        times.append(1e3 * do_bench(backward, return_mode="median"))
    except Exception as error:
        if provider == "fusewright":
            raise
        print(f"{provider} did not run {case.op}: {type(error).__name__}", file=sys.stderr)
    return times


if __name__ == "__main__":
    sys.exit(main())
