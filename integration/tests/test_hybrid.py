"""HybridLM at its smallest: no leak, every gradient, the same function in every mode."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from fusewright.deltanet import GatedDeltaNet
from fusewright.gsa import GatedSparseAttention, Selection, gated_indexer
from fusewright_models.models.hybrid import HYBRID, HybridLM

from .properties import assert_every_parameter_learns, assert_nothing_sees_the_future
from .steps import SEEDS, check_final_losses, check_steps
from .steps import trained as losses_of

TINY = HYBRID["tiny"]
TOKENS = 40
# The indexer of DeepSeek-V3.2, half of whose columns are rotated.
RELU = dict(form="relu", index_rotary=8)


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (2, TOKENS + 1), generator=torch.Generator().manual_seed(2))


def make(dtype=torch.float32, backend="reference", **options):
    torch.manual_seed(0)
    return HybridLM(replace(TINY, **options), backend=backend).to(dtype)


def trained(mode, tokens, steps, dtype=torch.float32):
    """Losses of some steps of AdamW, of streams that few iterations mix."""
    model = make(dtype, mode=mode, sinkhorn_iterations=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(tokens.roll(step, 0) if step % 2 else tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_future_token_changes_nothing_before_it(tokens):
    model = make(layers=4).eval()
    assert_nothing_sees_the_future(model, tokens, (1, 5, 17, TOKENS - 1), 256)


@torch.no_grad()
def predicted_from(model, tokens):
    """What the next tokens are predicted from, what the tokens after next are, and selections."""
    found, chosen = [], []
    of_loss = model._cross_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_cross_entropy", lambda h, t: (found.append(h), of_loss(h, t))[1])
        model.losses(tokens, observe=lambda _, u, selection: chosen.append(selection.indices))
    return [*found, *chosen]


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
def test_future_token_changes_no_prediction_before_it(tokens, options):
    """Of the token after next, too: what it is predicted from at t knows the token t + 1 and none
    after. With an average of the variance, as in training, so that rows select unlike numbers.
    """
    model = make(**options)
    model.losses(tokens)
    model.eval()
    before = predicted_from(model, tokens)
    for place in (1, 2, 9, 17, TOKENS - 1, TOKENS):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 7) % 256
        after = predicted_from(model, changed)
        for kind, (value, usual) in enumerate(zip(after, before, strict=True)):
            known = place - kind % 2
            assert torch.equal(value[0, :known], usual[0, :known])
            assert torch.equal(value[1], usual[1])
            # The last token is predicted and never read.
            same = torch.equal(value[0, known:], usual[0, known:])
            assert kind > 1 or same == (place == TOKENS)


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
def test_every_parameter_has_had_a_gradient_within_three_steps(tokens, options):
    model = make(**options)
    assert_every_parameter_learns(model, lambda: model.loss(tokens), lr=1e-2)
    assert any("index_temperature" in name for name, _ in model.named_parameters())


def test_same_inputs_same_bits(tokens):
    assert torch.equal(trained("exact", tokens, 3), trained("exact", tokens, 3))


def test_modes_of_a_reversible_stack_train_to_the_same_bits(tokens):
    exact, stored = (trained(mode, tokens[:, :21], 20) for mode in ("exact", "stored"))
    assert torch.equal(exact, stored)
    assert exact[-1] < exact[0] - 0.5


def loss_of_tokens(tokens):
    """The same rows in every step."""
    return lambda model, step: model.loss(tokens)


@pytest.fixture
def same_selections(monkeypatch):
    """Makes of a loss the same whose selections are those of its first call at a step: what a
    query selects is no continuous function of anything.
    """
    select, at, chosen = GatedSparseAttention._select, {}, {}

    def selects(attention, index, *place):
        selection, variance = select(attention, index, *place)
        at["place"] += 1
        return chosen.setdefault((at["step"], at["place"]), selection), variance

    def same(loss_of):
        def loss_of_step(model, step):
            at.update(step=step, place=0)
            return loss_of(model, step)

        return loss_of_step

    monkeypatch.setattr(GatedSparseAttention, "_select", selects)
    return same


def test_steps_of_a_training_are_as_near_to_fp64_as_plain_ones(tokens, same_selections):
    """The loss and every gradient, from equal states, before anything is learned and after."""
    models = (make(mode=mode, sinkhorn_iterations=4) for mode in ("exact", "plain"))
    loss_of = same_selections(loss_of_tokens(tokens[:, :13]))
    losses = check_steps(*models, loss_of, (0, 10), steps=11)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_trainings_end_where_plain_ones_end(tokens):
    found = {"exact": [], "plain": []}
    for seed in range(SEEDS):
        for mode, losses in found.items():
            torch.manual_seed(seed)
            config = replace(TINY, mode=mode, sinkhorn_iterations=4)
            model = HybridLM(config, backend="reference")
            losses.append(losses_of(model, loss_of_tokens(tokens[:, :13]), 40))
    check_final_losses(*found.values())


def test_selection_is_replayed_and_kept_once(tokens):
    model = make()
    attention = next(m for m in model.stack.modules() if isinstance(m, GatedSparseAttention))
    before = attention.variance_ema.clone()
    losses = model.losses(tokens)
    moved = attention.variance_ema.clone()
    assert not torch.equal(before, moved)
    assert losses.tape_bytes == 2 * TOKENS * (TINY.k_max + 1) * 4
    losses.total.backward()
    assert torch.equal(attention.variance_ema, moved)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_backward_pass_selects_nothing(tokens, mode, monkeypatch):
    """Were a layer to select once more it would find each query's own key alone: gradients are
    still those of ordinary autograd, which selects once.
    """
    select, calls = GatedSparseAttention._select, []

    def selects(attention, index, *place):
        calls.append(attention)
        (indices, count), variance = select(attention, index, *place)
        if calls.count(attention) > 1:
            indices = torch.full_like(indices, -1)
            indices[..., 0] = torch.arange(indices.shape[1])
            count = torch.ones_like(count)
        return Selection(indices, count), variance

    monkeypatch.setattr(GatedSparseAttention, "_select", selects)
    found = []
    for kind in ("plain", mode):
        model = make(torch.float64, mode=kind)
        loss = model.loss(tokens)
        selected = len(calls)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
        assert len(calls) == selected == 2
        calls.clear()
    for gradient, expected in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_every_stream_starts_with_the_embedding(tokens, monkeypatch):
    model, given = make(), []
    for module in (model.stack.layers[0], model.second):
        force = module.force
        told = lambda x, force=force, **known: (given.append(x), force(x, **known))[1]  # noqa: E731
        monkeypatch.setattr(module, "force", told)
    with torch.no_grad():
        model.losses(tokens)
        unit = 2.0**-TINY.fraction_bits
        embedded = (model.embedding(tokens[:, :-1]) / unit).round() * unit
    first, second = given
    assert len(first.unbind(-2)) == len(second.unbind(-2)) == TINY.streams
    assert all(torch.equal(stream, embedded) for stream in first.unbind(-2))
    assert all(torch.equal(stream, second[..., 0, :]) for stream in second.unbind(-2))
    assert second.any(-1).all()


def test_losses_are_near_those_of_guessing_at_the_start(tokens):
    losses = make().losses(tokens)
    for loss in (losses.following, losses.second):
        assert abs(loss.item() - torch.log(torch.tensor(256.0)).item()) < 0.3
    assert losses.indexer.item() > 0.0
    assert not losses.saturated.item()
    total = losses.following + 0.3 * losses.second + losses.indexer
    assert torch.equal(losses.total, total)


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
def test_indexer_learns_from_its_own_loss_alone(tokens, options):
    model = make(**options)
    losses = model.losses(tokens)
    names, parameters = zip(*model.named_parameters(), strict=True)
    of_model = torch.autograd.grad(
        losses.following + losses.second, parameters, retain_graph=True, allow_unused=True
    )
    of_indexer = torch.autograd.grad(losses.indexer, parameters, allow_unused=True)
    for name, mine, others in zip(names, of_indexer, of_model, strict=True):
        learns = mine is not None and bool(mine.any())
        assert learns == ("index_" in name), name
        assert "index_" not in name or others is None or not others.any(), name


def test_dense_losses_are_those_of_all_keys(tokens, assert_same_but_for_rounding):
    """A selection of every key is none at all: fp64, where sums of both orders are alike."""
    wide = dict(k_base=TOKENS, k_min=TOKENS, k_max=TOKENS)
    model, all_selected = make(torch.float64), make(torch.float64, **wide)
    all_selected.load_state_dict(model.state_dict())
    dense, expected = model.losses(tokens, dense=True), all_selected.losses(tokens)
    for name in ("total", "following", "second", "indexer"):
        assert_same_but_for_rounding([getattr(dense, name)], [getattr(expected, name)])
    # Half of the queries of T see more, half fewer; the last layer has one query less.
    assert dense.selected == expected.selected == (TOKENS + 0.5) / 2
    sparse = model.losses(tokens)
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding([sparse.following], [dense.following])
    assert sparse.selected < TINY.k_max
    dense.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def divergence(attention, u, selection):
    """Of the indexer's softmax from the mean of the heads' probabilities, both over the selected
    keys alone, in the mean over queries.
    """
    q, k, *_ = attention._heads(u, 0)
    length = u.shape[1]
    counts = torch.arange(selection.indices.shape[-1]) < selection.count[..., None]
    named = torch.where(counts, selection.indices, length).long()
    selected = torch.zeros(*u.shape[:2], length + 1, dtype=torch.bool)
    selected = selected.scatter(2, named, True)[..., :length]
    products = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    p = products.masked_fill(~selected[:, None], -torch.inf).softmax(-1).mean(1)
    index = attention._index(u)
    scores = gated_indexer(
        *index, attention._bias(index[0]), form=attention.form, backend="reference"
    )
    scores = (attention.index_temperature * scores).masked_fill(~selected, -torch.inf)
    log_softmax = scores.log_softmax(-1).masked_fill(~selected, 0.0)
    return (torch.xlogy(p, p) - p * log_softmax).sum(-1).mean()


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
@pytest.mark.parametrize("dense", [True, False], ids=["warm-up", "sparse"])
def test_indexers_learn_over_all_keys_in_the_warm_up_and_over_selected_ones_after_it(
    tokens, assert_same_but_for_rounding, dense, options
):
    model, observed = make(torch.float64, **options), []
    losses = model.losses(tokens, dense=dense, observe=lambda *told: observed.append(told))
    with torch.no_grad():
        expected = sum(divergence(*told) for told in observed)
    seen = [torch.arange(1, u.shape[1] + 1).expand(u.shape[:2]) for _, u, _ in observed]
    counts = [selection.count for *_, selection in observed]
    assert all(map(torch.equal, counts, seen)) == dense
    assert_same_but_for_rounding([losses.indexer], [expected])


def test_indexers_hear_dense_keys_and_no_average_moves(tokens):
    model, observed = make(), []
    model.losses(tokens, dense=True, observe=lambda *told: observed.append(told)).total.backward()
    assert len(observed) == 2
    for attention, u, selection in observed:
        assert attention.variance_ema == 0.0
        assert u.shape[0] == tokens.shape[0]
        length = u.shape[1]
        assert selection.count.tolist() == [list(range(1, length + 1))] * 2
        assert selection.indices[1, 3].tolist() == list(range(length))
    assert [u.shape[1] for _, u, _ in observed] == [TOKENS, TOKENS - 1]


@pytest.mark.parametrize("options", [{}, RELU], ids=["gated", "relu"])
def test_sequence_read_in_pieces_is_read_whole(tokens, options):
    model = make(torch.float64, **options).eval()
    with torch.no_grad():
        whole = model(tokens)
    for pieces in ([TOKENS + 1], [7, 1, 1, 20, TOKENS - 28], [1] * 9):
        caches, found = None, []
        for piece in tokens[:, : sum(pieces)].split(pieces, 1):
            hidden, caches = model.read(piece, caches)
            found.append(hidden)
        found = torch.cat(found, 1)
        # States are rounded: a layer may come to the neighbouring number.
        unit = 2.0**-TINY.fraction_bits
        assert (found - whole[:, : found.shape[1]]).abs().max() < TINY.layers * unit


def test_targets_are_one_for_each_token(tokens):
    model = make()
    model.embedding.register_forward_hook(lambda *_: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=r"wanted a target for each token, \[\d+, \d+\]; got"):
        model(tokens, tokens[:, 1:])


def test_loss_of_the_next_token_is_that_of_all_losses(tokens):
    model = make().eval()
    with torch.no_grad():
        assert torch.equal(model.next_token_loss(tokens), model.losses(tokens).following)
        assert model.next_token_loss(tokens[:, :2]).isfinite()
    with pytest.raises(ValueError, match="at least 2 in a row"):
        model.next_token_loss(tokens[:, :1])


@pytest.mark.slow
def test_compiled_losses_are_the_eager_ones(tokens):
    """A reversible stack within what is compiled is no part of it."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda model: model.loss(tokens[:, :12]), backend="aot_eager")
    found = []
    for loss_of in (compiled, lambda model: model.loss(tokens[:, :12])):
        model = make(layers=1)
        loss = loss_of(model)
        found.append([loss, *torch.autograd.grad(loss, model.parameters())])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


