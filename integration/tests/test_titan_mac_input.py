"""Configs, tokens and states: what is taken, and what is refused with its reason."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.models.titan_mac import VARIANTS


def test_tokens_may_be_int32(titan_mac, draw_tokens):
    model = titan_mac("mac")
    tokens = draw_tokens(2, 9)
    assert torch.equal(model(tokens)[0], model(tokens.int())[0])
    assert torch.equal(model.loss(tokens), model.loss(tokens.int()))


@pytest.mark.parametrize("kind", VARIANTS)
def test_model_on_meta_says_what_comes_out(titan_mac, draw_tokens, kind):
    model = titan_mac(kind).to("meta")
    hidden, state = model(draw_tokens(2).to("meta"))
    assert hidden.shape == (2, 22, model.config.dim)
    assert state.position == 22


@pytest.mark.parametrize(
    ("corrupt", "error", "message"),
    [
        (lambda t: t.tolist(), TypeError, "wanted tokens as a tensor; got list"),
        (lambda t: t.float(), TypeError, "wanted tokens in int64 or int32; got torch.float32"),
        (lambda t: t[0], ValueError, r"wanted tokens \[B, T\]; got \[5\]"),
        (lambda t: t.to("meta"), ValueError, "wanted tokens on the model's device, cpu; got them"),
    ],
    ids=["list", "float", "one-axis", "meta"],
)
@pytest.mark.parametrize("ask", ["__call__", "loss"])
def test_wrong_tokens_are_refused_before_anything_is_computed(
    titan_mac, draw_tokens, ask, corrupt, error, message
):
    model = titan_mac("mac")
    model.embedding.register_forward_hook(lambda *_: pytest.fail("something was computed"))
    with pytest.raises(error, match=message):
        getattr(model, ask)(corrupt(draw_tokens(2, 5)))


def test_wrong_states_are_refused(titan_mac, draw_tokens):
    model = titan_mac("mac")
    tokens = draw_tokens(2, 5)
    _, state = model(tokens)
    with pytest.raises(TypeError, match="wanted the state of a TitanMAC; got tuple"):
        model(tokens, tuple(state))
    with pytest.raises(ValueError, match="wanted the state of 2 rows, as of tokens; got one of 3"):
        model(tokens, model.init_state(3))
    with pytest.raises(ValueError, match="wanted the state of 2 blocks; got one of 1"):
        model(tokens, titan_mac("mac", layers=1).init_state(2))
    with pytest.raises(ValueError, match=r"wanted tokens \[B, T \+ 1\], at least one; got \[2, 0"):
        model.loss(tokens[:, :0])


def test_targets_are_one_for_each_token(titan_mac, draw_tokens):
    model, tokens = titan_mac("mac"), draw_tokens(2, 5)
    model.embedding.register_forward_hook(lambda *_: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=r"wanted a target for each token, \[2, 5\]; got \[2, 4\]"):
        model(tokens, targets=tokens[:, 1:])
    for targets, error in (([1], TypeError), (tokens.float(), TypeError)):
        with pytest.raises(error, match="wanted targets"):
            model(tokens, targets=targets)
    with pytest.raises(ValueError, match="wanted targets on cpu, as tokens; got meta"):
        model(tokens, targets=tokens.to("meta"))
