"""A sequence read in pieces, and the state that is handed on between them."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.models.titan_mac import VARIANTS, TitanMAC, TitanMACState
from torch import Tensor
from torch.utils import _pytree as pytree

# As long as the fixture's tokens.
LENGTH = 22


def read_in_pieces(model: TitanMAC, tokens: Tensor, ends: list[int]) -> Tensor:
    state, found, start = None, [], 0
    for end in ends:
        hidden, state = model(tokens[:, start:end], state)
        found.append(hidden)
        start = end
    return torch.cat(found, 1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "ends",
    [list(range(1, LENGTH + 1)), [3, 8, 9, 19, 19, LENGTH], [16, LENGTH]],
    ids=["token-by-token", "anywhere", "at-segments"],
)
def test_pieces_of_a_sequence_equal_the_whole(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind, ends
):
    model = titan_mac(kind, dtype=torch.float64)
    tokens = draw_tokens(2)
    whole, pieces = model(tokens)[0], read_in_pieces(model, tokens, ends)
    assert_same_but_for_rounding([pieces], [whole])
    gradients, others = (
        torch.autograd.grad(hidden.square()[..., :3].sum(), model.parameters())
        for hidden in (whole, pieces)
    )
    assert_same_but_for_rounding(others, gradients)


def test_detached_state_ends_the_gradient(titan_mac, draw_tokens):
    model = titan_mac("mac")
    tokens = draw_tokens(2)
    _, state = model(tokens[:, :10])
    tensors = [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]
    assert any(x.requires_grad for x in tensors)
    detached = model.detach_state(state)
    assert isinstance(detached, TitanMACState)
    assert detached.position == 10
    assert not any(x.requires_grad for x in pytree.tree_leaves(detached) if isinstance(x, Tensor))
    assert torch.equal(model(tokens[:, 10:], state)[0], model(tokens[:, 10:], detached)[0])


def test_state_is_tensors_and_one_host_number(titan_mac, draw_tokens, kind):
    model = titan_mac(kind)
    _, state = model(draw_tokens(2, 13))
    numbers = [leaf for leaf in pytree.tree_leaves(state) if not isinstance(leaf, Tensor)]
    assert [number for number in numbers if number is not None] == [13]


@pytest.mark.parametrize("kind", ["mag", "mal", "mac"])
def test_state_holds_no_more_than_a_window(titan_mac, draw_tokens, kind):
    model = titan_mac(kind)
    _, state = model(draw_tokens(2, 3 * model.config.segment - 1))
    for *_, layer in state.blocks:
        assert layer.seen.shape[1] == (2 if kind == "mac" else 1) * (model.config.segment - 1)
        if kind != "mac":
            assert layer.seen.untyped_storage().nbytes() == layer.seen.nbytes


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0), (2, 1), (1, 3)], ids=str)
def test_short_and_empty_sequences_are_read(titan_mac, draw_tokens, kind, shape):
    model = titan_mac(kind)
    hidden, state = model(draw_tokens(*shape))
    assert hidden.shape == (*shape, model.config.dim)
    assert state.position == shape[1]
    hidden, state = model(draw_tokens(shape[0], 3), state)
    assert hidden.shape == (shape[0], 3, model.config.dim)
    assert hidden.isfinite().all()


def test_piece_of_no_tokens_leaves_the_state(titan_mac, draw_tokens):
    model = titan_mac("mac")
    tokens = draw_tokens(2, 9)
    _, state = model(tokens)
    _, same = model(tokens[:, :0], state)
    for old, new in zip(pytree.tree_leaves(state), pytree.tree_leaves(same), strict=True):
        assert old is new or old == new


@pytest.mark.parametrize("kind", VARIANTS)
def test_state_that_is_not_finite_stays_in_its_row(titan_mac, draw_tokens, kind):
    model = titan_mac(kind)
    tokens = draw_tokens(3)
    _, state = model(tokens[:, :5])
    expected, _ = model(tokens[:, 5:], state)

    def poisoned(x):
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        x = x.detach().clone()
        x[1] = torch.nan
        return x

    found, after = model(tokens[:, 5:], pytree.tree_map(poisoned, state))
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().any()
    assert isinstance(after, TitanMACState)
