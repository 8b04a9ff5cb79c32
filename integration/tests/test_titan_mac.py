from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fusewright_models.titan_mac import TITAN_MAC, TitanMAC, TitanMACState
from fusewright_models.titan_mac_config import TitanMACConfig
from fusewright_models.titan_mac_layers import AttentionLayer, Block, MemoryLayer
from torch import Tensor
from torch.utils import _pytree as pytree

SMALL = TitanMACConfig(
    vocab_size=11,
    dim=16,
    layers=2,
    heads=2,
    segment=8,
    persistent=2,
    memory_chunk=4,
    memory_heads=2,
    memory_hidden=8,
)
KINDS = {
    "mac": {},
    "mag": {"variant": "mag"},
    "mal": {"variant": "mal"},
    "lmm": {"variant": "lmm"},
    "mac-normalized": {"gate": "normalized"},
    "mag-normalized": {"variant": "mag", "gate": "normalized"},
    "mac-origin": {"memory_rule": "origin"},
    "mag-origin": {"variant": "mag", "memory_rule": "origin"},
    "mac-off": {"memory": False},
    "mag-off": {"variant": "mag", "memory": False},
    "mal-off": {"variant": "mal", "memory": False},
    "lmm-off": {"variant": "lmm", "memory": False},
    "mac-bare": {"persistent": 0, "convolution": 0},
    "mag-bare": {"variant": "mag", "persistent": 0, "convolution": 0},
}
VARIANTS = ("mac", "mag", "mal", "lmm")
# Two segments and a ragged third, of a chunk and a half.
LENGTH = 22
# Sums of a few hundred fp64 products, forward and backward.
CLOSE = 1e-9

# The gates hold at every size; the presets' take a card.
every_size = pytest.mark.parametrize(
    ("preset", "kind"),
    [
        *(("small", kind) for kind in KINDS),
        *(
            pytest.param(preset, kind, marks=pytest.mark.gpu)
            for preset in TITAN_MAC
            for kind in VARIANTS
            if preset != "tiny"
        ),
    ],
)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_variant = pytest.mark.parametrize("kind", VARIANTS)


def make(kind: str, *, dtype=torch.float32, backend: str = "reference", **changes) -> TitanMAC:
    """A small model of that kind, fields of its config changed by name."""
    torch.manual_seed(1)
    config = replace(SMALL, **(KINDS[kind] | changes))
    return TitanMAC(config, backend=backend).to(dtype)


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, length))


class Sized(NamedTuple):
    """A model of one size, and what its gates are asked at.

    Attributes:
        model: small on the CPU in fp32, that of a preset on the card under bf16 autocast.
        tokens: of three rows.
        changes: tokens that are changed one by one, the borders of chunks and segments among them.
    """

    model: TitanMAC
    tokens: Tensor
    changes: Iterable[int]

    @classmethod
    def of(cls, preset: str, kind: str) -> Sized:
        if preset == "small":
            return cls(make(kind), draw(3, LENGTH), range(LENGTH))
        config = replace(TITAN_MAC[preset], **KINDS[kind])
        tokens = torch.randint(config.vocab_size, (3, 1100), device="cuda")
        return cls(TitanMAC(config).cuda(), tokens, (0, 63, 64, 511, 512, 700, 1099))

    def changed(self, index: tuple) -> Tensor:
        tokens = self.tokens.clone()
        tokens[index] = (tokens[index] + 1) % self.model.config.vocab_size
        return tokens

    def computing(self) -> torch.autocast:
        device = self.tokens.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        with self.computing():
            return self.model(tokens)[0]


def read_in_pieces(model: TitanMAC, tokens: Tensor, ends: list[int]) -> Tensor:
    state, found, start = None, [], 0
    for end in ends:
        hidden, state = model(tokens[:, start:end], state)
        found.append(hidden)
        start = end
    return torch.cat(found, 1)


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
        mixed.append(y)
        # The memory learns one token after the other.
        for token in y.split(1, 1) if memory is not None else ():
            r, state, _ = memory(token, state)
            read.append(r)
    return torch.cat(mixed, 1), torch.cat(read, 1) if read else None


