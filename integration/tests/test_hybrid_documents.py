"""HybridLM of packed documents and of padded rows: no token sees or predicts another document, and
losses and gradients are those of each document alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_testkit.yardstick import MOVES, Allowance, MovedResults, assert_within

F32, F64 = torch.float32, torch.float64
EVEN, UNEVEN = (9, 9, 9), (12, 1, 7, 2, 5)


def make(dtype=F32, backend="reference", **options):
    torch.manual_seed(0)
    # All keys of a document are selected: which are does not follow from a rounding. Few iterations
    # of the mixing of streams, which knows no tokens.
    counts = dict(k_base=16, k_min=16, k_max=16, sinkhorn_iterations=4)
    model = HybridLM(replace(HYBRID["tiny"], **counts | options), backend=backend).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "index" in name and parameter.ndim == 2:
                parameter.mul_(10.0)
    return model


def drawn(lengths):
    return torch.randint(0, 256, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))


def packed(lengths):
    return dict(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())


def padded(lengths, side):
    """Rows of the documents, padding on a side or on both, and their mask."""
    most = max(lengths) + 2
    documents = drawn(lengths)[0].split(lengths)
    first = [dict(left=most - n, right=0, both=1)[side] for n in lengths]
    rows, mask = torch.zeros(len(lengths), most).long(), torch.zeros(len(lengths), most).bool()
    for row, (document, place) in enumerate(zip(documents, first, strict=True)):
        rows[row, place : place + len(document)] = document
        mask[row, place : place + len(document)] = True
    return rows, dict(mask=mask)


def alone(model, lengths, dense=False):
    """Means over all that is predicted, of documents by themselves: losses and every gradient."""
    following, second, indexer = [], [], []
    for document in drawn(lengths).split(lengths, 1):
        n = document.shape[1]
        if n < 2:
            continue
        if n == 2:
            # Without a token after next; the indexers' loss of one key is 0.
            following.append(model.next_token_loss(document))
            continue
        losses = model.losses(document, dense=dense)
        following.append((n - 1) * losses.following)
        second.append((n - 2) * losses.second)
        indexer.append(losses.indexer)
    counts = [sum(max(n - k, 0) for n in lengths) for k in (1, 2)]
    means = [sum(following) / counts[0], sum(second) / counts[1]]
    # The indexers' of equal documents alone: each layer has a mean of its own.
    means.append(sum(indexer) / len(indexer) if len(set(lengths)) == 1 else None)
    return everything(model, means)


def everything(model, losses):
    losses = [x for x in losses if x is not None]
    parameters = [
        p for name, p in model.named_parameters() if len(losses) > 2 or "index" not in name
    ]
    gradients = torch.autograd.grad(sum(losses), parameters, allow_unused=True)
    zeros = (torch.zeros_like(p) for p in parameters)
    gradients = [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]
    return [*losses, *gradients]


def together(model, lengths, tokens, options, dense=False):
    losses = model.losses(tokens, dense=dense, **options)
    even = len(set(lengths)) == 1
    return everything(model, [losses.following, losses.second, losses.indexer if even else None])


@cache
def expected(lengths, dense, **config):
    """The truth of each result, and what it is allowed to err by: of both sides of padding."""
    truth = alone(make(F64, **config), lengths, dense)
    runs = [alone(make(**config), lengths, dense)]
    for _ in range(MOVES):
        # Its parameters are moved, too.
        with MovedResults(F32):
            runs.append(alone(make(**config).double(), lengths, dense))
    results = zip(truth, *runs, strict=True)
    return [(exact.detach(), Allowance.of(exact, *near)) for exact, *near in results]


def check(lengths, tokens, options, backend="reference", dense=False, **config):
    wanted = expected(lengths, dense, **config)
    found = together(make(backend=backend, **config), lengths, tokens, options, dense)
    for one, (exact, allowance) in zip(found, wanted, strict=True):
        assert_within(one.detach(), exact, allowance)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("lengths", "mode"), [(EVEN, "exact"), (UNEVEN, "plain")], ids=["even-exact", "uneven-plain"]
)
def test_packed_documents_are_what_each_is_alone(lengths, mode):
    check(lengths, drawn(lengths), packed(lengths), mode=mode, window=2, sinks=1)


def test_dense_attention_goes_to_the_keys_of_a_document():
    check(EVEN, drawn(EVEN), packed(EVEN), dense=True, mode="plain")


def test_recomputed_layers_have_documents_too():
    kept, again = (
        together(make(mode="plain", checkpointing=x), EVEN, drawn(EVEN), packed(EVEN))
        for x in ("none", "block")
    )
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("lengths", "side"),
    [(EVEN, "both"), (UNEVEN, "left"), (UNEVEN, "right")],
    ids=["even-both", "uneven-left", "uneven-right"],
)
def test_padded_documents_are_what_each_is_alone(lengths, side):
    check(lengths, *padded(lengths, side), mode="plain")


@pytest.mark.slow
def test_packed_documents_by_the_kernels():
    check(EVEN, drawn(EVEN), packed(EVEN), backend="triton", mode="exact")


@pytest.mark.parametrize("mode", ["plain", "exact"])
def test_other_documents_change_no_bit(mode):
    """Where fewer keys are selected than there are."""
    model = make(k_base=4, k_min=3, k_max=6, window=1, mode=mode).eval()
    tokens, options = drawn(UNEVEN), packed(UNEVEN)
    hidden = model(tokens, **options)
    for first, last in ((0, 12), (12, 13), (13, 20), (22, 27)):
        others = (tokens + 1) % 256
        others[:, first:last] = tokens[:, first:last]
        assert torch.equal(model(others, **options)[:, first:last], hidden[:, first:last])
    gradients = torch.autograd.grad(
        hidden[:, 13:20].square().sum(), model.embedding.weight, retain_graph=True
    )[0]
    inside = set(tokens[0, 13:20].tolist())
    assert {*gradients.any(1).nonzero().flatten().tolist()} <= inside


def test_no_first_token_is_predicted():
    """Neither as the next one nor as the one after it."""
    model, options = make(mode="plain"), packed(EVEN)
    tokens = drawn(EVEN)
    losses = model.losses(tokens, **options)
    # Targets that documents begin with, and their second tokens, are of no loss of the one before.
    targets = tokens[:, 1:].clone()
    targets[:, [8, 17]] = -100
    again = model(tokens[:, :-1], targets, **options)
    assert torch.equal(losses.following, again.following)
    assert torch.equal(losses.second, again.second)
    assert not torch.equal(losses.following, model.losses(tokens).following)


@pytest.mark.parametrize("lengths", [[2, 2, 2], [1, 2, 1]], ids=str)
def test_documents_without_a_token_after_next_are_learned(lengths):
    model = make(F64, index_weight=0.0)
    losses = model.losses(drawn(lengths), **packed(lengths))
    wanted = [model.next_token_loss(d) for d in drawn(lengths).split(lengths, 1) if d.shape[1] == 2]
    assert losses.second.item() == 0.0
    assert losses.selected.isfinite()
    torch.testing.assert_close(losses.total, torch.stack(wanted).mean().to(losses.total.dtype))
    losses.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.head.weight.grad.abs().max() > 0.0


T = torch.zeros(1, 9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            dict(cu_seqlens=[0, 9]),
            TypeError,
            "wanted cu_seqlens as a tensor of int64 or int32; got",
        ),
        (dict(cu_seqlens=torch.zeros(2)), TypeError, "wanted cu_seqlens in int64 or int32; got"),
        (dict(cu_seqlens=T), ValueError, r"\[N \+ 1\] with N at least 1; got \[1, 9\]"),
        (dict(cu_seqlens=T[0].to("meta")), ValueError, "cu_seqlens on cpu, as tokens; got meta"),
        (dict(mask=T), TypeError, "wanted mask in bool; got torch.int64"),
        (dict(mask=T[:, 1:].bool()), ValueError, r"a mask of \[1, 9\]; got \[1, 8\]"),
    ],
)
def test_bad_documents_are_refused(options, error, message):
    model = make()
    for call in (model, model.losses, model.loss):
        with pytest.raises(error, match=message):
            call(T, **options)


def test_several_rows_are_refused_beside_documents():
    with pytest.raises(ValueError, match=r"wanted one row beside cu_seqlens; got \[2, 9\]"):
        make()(T.expand(2, -1), cu_seqlens=T[0])
