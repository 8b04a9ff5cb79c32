"""TitanMAC of packed documents and of padded rows: no token sees or predicts another document, and
hidden rows, losses and gradients are those of each document alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright_models.models.titan_mac import VARIANTS
from fusewright_testkit.yardstick import MOVES, Allowance, MovedResults, assert_within

F32, F64 = torch.float32, torch.float64
# In segments of 8 and chunks of 4: a token, less than a chunk, none, a segment, more than one; the
# second row is padded on both sides.
BOUNDS = (0, 1, 4, 4, 12, 22), (2, 11, 18, 19, 19, 21)
LENGTH = 22


def bounds():
    return torch.tensor(BOUNDS, dtype=torch.int32)


def documents_of(rows, shortest=1):
    """(row, its tokens) of each document of at least so many."""
    return [
        (row, slice(first, last))
        for row, own in enumerate(rows)
        for first, last in itertools.pairwise(own)
        if last - first >= shortest
    ]


def padding_on(side):
    """Of rows of one document each, which tokens it has."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, slice(0, 5) if side == "left" else slice(17, None)] = False
    return mask


def hidden_and_gradients(model, hidden):
    leaves = [*model.parameters()]
    total = sum(x.square()[..., :3].sum() for x in hidden)
    return [*(x.detach() for x in hidden), *torch.autograd.grad(total, leaves)]