def plain_attention(
    layer: AttentionLayer, config: TitanMACConfig, n: Tensor, h: Tensor | None = None
) -> Tensor:
    attention, positions = layer.attention, torch.arange(n.shape[1])
    w_q, w_k, w_v = attention.query_key_value.weight.chunk(3)

    def spread(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (config.heads, -1)).transpose(1, 2)

    def turned(rows: Tensor) -> Tensor:
        return plain_rotation(spread(rows), positions, config.rope_base)

    back = positions.unsqueeze(-1) - positions
    seen = (back >= 0) & (back < config.segment)
    keys, values, masks = [turned(n @ w_k.T)], [spread(n @ w_v.T)], [seen]
    if h is not None:
        keys, values = [turned(h @ w_k.T), *keys], [spread(h @ w_v.T), *values]
        masks = [seen, *masks]
    if attention.persistent is not None:
        p = attention.persistent.expand(len(n), -1, -1)
        keys, values = [spread(p @ w_k.T), *keys], [spread(p @ w_v.T), *values]
        masks = [seen.new_ones(len(seen), config.persistent), *masks]
    k, v, mask = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1)
    scores = turned(n @ w_q.T) @ k.mT * (config.dim / config.heads) ** -0.5
    o = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return o.transpose(1, 2).flatten(-2)


def plain_rotation(rows: Tensor, positions: Tensor, base: float) -> Tensor:
    """Pairs of columns i and i + D / 2 as complex numbers, turned by position / base^(2 i / D)."""
    half = rows.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * base ** -(torch.arange(half).double() / half)
    turned = torch.complex(*rows.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


@every_kind
def test_model_equals_plain_model(kind):
    model = make(kind, dtype=torch.float64)
    tokens = draw(2, LENGTH)
    results = []
    for hidden in (model(tokens)[0], plain_hidden(model, tokens)):
        weight = torch.linspace(-1.0, 1.0, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)
        results.append((hidden, torch.autograd.grad((weight * hidden).sum(), model.parameters())))
    (hidden, gradients), (plain, plain_gradients) = results
    assert (hidden - plain).abs().max() < CLOSE
    largest = max(gradient.abs().max() for gradient in plain_gradients)
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        assert (gradient - expected).abs().max() < CLOSE * largest


@every_kind
@pytest.mark.parametrize(
    "ends",
    [list(range(1, LENGTH + 1)), [3, 8, 9, 19, 19, LENGTH], [16, LENGTH]],
    ids=["token-by-token", "anywhere", "at-segments"],
)
def test_pieces_of_a_sequence_equal_the_whole(kind, ends):
    model = make(kind, dtype=torch.float64)
    tokens = draw(2, LENGTH)
    whole, pieces = model(tokens)[0], read_in_pieces(model, tokens, ends)
    assert (whole - pieces).abs().max() < CLOSE
    gradients, others = (
        torch.autograd.grad(hidden.square()[..., :3].sum(), model.parameters())
        for hidden in (whole, pieces)
    )
    largest = max(gradient.abs().max() for gradient in gradients)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).abs().max() < CLOSE * largest


@every_size
def test_future_token_changes_no_past_output(preset, kind):
    sized = Sized.of(preset, kind)
    before = sized.read(sized.tokens)
    for t in sized.changes:
        after = sized.read(sized.changed((slice(None), t)))
        assert torch.equal(before[:, :t], after[:, :t])
        assert (before[:, t] != after[:, t]).any()


@every_size
def test_every_parameter_gets_a_gradient_within_three_steps(preset, kind):
    sized = Sized.of(preset, kind)
    optimizer = torch.optim.AdamW(sized.model.parameters(), lr=1e-3)
    seen = {name: False for name, _ in sized.model.named_parameters()}
    for _ in range(3):
        with sized.computing():
            loss = sized.model.loss(sized.tokens)
        loss.backward()
        for name, parameter in sized.model.named_parameters():
            seen[name] |= parameter.grad is not None and bool((parameter.grad != 0).any())
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, reached in seen.items() if not reached] == []


@every_size
def test_rows_of_a_batch_are_independent(preset, kind):
    sized = Sized.of(preset, kind)
    before, after = sized.read(sized.tokens), sized.read(sized.changed((1,)))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert (before[1] != after[1]).any()


@pytest.mark.parametrize("kind", [*VARIANTS, "mac-off", "mag-off"])
def test_memory_alone_reaches_past_the_attention(kind):
    model = make(kind, layers=1, convolution=0)
    tokens = draw(1, LENGTH)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % SMALL.vocab_size
    moved = (model(tokens)[0] != model(changed)[0]).any(-1)[0, SMALL.segment :]
    assert bool(moved.all()) == bool(moved.any()) == (not kind.endswith("off"))


@every_variant
@pytest.mark.parametrize("outer_grad", ["full", "detach_state"])
def test_checkpointing_changes_no_gradient(kind, outer_grad):
    tokens = draw(2, LENGTH + 1)
    found = []
    for checkpointing in (False, True):
        model = make(kind, checkpointing=checkpointing, outer_grad=outer_grad)
        loss = model.loss(tokens)
        found.append([loss.detach(), *torch.autograd.grad(loss, model.parameters())])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


