"""What reaches what: causality, independent rows, gradients, the memory beside the attention."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.models.titan_mac import VARIANTS

from .properties import assert_every_parameter_learns, assert_nothing_sees_the_future


@pytest.mark.sampled
def test_future_token_changes_no_past_output(sized):
    vocab_size = sized.model.config.vocab_size
    assert_nothing_sees_the_future(sized.read, sized.tokens, sized.changes, vocab_size)


@pytest.mark.sampled
def test_every_parameter_gets_a_gradient_within_three_steps(sized):
    def loss():
        with sized.computing():
            return sized.model.loss(sized.tokens)

    assert_every_parameter_learns(sized.model, loss)


def test_rows_of_a_batch_are_independent(sized):
    changed = sized.tokens.clone()
    changed[1] = (changed[1] + 1) % sized.model.config.vocab_size
    before, after = sized.read(sized.tokens), sized.read(changed)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert (before[1] != after[1]).any()


@pytest.mark.parametrize("kind", [*VARIANTS, "mac-off", "mag-off"])
def test_memory_alone_reaches_past_the_attention(titan_mac, draw_tokens, kind):
    model = titan_mac(kind, layers=1, convolution=0)
    tokens = draw_tokens(1)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % model.config.vocab_size
    moved = (model(tokens)[0] != model(changed)[0]).any(-1)[0, model.config.segment :]
    assert bool(moved.all()) == bool(moved.any()) == (not kind.endswith("off"))


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("outer_grad", ["full", "detach_state"])
def test_checkpointing_changes_no_gradient(titan_mac, draw_tokens, kind, outer_grad):
    tokens = draw_tokens(2, 23)
    found = []
    for checkpointing in (False, True):
        model = titan_mac(kind, checkpointing=checkpointing, outer_grad=outer_grad)
        loss = model.loss(tokens)
        found.append([loss.detach(), *torch.autograd.grad(loss, model.parameters())])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


def test_checkpointing_keeps_less_for_the_backward_pass(titan_mac, draw_tokens):
    kept = []
    for checkpointing in (False, True):
        saved: list[int] = []
        model = titan_mac("mac", checkpointing=checkpointing)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: (saved.append(x.numel()), x)[1], lambda x: x
        )
        with hooks:
            model.loss(draw_tokens(2))
        kept.append(sum(saved))
    assert kept[1] < kept[0] / 4


def gradients(model, hidden):
    loss = hidden.square()[..., :3].sum()
    return torch.autograd.grad(loss, model.parameters())


def cut_memories(model, state):
    """The state with every memory in it detached."""

    def cut(layer, part):
        detach = layer.memory.detach_state
        found = {name: getattr(part, name) for name in ("memory", "earlier")}
        return part._replace(**{name: detach(x) for name, x in found.items() if x is not None})

    return state._replace(
        blocks=tuple(
            tuple(
                cut(layer, part) if layer.memory is not None else part
                for layer, part in zip(block.layers, parts, strict=True)
            )
            for block, parts in zip(model.blocks, state.blocks, strict=True)
        )
    )


@pytest.mark.parametrize("kind", VARIANTS)
def test_detached_state_cuts_no_gradient_within_a_call(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind
):
    """Several segments, whole chunks and a ragged one."""
    tokens = draw_tokens(2)
    cut, full = (
        titan_mac(kind, dtype=torch.float64, outer_grad=far) for far in ("detach_state", "full")
    )
    assert tokens.shape[1] > 2 * full.config.segment
    found, wanted = (gradients(model, model(tokens)[0]) for model in (cut, full))
    assert_same_but_for_rounding(found, wanted)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("ends", [[8, 22], [5, 11, 22]], ids=str)
def test_gradient_through_the_memory_ends_with_the_call(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind, ends
):
    """As if the caller cut the memory off each state."""
    tokens = draw_tokens(2)
    cut = titan_mac(kind, dtype=torch.float64, outer_grad="detach_state")
    full = titan_mac(kind, dtype=torch.float64)

    def read(model, change):
        state, parts, start = None, [], 0
        for end in ends:
            hidden, state = model(tokens[:, start:end], state)
            state, start = change(state), end
            parts.append(hidden)
        return gradients(model, torch.cat(parts, 1))

    found = read(cut, lambda state: state)
    expected = read(full, lambda state: cut_memories(full, state))
    assert_same_but_for_rounding(found, expected)
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding(found, read(full, lambda state: state))


@pytest.mark.parametrize("kind", VARIANTS)
def test_no_gradient_reaches_what_the_memory_writes_where_none_is_asked(
    titan_mac, draw_tokens, kind
):
    model = titan_mac(kind, outer_grad="none")
    model.loss(draw_tokens(2)).backward()
    for block in model.blocks:
        memory = next(layer.memory for layer in block.layers if hasattr(layer, "memory"))
        width = memory.heads * memory.head_dim
        weight = memory.projections.joint.weight
        assert weight.grad[:width].any()
        assert not weight.grad[width:].any()
        assert all(p.grad is None for p in (*memory.gates.parameters(), *memory.initial.values()))
