"""What is timed and against whom: ``python -m fusewright_testkit.bench memory-mlp``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.memory_mlp import MemoryWeights, NeuralMemory, memory_scan, memory_update
from fusewright.memory_mlp.common.deep_weights import deep_shapes, deep_size
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan
from fusewright.memory_mlp.update import reference
from fusewright_testkit import Case
from fusewright_testkit.cases import Layer, by_pass, compiled, installed
from torch import nn

# What the names in cases count, in the picture.
WORDS = {"N": "{} rows", "D": "width {}", "H": "{} hidden units", "C": "chunks of {}"}
Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, ...]]

# Rows, width and hidden units of the pooled update.
UPDATES = ((2048, 512, 512), (512, 320, 1280), (8192, 1024, 1024))
MAX_GRAD_NORM = 1.0
# As many are checked at once, so that the largest error of their losses does not depend on luck.
CHECKED_MEMORIES = (16,)
UPDATE_OPTIONS: dict[str, Any] = dict(reduction="mean_all", max_grad_norm=MAX_GRAD_NORM)
# Rows, tokens, heads, width of a head and tokens of a chunk, and the hidden units.
SCAN = dict(B=4, T=4096, heads=5, D=64)
# What the scan and the layer are checked at: all chunks of the whole in fp64 would take minutes.
CHECKED = SCAN | dict(B=1, T=500)
CHUNK = 64
HIDDEN = (128, 256)
# Layers of a memory beside two.
DEEPER = (3, 4)
# A peer whose memory has 4 hidden units for each column.
MODULE_HIDDEN = 256


def cases() -> list[Case]:
    """The pooled update at every size, in bf16 and in TF32; the scan in bf16, of deeper memories
    too; the layer in bf16, TF32 and fp32.
    """
    bf16, tf32, fp32 = (torch.bfloat16, ""), (torch.float32, "tf32"), (torch.float32, "")
    updates = [update_case(*size, *products) for products in (bf16, tf32) for size in UPDATES]
    scans = [scan_case(hidden, layers) for layers in (2, *DEEPER) for hidden in HIDDEN]
    modules = [layer_case(*products) for products in (bf16, tf32, fp32)]
    deeper = [layer_case(*bf16, layers) for layers in DEEPER]
    return [*updates, *scans, *modules, *deeper]


def update_case(rows: int, width: int, hidden: int, dtype: torch.dtype, precision: str) -> Case:
    pairs = 2 * rows * width * dtype.itemsize
    state = 2 * (2 * width * hidden + width + hidden) * 4
    # Keys, values and state in, state out; backward these, their gradients, and those of the state.
    product = 2 * rows * width * hidden
    return Case(
        op="memory_update",
        sizes=dict(N=rows, D=width, H=hidden),
        dtype=dtype,
        precision=precision,
        reference=update_reference,
        inputs=functools.partial(update_inputs, rows, width, hidden, dtype),
        sample=functools.partial(
            update_inputs, rows // 4, width, hidden, dtype, lead=CHECKED_MEMORIES
        ),
        bytes_moved=by_pass(pairs + 2 * state, 2 * pairs + 3 * state),
        flops=by_pass(5 * product),
        forward_wall=True,
    )


def update_inputs(
    rows: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    device: str,
    lead: tuple[int, ...] = (),
) -> list[Tensor]:
    """k, v, the memories, their momentum and the gates."""
    k, v = (torch.randn(*lead, rows, width, device=device).to(dtype) for _ in range(2))
    gates = [torch.full(lead, x, device=device) for x in (0.01, 0.9, 0.1)]
    return [k, v, *memory_inputs(lead, hidden, width, device), *gates]


def memory_inputs(
    lead: tuple[int, ...], hidden: int, width: int, device: str, layers: int = 2
) -> list[Tensor]:
    """Memories whose outputs are of the size of their inputs, and a small momentum."""
    shapes = deep_shapes(lead, layers, hidden, width)
    spreads = (0.1 if len(shape) == len(lead) + 1 else shape[-1] ** -0.5 for shape in shapes)
    memory = [s * torch.randn(n, device=device) for s, n in zip(spreads, shapes, strict=True)]
    return [*memory, *(0.01 * torch.randn_like(x) for x in memory)]


def flat_update(call: Callable, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """An update as a function of a list of tensors: W', S' and the loss."""
    weights, momentum = MemoryWeights(*others[:4]), MemoryWeights(*others[4:8])
    new_weights, new_momentum, loss, *_ = call(k, v, weights, momentum, *others[8:])
    return *new_weights, *new_momentum, loss


update_reference: Callable[..., Any] = functools.partial(
    flat_update, functools.partial(reference.memory_update, **UPDATE_OPTIONS)
)
fusewright_update: Callable[..., Any] = functools.partial(
    flat_update, functools.partial(memory_update, **UPDATE_OPTIONS)
)


def loss_of(weights: MemoryWeights, k: Tensor, v: Tensor) -> Tensor:
    """The inner loss as a user of plain torch writes it, its products in k's dtype."""
    w1, b1, w2, b2 = (w.to(k.dtype) for w in weights)
    residual = linear(F.silu(linear(k, w1, b1)), w2, b2) - v
    return residual.float().square().mean((-2, -1))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One product for each memory; what is timed has one."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    return x @ weight.mT + bias.unsqueeze(-2)