def test_checkpointing_keeps_less_for_the_backward_pass():
    kept = []
    for checkpointing in (False, True):
        saved: list[int] = []
        model = make("mac", checkpointing=checkpointing)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: (saved.append(x.numel()), x)[1], lambda x: x
        )
        with hooks:
            model.loss(draw(2, LENGTH))
        kept.append(sum(saved))
    assert kept[1] < kept[0] / 4


@pytest.mark.parametrize("outer_grad", ["detach_state", "none"])
def test_gradient_through_the_memory_ends_where_asked(outer_grad):
    gradients = []
    for chosen in ("full", outer_grad):
        model = make("mac", outer_grad=chosen)
        model.loss(draw(2, LENGTH)).backward()
        gradients.append(model.blocks[0].layers[0].memory.projections.joint.weight.grad)
    full, cut = gradients
    assert (full != cut).any()


def test_detached_state_ends_the_gradient():
    model = make("mac")
    tokens = draw(2, LENGTH)
    _, state = model(tokens[:, :10])
    tensors = [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]
    assert any(x.requires_grad for x in tensors)
    detached = model.detach_state(state)
    assert isinstance(detached, TitanMACState)
    assert detached.position == 10
    assert not any(x.requires_grad for x in pytree.tree_leaves(detached) if isinstance(x, Tensor))
    assert torch.equal(model(tokens[:, 10:], state)[0], model(tokens[:, 10:], detached)[0])


@every_kind
def test_state_is_tensors_and_one_host_number(kind):
    model = make(kind)
    _, state = model(draw(2, 13))
    numbers = [leaf for leaf in pytree.tree_leaves(state) if not isinstance(leaf, Tensor)]
    assert [number for number in numbers if number is not None] == [13]


@pytest.mark.parametrize("kind", ["mag", "mal", "mac"])
def test_state_holds_no_more_than_a_window(kind):
    model = make(kind)
    _, state = model(draw(2, 3 * SMALL.segment - 1))
    for *_, layer in state.blocks:
        for rows in (layer.k, layer.v):
            assert rows.shape[1] == (2 if kind == "mac" else 1) * (SMALL.segment - 1)
            if kind != "mac":
                assert rows.untyped_storage().nbytes() == rows.nbytes


@every_kind
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0), (2, 1), (1, 3)], ids=str)
def test_short_and_empty_sequences_are_read(kind, shape):
    model = make(kind)
    hidden, state = model(draw(*shape))
    assert hidden.shape == (*shape, SMALL.dim)
    assert state.position == shape[1]
    hidden, state = model(draw(shape[0], 3), state)
    assert hidden.shape == (shape[0], 3, SMALL.dim)
    assert hidden.isfinite().all()


def test_piece_of_no_tokens_leaves_the_state():
    model = make("mac")
    tokens = draw(2, 9)
    _, state = model(tokens)
    _, same = model(tokens[:, :0], state)
    for old, new in zip(pytree.tree_leaves(state), pytree.tree_leaves(same), strict=True):
        assert old is new or old == new


@pytest.mark.parametrize("kind", ["mac", "mag", "mal", "lmm"])
def test_state_that_is_not_finite_stays_in_its_row(kind):
    model = make(kind)
    tokens = draw(3, LENGTH)
    _, state = model(tokens[:, :5])
    expected, _ = model(tokens[:, 5:], state)

    def spoiled(x):
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        x = x.detach().clone()
        x[1] = torch.nan
        return x

    found, after = model(tokens[:, 5:], pytree.tree_map(spoiled, state))
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().any()
    assert isinstance(after, TitanMACState)


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    model = make("mac", dtype=torch.float64)
    tokens = draw(2, LENGTH + 1)
    hidden, _ = model(tokens[:, :-1])
    logits = model.logits(hidden)
    assert logits.shape == (2, LENGTH, SMALL.vocab_size)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(model.loss(tokens) - expected) < CLOSE

    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert abs(model.loss(tokens, targets=targets) - expected) < CLOSE

    _, state = model(tokens[:, :9])
    later = model.loss(tokens[:, 9:], state)
    expected = F.cross_entropy(logits[:, 9:].flatten(0, 1), tokens[:, 10:].flatten())
    assert abs(later - expected) < CLOSE


def test_loss_of_no_targets_is_nan():
    model = make("mac")
    assert model.loss(draw(2, 1)).isnan()
    assert model.loss(draw(0, 4)).isnan()


def test_tokens_may_be_int32():
    model = make("mac")
    tokens = draw(2, 9)
    assert torch.equal(model(tokens)[0], model(tokens.int())[0])
    assert torch.equal(model.loss(tokens), model.loss(tokens.int()))