def test_bytes_serve_for_an_embedding(tokens):
    model = make(embedding="bytes")
    model.loss(tokens).backward()
    assert model.embedding.weight.grad.any()


@pytest.mark.parametrize(
    ("embedding", "billions"), [("plain", 2.15), ("bytes", 1.65)], ids=["plain", "bytes"]
)
def test_greatest_preset_has_as_many_parameters_as_it_says(embedding, billions):
    config = replace(HYBRID["1b"], embedding=embedding)
    given = None if embedding == "plain" else [b"x"] * config.vocab_size
    with torch.device("meta"):
        model = HybridLM(config, token_bytes=given)
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e9, 2) == billions


def test_variant_of_350_million_has_as_many_parameters():
    with torch.device("meta"):
        model = HybridLM(HYBRID["350m"])
    assert sum(p.numel() for p in model.parameters()) == 351_480_713


@pytest.mark.parametrize("name", HYBRID)
def test_every_fourth_layer_is_sparse(name):
    """Of the layers that are built."""
    with torch.device("meta"):
        model = HybridLM(HYBRID[name])
    letters = {GatedDeltaNet: "D", GatedSparseAttention: "G"}
    kinds = "".join(letters[type(layer.mixer)] for layer in model.stack.layers)
    assert kinds == "DDDG" * (model.config.layers // 4)
    assert letters[type(model.second.mixer)] == "G"


def test_smallest_preset_is_that_of_the_specification():
    """Whose dropout is none, and whose predictions are two: of the next token and the one after."""
    wanted = dict(
        vocab_size=256,
        dim=64,
        layers=4,
        delta_heads=2,
        delta_width=32,
        sparse_heads=2,
        sparse_width=32,
        key_heads=None,
        index_heads=2,
        index_width=16,
        k_base=8,
        k_min=4,
        k_max=16,
        sinks=2,
        feed_forward_width=128,
        streams=4,
        sinkhorn_iterations=20,
        rope_base=10_000.0,
    )
    assert wanted.items() <= asdict(TINY).items()
    model = make()
    convolutions = [m for m in model.modules() if type(m).__name__ == "ShortConvolution"]
    assert len(convolutions) == 3 * 3
    assert {m.weight.shape[-1] for m in convolutions} == {4}
    assert not any(isinstance(m, torch.nn.Dropout) for m in model.modules())


def test_more_streams_than_can_be_mixed_are_refused():
    with pytest.raises(ValueError, match="streams must be from 1 to 64; got 65"):
        HybridLM(replace(TINY, streams=65))


def test_bad_input_is_refused(tokens):
    model = make()
    for given, error, message in (
        ([1, 2], TypeError, "wanted tokens as a tensor; got list"),
        (tokens.float(), TypeError, "wanted tokens in int64 or int32"),
        (tokens[0], ValueError, r"wanted tokens \[B, T \+ 1\], at least 3 in a row"),
        (tokens[:, :2], ValueError, r"at least 3 in a row; got \[2, 2\]"),
        (tokens.to("meta"), ValueError, "wanted tokens on the model's device, cpu; got them on m"),
    ):
        with pytest.raises(error, match=message):
            model.loss(given)
    _, caches = model.read(tokens)
    with pytest.raises(ValueError, match="the 2 rows that the caches have read; got 1 rows"):
        model.read(tokens[:1], caches)
    with pytest.raises(ValueError, match="wanted the bytes of 300 tokens; got none"):
        HybridLM(replace(TINY, vocab_size=300, embedding="bytes"))
    with pytest.raises(ValueError, match='token_bytes are for embedding="bytes"'):
        HybridLM(TINY, token_bytes=[b"a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_model_computes_as_its_parameters_under_autocast(tokens, dtype):
    """All that it offers, with the bits of a model in fp32 of the same numbers; gradients, which
    are rounded elsewhere, as near to those without autocast.
    """
    cast = make(dtype)

    def wide():
        model = make()
        model.load_state_dict(cast.state_dict())
        return model

    models = cast, wide(), wide()

    def everything(model):
        losses = model.losses(tokens)
        losses.total.backward()
        with torch.no_grad():
            hidden = model(tokens)
            read, caches = model.read(tokens[:, :20])
            more, _ = model.read(tokens[:, 20:], caches)
            following = model.next_token_loss(tokens)
            found = [*losses[:6], following, hidden, read, more, model.logits(hidden)]
        return found, torch.cat([p.grad.flatten().float() for p in model.parameters()])

    (found, gradients), (_, truth) = map(everything, models[:2])
    with torch.autocast("cpu", dtype):
        expected, allowed = everything(models[2])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert found[0].isfinite()
    assert (gradients - truth).norm() <= 2 * (allowed - truth).norm()


def test_cast_model_keeps_the_callers_autocast(tokens):
    model = make(torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.logits(model(tokens)).dtype == torch.bfloat16
    assert model.logits(model(tokens)).dtype == torch.float16