def torch_step(
    weights: MemoryWeights,
    momentum: MemoryWeights,
    gradient: Sequence[Tensor],
    loss: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Clip, momentum, forgetting; nothing where the gradient is not finite."""
    squares = [g.square().flatten(loss.ndim).sum(-1) for g in gradient]
    norm = torch.stack(squares).sum(0).sqrt()
    rate = theta * (MAX_GRAD_NORM / norm).clamp(max=1.0)
    finite = norm.isfinite()

    def over(gate: Tensor, x: Tensor) -> Tensor:
        """One number for each memory, against its tensor."""
        return gate[(..., *(None,) * (x.ndim - gate.ndim))] if gate.ndim else gate

    new_momentum = [
        over(eta, s) * s - over(rate, g) * g for s, g in zip(momentum, gradient, strict=True)
    ]
    new_weights = [over(1.0 - alpha, w) * w + s for w, s in zip(weights, new_momentum, strict=True)]

    def kept(new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
        return [torch.where(over(finite, x), y, x) for y, x in zip(new, old, strict=True)]

    return kept(new_weights, weights), kept(new_momentum, momentum), loss


def torch_update(
    k: Tensor, v: Tensor, weights: MemoryWeights, momentum: MemoryWeights, *gates: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The unfused form: autograd's gradient."""
    records = torch.is_grad_enabled()
    if not records:
        weights = weights.map(lambda w: w.detach().requires_grad_())
    with torch.enable_grad():
        loss = loss_of(weights, k, v)
        total = loss.sum() if loss.ndim else loss
        gradient = torch.autograd.grad(total, weights, create_graph=records)
    return torch_step(weights, momentum, gradient, loss, *gates)


def functional_update(
    k: Tensor, v: Tensor, weights: MemoryWeights, momentum: MemoryWeights, *gates: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The unfused form that a compiler takes whole."""

    def total(*arguments: Any) -> tuple[Tensor, Tensor]:
        loss = loss_of(*arguments)
        return loss.sum(), loss

    gradient, (_, loss) = torch.func.grad_and_value(total, has_aux=True)(weights, k, v)
    return torch_step(weights, momentum, gradient, loss, *gates)


def scan_case(hidden: int, layers: int) -> Case:
    traffic, work = scan_costs(hidden, torch.bfloat16, layers)
    depth = {} if layers == 2 else dict(layers=layers)
    return Case(
        op="memory_scan",
        sizes=SCAN | dict(hidden=hidden, C=CHUNK) | depth,
        dtype=torch.bfloat16,
        reference=scan_reference,
        inputs=functools.partial(scan_inputs, hidden, layers, SCAN),
        sample=functools.partial(scan_inputs, hidden, layers, CHECKED),
        bytes_moved=traffic,
        flops=work,
    )


def scan_costs(
    hidden: int, dtype: torch.dtype, layers: int = 2
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes and operations by pass: of rows, gates, and the states with which chunks begin; of the
    products of the chunked form, twice as many on the way back.
    """
    batch, tokens, heads, width = SCAN.values()
    rows = batch * tokens * heads * width * dtype.itemsize
    gates = 3 * batch * tokens * heads * 4
    chunks = batch * heads * -(-tokens // CHUNK)
    states = chunks * 2 * deep_size(layers, hidden, width) * 4
    product = 22 * CHUNK * width * hidden + 4 * CHUNK**2 * (width + hidden)
    product += (layers - 2) * (12 * CHUNK * hidden**2 + 4 * CHUNK**2 * hidden)
    traffic = by_pass(4 * rows + gates + states, 7 * rows + 2 * gates + states)
    return traffic, by_pass(chunks * product)


def scan_inputs(hidden: int, layers: int, sizes: dict[str, int], device: str) -> list[Tensor]:
    """Queries and keys of length 1, values, one start for each row and head, and gates with which
    no memory diverges.
    """
    batch, tokens, heads, width = sizes.values()
    draw = functools.partial(torch.randn, batch, tokens, heads, width, device=device)
    rows = [F.normalize(draw(), dim=-1), F.normalize(draw(), dim=-1), draw()]
    state = memory_inputs((batch, heads), hidden, width, device, layers)
    gates = [
        least + (most - least) * torch.rand(batch, tokens, heads, device=device)
        for least, most in ((0.0, 0.02), (0.85, 0.95), (0.0, 0.002))
    ]
    return [*(x.to(torch.bfloat16) for x in rows), *state, *gates]


def flat_scan(backend: Any, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A scan as a function of a list of tensors: y, and the memory after the last token."""
    *state, alpha, eta, theta = others
    size = len(state) // 2
    if size > 4:
        halves = tuple(state[:size]), tuple(state[size:])
        operands = q, k, v, *halves, alpha, eta, theta, None
        deep_y, *ends = deep_memory_scan(*operands, chunk=CHUNK, backend=backend)[:3]
        return deep_y, *ends[0], *ends[1]
    weights, momentum = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    options: dict[str, Any] = dict(chunk=CHUNK, backend=backend)
    done = memory_scan(q, k, v, weights, momentum, alpha, eta, theta, **options)
    return done.y, *done.weights, *done.momentum


scan_reference: Callable[..., Any] = functools.partial(flat_scan, "reference")


def layer_inputs(
    layer: Layer, sizes: dict[str, int], device: str, dtype: torch.dtype
) -> list[Tensor]:
    """x of unit size, and fresh parameters."""
    batch, tokens, heads, width = sizes.values()
    x = torch.randn(batch, tokens, heads * width, device=device)
    return [each.to(dtype) for each in (x, *layer.parameters(device))]


class PeerLayer(Layer):
    """A layer that has other parameters than ours, and so inputs of its own."""

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        return layer_inputs(self, SCAN, device, dtype)


def neural_memory(backend: Any, layers: int, device: str) -> nn.Module:
    """By the paper's rule. The peer's layer has no convolution before the heads: ours has none
    here.
    """
    _, _, heads, width = SCAN.values()
    return NeuralMemory(
        heads * width,
        heads=heads,
        hidden=MODULE_HIDDEN,
        layers=layers,
        chunk=CHUNK,
        convolution=0,
        forget="zero",
        residual_norm=False,
        backend=backend,
        device=device,
    )


def op_of(layers: int) -> str:
    """The layer's name: each depth has parameters of its own."""
    return "NeuralMemory" if layers == 2 else f"NeuralMemory of {layers} layers"


def of_depths(make: Callable[[int], Layer]) -> dict[str, Op]:
    """The layer at every depth, by name."""
    return {op_of(layers): make(layers) for layers in (2, *DEEPER)}


def own_layer(backend: Any, layers: int) -> Layer:
    return Layer(functools.partial(neural_memory, backend, layers))


reference_layers: dict[str, Any] = of_depths(functools.partial(own_layer, "reference"))


def layer_case(dtype: torch.dtype, precision: str, layers: int = 2) -> Case:
    batch, tokens, heads, width = SCAN.values()
    traffic, work = scan_costs(MODULE_HIDDEN, dtype, layers)
    reference_layer = reference_layers[op_of(layers)]
    # Queries, keys, values and the output are products of x.
    added = by_pass(4 * 2 * batch * tokens * (heads * width) ** 2)
    sizes = dict(B=batch, T=tokens, dim=heads * width, heads=heads, hidden=MODULE_HIDDEN, C=CHUNK)
    return Case(
        op=op_of(layers),
        sizes=sizes,
        dtype=dtype,
        precision=precision,
        reference=reference_layer,
        inputs=functools.partial(layer_inputs, reference_layer, SCAN, dtype=dtype),
        sample=functools.partial(layer_inputs, reference_layer, CHECKED, dtype=dtype),
        bytes_moved=traffic,
        flops={name: work[name] + added[name] for name in work},
    )


def titans_pytorch() -> dict[str, Op]:
    """Its layer of as many heads, width and hidden units. What it calls memory_model is a pattern
    that learns nothing.
    """
    import titans_pytorch

    _, _, heads, width = SCAN.values()

    def make(layers: int, device: str) -> nn.Module:
        sizes = dict(depth=layers, expansion_factor=MODULE_HIDDEN / width)
        memory = titans_pytorch.MemoryMLP(width, **sizes)
        layer = titans_pytorch.NeuralMemory(
            heads * width, chunk_size=CHUNK, heads=heads, dim_head=width, model=memory
        )
        return layer.to(device)

    def peer(layers: int) -> Layer:
        return PeerLayer(functools.partial(make, layers), leave_out=("memory_model.",))

    return of_depths(peer)


def providers() -> dict[str, dict[str, Op]]:
    """Ours, torch, torch.compile, and titans-pytorch where it is installed, by op. torch runs the
    scan in chunks of matrix products too.
    """
    return {
        "fusewright": {
            "memory_update": fusewright_update,
            "memory_scan": functools.partial(flat_scan, "auto"),
            **of_depths(functools.partial(own_layer, "auto")),
        },
        "torch": {
            "memory_update": functools.partial(flat_update, torch_update),
            "memory_scan": scan_reference,
            **reference_layers,
        },
        "compile": {"memory_update": compiled(functools.partial(flat_update, functional_update))},
        **installed(("titans-pytorch", "titans-pytorch", titans_pytorch)),
    }