@every_variant
def test_autocast_keeps_stream_in_bf16_and_loss_in_fp32(kind):
    model = make(kind)
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: streams.append(output[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, _ = model(draw(2, LENGTH))
        loss = model.loss(draw(2, LENGTH))
    loss.backward()
    assert {x.dtype for x in [hidden, *streams]} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@every_variant
def test_model_on_meta_says_what_comes_out(kind):
    model = make(kind).to("meta")
    hidden, state = model(draw(2, LENGTH).to("meta"))
    assert hidden.shape == (2, LENGTH, SMALL.dim)
    assert state.position == LENGTH


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
        ("mac", "aot_eager"),
        *(pytest.param(kind, "aot_eager", marks=pytest.mark.slow) for kind in VARIANTS[1:]),
        *(pytest.param(kind, "inductor", marks=pytest.mark.slow) for kind in VARIANTS),
    ],
)
def test_compiled_block_equals_eager_block(kind, compiler):
    model = make(kind, dtype=torch.float64, layers=1, segment=4)
    tokens = draw(2, 9)
    expected = model.loss(tokens)
    gradients = torch.autograd.grad(expected, model.parameters())
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=compiler)
    loss = model.loss(tokens)
    assert abs(loss - expected) < CLOSE
    for gradient, other in zip(
        gradients, torch.autograd.grad(loss, model.parameters()), strict=True
    ):
        assert (gradient - other).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be at least 1; got 0"),
        ("layers", 0, "layers must be at least 1; got 0"),
        ("segment", 0, "segment must be at least 1; got 0"),
        ("persistent", -1, "persistent must be at least 0; got -1"),
        ("convolution", -1, "convolution must be at least 0; got -1"),
        ("heads", 3, "dim must be divisible by heads; got dim 16, heads 3"),
        ("heads", 4, "dim must be heads times a width that the attention takes; got dim 16"),
        ("memory_heads", 3, "dim must be divisible by memory_heads; got dim 16, memory_heads 3"),
        ("memory_chunk", 3, "segment must be divisible by memory_chunk in variant 'mac'"),
        ("variant", "mad", "variant must be one of .*got 'mad'"),
        ("gate", "origin", "gate must be one of .*got 'origin'"),
        ("memory_rule", "mean", "memory_rule must be one of .*got 'mean'"),
        ("outer_grad", "half", "outer_grad must be one of .*got 'half'"),
        ("rope_base", 1.0, "rope_base must be above 1 and finite; got 1.0"),
        ("rope_base", float("inf"), "rope_base must be above 1 and finite; got inf"),
    ],
)
def test_wrong_configs_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("dim", 16.0, "an int"),
        ("layers", True, "an int"),
        ("feed_forward_width", "64", "an int"),
        ("memory", 1, "True or False"),
        ("checkpointing", None, "True or False"),
        ("rope_base", "big", "a number"),
    ],
)
def test_configs_of_wrong_types_are_refused(field, value, wanted):
    with pytest.raises(TypeError, match=f"{field} must be {wanted}; got {value!r}"):
        replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda t: t.tolist(), TypeError, "wanted tokens as a tensor; got list"),
        (lambda t: t.float(), TypeError, "wanted tokens in int64 or int32; got torch.float32"),
        (lambda t: t[0], ValueError, r"wanted tokens \[B, T\]; got \[5\]"),
        (lambda t: t.to("meta"), ValueError, "wanted tokens on the model's device, cpu; got them"),
    ],
    ids=["list", "float", "one-axis", "meta"],
)
@pytest.mark.parametrize("ask", ["__call__", "loss"])
def test_wrong_tokens_are_refused_before_anything_is_computed(ask, spoil, error, message):
    model = make("mac")
    model.embedding.register_forward_hook(lambda *_: pytest.fail("something was computed"))
    with pytest.raises(error, match=message):
        getattr(model, ask)(spoil(draw(2, 5)))


def test_wrong_states_are_refused():
    model = make("mac")
    tokens = draw(2, 5)
    _, state = model(tokens)
    with pytest.raises(TypeError, match="wanted the state of a TitanMAC; got tuple"):
        model(tokens, tuple(state))
    with pytest.raises(ValueError, match="wanted the state of 2 rows, as of tokens; got one of 3"):
        model(tokens, model.init_state(3))
    with pytest.raises(ValueError, match="wanted the state of 2 blocks; got one of 1"):
        model(tokens, make("mac", layers=1).init_state(2))
    with pytest.raises(ValueError, match=r"wanted tokens \[B, T \+ 1\], at least one; got \[2, 0"):
        model.loss(tokens[:, :0])


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        make("mac", backend="cuda")
