"""What is timed and against whom: ``python -m fusewright_testkit.bench deltanet``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.deltanet import GatedDeltaNet, gated_delta_rule, gated_delta_rule_step
from fusewright.deltanet.rule import reference
from fusewright.deltanet.rule.fla import fla_rule, refuses_backward
from fusewright_testkit import Case
from fusewright_testkit.cases import Layer, by_pass, installed
from torch import nn

Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, ...]]

# Rows, tokens, heads, columns of keys and of values.
RULES = (
    dict(B=4, T=4096, H=8, D=128),
    dict(B=1, T=16384, H=16, D=128),
    dict(B=8, T=2048, H=16, D=64),
    dict(B=4, T=4096, H=4, D=256),
)
# Rows that are decoded, a token at a time.
STEPS = (dict(B=64, H=8, D=128),)
LAYER = dict(B=4, T=4096, dim=1024, H=8, D=128)
# What has tokens is checked at fewer: all chunks of the whole in fp64 would take minutes.
CHECKED = dict(B=1, T=300)
DTYPE = torch.bfloat16


class ForwardOnly:
    """An op without a backward pass, or with one that it refuses here."""

    forward_only = True

    def __init__(self, op: Op):
        self.op = op

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.op(*tensors)


def cases() -> list[Case]:
    """The rule at sizes of models, the step of a batch that is decoded, and the layer, in bf16."""
    return [*map(rule_case, RULES), *map(step_case, STEPS), layer_case()]


def rule_costs(sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes and operations of a forward pass. The backward pass also reads the gradient of o and
    writes those of q, k, v and both gates.
    """
    tokens, heads, width = sizes["B"] * sizes["T"], sizes["H"], sizes["D"]
    moved = tokens * (2 * 4 * heads * width + 2 * 4 * heads)
    # Of each head and token: within a chunk, and with the state.
    products = reference.CHUNK * 5 * width + reference.CHUNK**2 // 3 + 3 * width**2
    return moved, 2 * tokens * heads * products


def rule_case(sizes: dict[str, int]) -> Case:
    moved, flops = rule_costs(sizes)
    return Case(
        op="gated_delta_rule",
        sizes=sizes,
        dtype=DTYPE,
        reference=chunked_rule,
        inputs=functools.partial(rule_inputs, sizes),
        bytes_moved=by_pass(moved),
        flops=by_pass(flops),
        sample=functools.partial(rule_inputs, sizes | CHECKED),
        forward_wall=True,
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
        bytes_moved=by_pass(2 * state),
        forward_wall=True,
    )


def layer_case() -> Case:
    moved, flops = rule_costs(LAYER)
    # x is read and y written; q, k, v, the gate and y are products with square matrices.
    rows, width = LAYER["B"] * LAYER["T"], LAYER["dim"]
    return Case(
        op="GatedDeltaNet",
        sizes=LAYER,
        dtype=DTYPE,
        reference=reference_layer,
        inputs=functools.partial(layer_inputs, LAYER),
        bytes_moved=by_pass(moved + 2 * 2 * rows * width),
        flops=by_pass(flops + 2 * 5 * rows * width**2),
        sample=functools.partial(layer_inputs, LAYER | CHECKED),
        forward_wall=True,
    )


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
    return (reference.gated_delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5)[0],)


def reference_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.gated_delta_rule_step(q, k, v, g, beta, state, q.shape[-1] ** -0.5)


def rule_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """q and k of length 1, v, decays of a trained layer's size, rates."""
    return drawn((sizes["B"], sizes["T"]), sizes, device)


def step_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    state = (sizes["B"], sizes["H"], sizes["D"], sizes["D"])
    return [*drawn((sizes["B"],), sizes, device), torch.randn(state, device=device)]


def drawn(lead: tuple[int, ...], sizes: dict[str, int], device: str) -> list[Tensor]:
    heads, width = sizes["H"], sizes["D"]
    q, k, v = (torch.randn(*lead, heads, width, device=device) for _ in range(3))
    g = F.logsigmoid(torch.randn(*lead, heads, device=device) + 3.0)
    beta = torch.rand(*lead, heads, device=device)
    rows = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
    return [*(x.to(DTYPE) for x in rows), g, beta]


def layer_inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """x of unit size and fresh parameters, of decays in fp32."""
    x = torch.randn(sizes["B"], sizes["T"], sizes["dim"], device=device).to(DTYPE)
    return [x, *reference_layer.parameters(device)]


def our_layer(backend: Any, device: str) -> nn.Module:
    sizes = LAYER["dim"], 1.0, LAYER["D"], LAYER["H"]
    return GatedDeltaNet(*sizes, backend=backend, device=device, dtype=DTYPE)


reference_layer: Layer = Layer(functools.partial(our_layer, "reference"))


def our_rule(*tensors: Tensor) -> tuple[Tensor, ...]:
    return (gated_delta_rule(*tensors, backend="triton").o,)


def our_step(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(gated_delta_rule_step(*tensors, backend="triton"))  # type: ignore[arg-type]


def providers() -> dict[str, dict[str, Op]]:
    """Ours, plain torch, the step compiled, and fla where it is installed."""
    return {
        "fusewright": {
            "gated_delta_rule": our_rule,
            "gated_delta_rule_step": our_step,
            "GatedDeltaNet": Layer(functools.partial(our_layer, "triton")),
        },
        "torch": {
            "gated_delta_rule": chunked_rule,
            "gated_delta_rule_step": reference_step,
            "GatedDeltaNet": reference_layer,
        },
        # The loop over chunks would be unrolled, which takes a compiler minutes.
        "compile": {"gated_delta_rule_step": torch.compile(reference_step, fullgraph=True)},
        **installed(("fla", "fla-core", fla)),
    }


def fla() -> dict[str, Op]:
    """fla-core's functions and, where flash-linear-attention is installed too, its layer; their
    forward passes alone where fla refuses its backward pass. Raises ImportError without fla-core.
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
        return (fla_rule(q, k, v, g, beta, None, None, q.shape[-1] ** -0.5)[0],)

    def step(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.unsqueeze(1) for x in tensors[:5])
        o, end = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=tensors[5], output_final_state=True
        )
        return o.squeeze(1), end

    ops: dict[str, Op] = {"gated_delta_rule": rule}
    with contextlib.suppress(ImportError):
        from fla.layers import GatedDeltaNet as PeerLayer

        def make(device: str) -> nn.Module:
            sizes = dict(expand_v=1.0, head_dim=LAYER["D"], num_heads=LAYER["H"])
            return PeerLayer(LAYER["dim"], **sizes).to(device)

        ops["GatedDeltaNet"] = Layer(make)
    if torch.cuda.is_available() and refuses_backward(torch.device("cuda")):
        ops = {name: ForwardOnly(op) for name, op in ops.items()}
    return ops | {"gated_delta_rule_step": ForwardOnly(step)}