@pytest.mark.sampled
def test_packed_documents_are_what_each_is_alone(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind
):
    model, tokens = titan_mac(kind, dtype=F64), draw_tokens(2)
    hidden, state = model(tokens, cu_seqlens=bounds())
    assert state is None
    assert not hidden[1, [0, 1, 21]].any()
    parts = documents_of(BOUNDS)
    found = [hidden[row : row + 1, part] for row, part in parts]
    alone = [model(tokens[row : row + 1, part])[0] for row, part in parts]
    assert_same_but_for_rounding(
        hidden_and_gradients(model, found), hidden_and_gradients(model, alone)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_padding_changes_nothing(titan_mac, draw_tokens, assert_same_but_for_rounding, kind, side):
    model, tokens, mask = titan_mac(kind, dtype=F64), draw_tokens(2), padding_on(side)
    hidden = model(tokens, mask=mask)[0]
    assert not hidden[~mask].any()
    parts = [(row, mask[row].nonzero().flatten()) for row in range(2)]
    found = [hidden[row : row + 1, part] for row, part in parts]
    alone = [model(tokens[row : row + 1, part])[0] for row, part in parts]
    assert_same_but_for_rounding(
        hidden_and_gradients(model, found), hidden_and_gradients(model, alone)
    )


def loss_and_gradients(model, loss):
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def mean_of_documents(model, tokens, rows):
    """Over all that is predicted, of documents by themselves."""
    parts = documents_of(rows, shortest=2)
    counts = [part.stop - part.start - 1 for _, part in parts]
    losses = [model.loss(tokens[row : row + 1, part]) for row, part in parts]
    total = sum(count * loss for count, loss in zip(counts, losses, strict=True))
    return loss_and_gradients(model, total / sum(counts))


@pytest.mark.parametrize("kind", VARIANTS)
def test_loss_is_the_mean_over_documents(
    titan_mac, draw_tokens, assert_same_but_for_rounding, kind
):
    """In as much room as they need, and in any."""
    model, tokens = titan_mac(kind, dtype=F64), draw_tokens(2)
    expected = mean_of_documents(model, tokens, BOUNDS)
    # Of the first row: segments of 2, 7 and 9 tokens that are read, or chunks.
    for room in (None, 32):
        loss = model.loss(tokens, cu_seqlens=bounds(), room=room)
        assert_same_but_for_rounding(loss_and_gradients(model, loss), expected)


def test_one_row_and_masks_within_documents(titan_mac, draw_tokens, assert_same_but_for_rounding):
    model, tokens = titan_mac("mac", dtype=F64), draw_tokens(1)
    cu_seqlens = torch.tensor([0, 9, 22])
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[0, [0, 1, 9, 21]] = False
    loss = model.loss(tokens, cu_seqlens=cu_seqlens, mask=mask)
    expected = mean_of_documents(
        model, torch.cat([tokens[:, 2:9], tokens[:, 10:21]], 1), [(0, 7, 18)]
    )
    assert_same_but_for_rounding(loss_and_gradients(model, loss), expected)


def test_target_behind_a_document_is_predicted_where_it_is_given(titan_mac, draw_tokens):
    """Such as a token that ends it."""
    model, tokens = titan_mac("mag"), draw_tokens(1)
    targets = torch.full_like(tokens, -100)
    targets[0, 8] = 3
    cu_seqlens = torch.tensor([0, 9, 22])
    found = model(tokens, targets=targets, cu_seqlens=cu_seqlens)
    alone = model(tokens[:, :9], targets=targets[:, :9])
    torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("kind", VARIANTS)
def test_other_documents_change_no_bit(titan_mac, draw_tokens, kind):
    model, tokens = titan_mac(kind), draw_tokens(2)
    hidden = model(tokens, cu_seqlens=bounds())[0]
    for row, part in documents_of(BOUNDS):
        others = (tokens + 1) % model.config.vocab_size
        others[row, part] = tokens[row, part]
        assert torch.equal(model(others, cu_seqlens=bounds())[0][row, part], hidden[row, part])
    (gradient,) = torch.autograd.grad(hidden[1, 11:18].square().sum(), model.embedding.weight)
    inside = set(tokens[1, 11:18].tolist())
    assert {*gradient.any(1).nonzero().flatten().tolist()} <= inside


@pytest.mark.parametrize("kind", ["mac", "mag"])
def test_recomputed_blocks_have_documents_too(titan_mac, draw_tokens, kind):
    tokens, found = draw_tokens(2), []
    for checkpointing in (False, True):
        model = titan_mac(kind, checkpointing=checkpointing)
        loss = model.loss(tokens, cu_seqlens=bounds())
        found.append(loss_and_gradients(model, loss))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mac", "mag", "lmm-deep"])
def test_packed_documents_by_the_kernels(titan_mac, draw_tokens, kind):
    tokens = draw_tokens(2)
    truth = mean_of_documents(titan_mac(kind, dtype=F64), tokens, BOUNDS)
    runs = [mean_of_documents(titan_mac(kind), tokens, BOUNDS)]
    for _ in range(MOVES):
        # Its parameters are moved, too.
        with MovedResults(F32):
            runs.append(mean_of_documents(titan_mac(kind).double(), tokens, BOUNDS))
    model = titan_mac(kind, backend="triton")
    found = loss_and_gradients(model, model.loss(tokens, cu_seqlens=bounds()))
    for one, exact, *near in zip(found, truth, *runs, strict=True):
        assert_within(one, exact, Allowance.of(exact, *near))


T = torch.zeros(2, 9, dtype=torch.int64)
C = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            dict(cu_seqlens=[0, 9]),
            TypeError,
            "wanted cu_seqlens as a tensor of int64 or int32; got",
        ),
        (dict(cu_seqlens=C.float()), TypeError, "wanted cu_seqlens in int64 or int32; got"),
        (dict(cu_seqlens=C[:, :1]), ValueError, r"\[B, N \+ 1\] with N at least 1; got \[2, 1\]"),
        (dict(cu_seqlens=C[0]), ValueError, r"wanted one row beside cu_seqlens; got \[2, 9\]"),
        (dict(cu_seqlens=C[:1]), ValueError, r"wanted 1 rows beside cu_seqlens; got \[2, 9\]"),
        (dict(mask=T), TypeError, "wanted mask in bool; got torch.int64"),
        (dict(cu_seqlens=C, room=12), ValueError, "wanted room of whole units of 8 tokens; got 12"),
    ],
)
def test_bad_documents_are_refused(titan_mac, options, error, message):
    model = titan_mac("mac")
    for call in (model, model.loss):
        with pytest.raises(error, match=message):
            call(T, **options)


def test_state_is_refused_beside_documents(titan_mac):
    model = titan_mac("mac")
    with pytest.raises(ValueError, match="wanted no state beside cu_seqlens or a mask"):
        model(T, model.init_state(2), cu_seqlens=C)
