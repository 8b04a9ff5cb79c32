"""What TitanMAC computes: the formulas in plain torch, the loss, dtypes, compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright_models.models.titan_mac import TITAN_MAC, VARIANTS, TitanMAC, TitanMACConfig
from fusewright_models.models.titan_mac.layers import AttentionLayer, Block, MemoryLayer
from torch import Tensor


def plain_hidden(model: TitanMAC, tokens: Tensor) -> Tensor:
    """The formulas token by token, with masks, in plain torch around the memory's own layer."""
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x = plain_block(block, model.config, x)
    return plain_norm(model.final_norm, x)


def plain_norm(norm: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def plain_block(block: Block, config: TitanMACConfig, x: Tensor) -> Tensor:
    *norms, last_norm = block.norms
    for norm, layer in zip(norms, block.layers, strict=True):
        n = plain_norm(norm, x)
        if isinstance(layer, MemoryLayer):
            x = x + layer.memory(n)[0]
        elif config.variant == "mal":
            x = x + plain_attention(layer, config, n) @ layer.output.weight.T
        else:
            x = x + plain_gated(layer, config, n) @ layer.output.weight.T
    n = plain_norm(last_norm, x)
    gate, up = (n @ block.feed_forward.joint.weight.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ block.feed_forward.output.weight.T


def plain_gated(layer: AttentionLayer, config: TitanMACConfig, n: Tensor) -> Tensor:
    """Of "mac" and "mag"."""
    if config.variant == "mac":
        y, read = plain_segments(layer, config, n)
    else:
        y = plain_attention(layer, config, n)
        read = layer.memory(n)[0] if config.memory else None
    if read is None:
        return y
    gate = layer.gate
    if config.gate == "sigmoid":
        return y * torch.sigmoid(read @ gate.linear.weight.T + gate.linear.bias)
    return plain_norm(gate.output_norm, y) * F.silu(plain_norm(gate.memory_norm, read))


def plain_segments(
    layer: AttentionLayer, config: TitanMACConfig, n: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Attention of each segment to [p | h | n], h first, and what the memory reads."""
    memory, size = layer.memory, config.segment
    state = None if memory is None else memory.init_state(len(n))
    mixed, read = [], []
    for start in range(0, n.shape[1], size):
        part = n[:, start : start + size]
        h = None if memory is None else memory.retrieve(part, state, before=n[:, :start])
        y = plain_attention(layer, config, part, h)
        if h is not None:
            y = h + y
        mixed.append(y)
        # The memory learns one token after the other.
        for token in (y + part).split(1, 1) if memory is not None else ():
            r, state, _ = memory(token, state)
            read.append(r)
    return torch.cat(mixed, 1), torch.cat(read, 1) if read else None


def plain_attention(
    layer: AttentionLayer, config: TitanMACConfig, n: Tensor, h: Tensor | None = None
) -> Tensor:
    attention, positions = layer.attention, torch.arange(n.shape[1])
    w_q, (w_k, w_v) = attention.query.weight, attention.key_value.weight.chunk(2)

    def spread(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (config.heads, -1)).transpose(1, 2)

    def rotated(rows: Tensor) -> Tensor:
        return plain_rotation(spread(rows), positions, config.rope_base)

    back = positions.unsqueeze(-1) - positions
    seen = (back >= 0) & (back < config.segment)
    keys, values, masks = [rotated(n @ w_k.T)], [spread(n @ w_v.T)], [seen]
    if h is not None:
        keys, values = [rotated(h @ w_k.T), *keys], [spread(h @ w_v.T), *values]
        masks = [seen, *masks]
    if attention.persistent is not None:
        p = attention.persistent.expand(len(n), -1, -1)
        keys, values = [spread(p @ w_k.T), *keys], [spread(p @ w_v.T), *values]
        masks = [seen.new_ones(len(seen), config.persistent), *masks]
    k, v, mask = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)
    scores = rotated(n @ w_q.T) @ k.mT * (config.dim / config.heads) ** -0.5
    o = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return o.transpose(1, 2).flatten(-2)


def plain_rotation(rows: Tensor, positions: Tensor, base: float) -> Tensor:
    """Pairs of columns i and i + D / 2 as complex numbers, rotated by position / base^(2 i / D)."""
    half = rows.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * base ** -(torch.arange(half).double() / half)
    rotated = torch.complex(*rows.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def test_model_equals_plain_model(titan_mac, draw_tokens, assert_same_but_for_rounding, kind):
    model = titan_mac(kind, dtype=torch.float64)
    tokens = draw_tokens(2)
    results = []
    for hidden in (model(tokens)[0], plain_hidden(model, tokens)):
        weight = torch.linspace(-1.0, 1.0, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)
        results.append((hidden, torch.autograd.grad((weight * hidden).sum(), model.parameters())))
    (hidden, gradients), (plain, plain_gradients) = results
    assert_same_but_for_rounding([hidden], [plain])
    assert_same_but_for_rounding(gradients, plain_gradients)


# Granularity, chunk, reduction, clip, forgetting, norm; theta, normalisation of keys, taps.
MEMORY_RULES = {
    "normed": ("token", 4, "sum", None, "initial", True, None, "l2", 4),
    "paper": ("token", 4, "sum", None, "zero", False, None, "l2", 4),
    "origin": ("chunk", 8, "mean_all", 1.0, "zero", False, 0.01, None, 0),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MEMORY_RULES)
def test_memory_rule_decides_the_memory_of_every_block(titan_mac, name, variant):
    """Segments of 8 tokens, chunks of 4."""
    for block in titan_mac(variant, memory_rule=name).blocks:
        memory = block.layers[0].memory
        rules, projections = memory.rules, memory.projections
        taps = 0 if projections.taps is None else projections.taps.shape[1]
        assert MEMORY_RULES[name] == (
            *(rules.granularity, rules.chunk, rules.reduction, rules.max_grad_norm),
            *(rules.forget, rules.residual_norm),
            *(memory.gates.constant_theta, projections.key_norm, taps),
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_of_every_block_has_the_layers_asked_for(titan_mac, variant):
    for block in titan_mac(variant, memory_layers=3).blocks:
        memory = block.layers[0].memory
        assert memory.rules.layers == 3
        assert len(memory.rest()) == 6


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(
    titan_mac, draw_tokens, assert_same_but_for_rounding
):
    model = titan_mac("mac", dtype=torch.float64)
    tokens = draw_tokens(2, 23)
    hidden, _ = model(tokens[:, :-1])
    logits = model.logits(hidden)
    assert logits.shape == (2, 22, model.config.vocab_size)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert_same_but_for_rounding([model.loss(tokens)], [expected])

    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert_same_but_for_rounding([model.loss(tokens, targets=targets)], [expected])

    _, state = model(tokens[:, :9])
    later = model.loss(tokens[:, 9:], state)
    expected = F.cross_entropy(logits[:, 9:].flatten(0, 1), tokens[:, 10:].flatten())
    assert_same_but_for_rounding([later], [expected])


def test_loss_of_no_targets_is_nan(titan_mac, draw_tokens):
    model = titan_mac("mac")
    assert model.loss(draw_tokens(2, 1)).isnan()
    assert model.loss(draw_tokens(0, 4)).isnan()


@pytest.mark.parametrize("kind", VARIANTS)
def test_autocast_keeps_stream_in_bf16_and_loss_in_fp32(titan_mac, draw_tokens, kind):
    model = titan_mac(kind)
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: streams.append(output[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, _ = model(draw_tokens(2))
        loss = model.loss(draw_tokens(2))
    loss.backward()
    assert {x.dtype for x in [hidden, *streams]} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("tiny", 183_884), ("l4", 21_332_250), ("profile", 52_968_080), ("170m", 168_460_536)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_presets_have_the_parameters_that_the_readme_tells(preset, parameters):
    with torch.device("meta"):
        model = TitanMAC(TITAN_MAC[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [
        # One graph; what is in it the packages' own tests compile further.
        ("mac", "eager"),
        *(pytest.param(kind, "aot_eager", marks=pytest.mark.slow) for kind in VARIANTS),
        *(pytest.param(kind, "inductor", marks=pytest.mark.slow) for kind in VARIANTS),
    ],
)
def test_compiled_block_equals_eager_block(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind, compiler
):
    model = titan_mac(kind, dtype=torch.float64, layers=1, segment=4)
    tokens = draw_tokens(2, 9)
    expected = model.loss(tokens)
    gradients = torch.autograd.grad(expected, model.parameters())
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=compiler)
    loss = model.loss(tokens)
    assert_same_but_for_rounding([loss], [expected])
    assert_same_but_for_rounding(torch.autograd.grad(loss, model.parameters()), gradients)
