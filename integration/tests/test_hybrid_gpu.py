"""What only a GPU can show of HybridLM: gates in bf16, no waiting, the same bits in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models.cli.hybrid import WarmedWindows, all_losses
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.text import Windows
from fusewright_models.training import Trainer, TrainingConfig, adamw
from fusewright_testkit import no_synchronisation
from rich.console import Console

from .commands import MEASURED
from .properties import assert_every_parameter_learns, assert_nothing_sees_the_future
from .steps import SEEDS, check_final_losses, check_steps, trained

pytestmark = pytest.mark.gpu

LENGTH = 520


def make(backend: str = "auto", seed: int = 1, **changes) -> HybridLM:
    """Four layers of the preset mini over bytes, if nothing else is asked for."""
    torch.manual_seed(seed)
    sizes = {"layers": 4, "vocab_size": 256} | changes
    return HybridLM(replace(HYBRID["mini"], **sizes), backend=backend).cuda()


def draw(batch: int = 2, length: int = LENGTH + 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(256, (batch, length), generator=generator).cuda()


def bf16() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def stepped(model: HybridLM, tokens: torch.Tensor, **options) -> list[torch.Tensor]:
    """Losses and gradients."""
    with bf16():
        losses = model.losses(tokens, **options)
    model.zero_grad(set_to_none=True)
    losses.total.backward()
    found = [x.detach() for x in losses[:6]]
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def test_future_token_changes_nothing_before_it():
    model = make().eval()
    with bf16():
        assert_nothing_sees_the_future(model, draw(), (1, 63, 64, 300, LENGTH), 256)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_every_parameter_has_had_a_gradient_within_three_steps(dense):
    model, tokens = make(), draw()

    def loss():
        with bf16():
            losses = model.losses(tokens, dense=dense)
        assert all(x.isfinite().all() for x in losses[:6])
        return losses.total

    assert_every_parameter_learns(model, loss, lr=1e-2)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_same_inputs_same_bits_whether_states_are_stored_or_not(dense):
    tokens = draw()
    first, again, stored = (
        stepped(make(mode=mode), tokens, dense=dense) for mode in ("exact", "exact", "stored")
    )
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, stored))


SIZES = {"dim": 128, "delta_heads": 2, "sparse_heads": 2, "feed_forward_width": 256}


def test_steps_in_bf16_follow_the_reference():
    """Attention is dense: what a query selects is no continuous function of anything."""
    models = (make(backend, **SIZES) for backend in ("triton", "reference"))
    tokens = draw(length=100)
    losses = check_steps(
        *models,
        lambda model, step: model.losses(tokens.roll(step, 1), dense=True).total,
        (0, 10),
        steps=11,
        dtype=torch.bfloat16,
    )
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_trainings_in_bf16_end_where_the_references_end():
    tokens = draw(length=130)
    found = {"triton": [], "reference": []}
    for seed in range(SEEDS):
        for backend, losses in found.items():
            model = make(backend, seed=seed, **SIZES)
            losses.append(trained(model, lambda model, _: model.loss(tokens), 60, torch.bfloat16))
    check_final_losses(*found.values())


def test_step_waits_for_nothing():
    model, tokens = make(), draw()
    optimizer = adamw(model, lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    for dense in (True, False):
        stepped(model, tokens, dense=dense)
        optimizer.step()
    torch.cuda.synchronize()
    with no_synchronisation():
        for dense in (True, False):
            stepped(model, tokens, dense=dense)
            optimizer.step()


@pytest.mark.parametrize("mode", ["exact", "stored", "plain"])
def test_captured_training_has_the_bits_of_eager_training(mode):
    """Through both phases, four dense steps of twelve, what is logged too."""
    stream = draw(1, 20_000)[0].to(torch.uint8)
    found = []
    for capture in (False, True):
        model, lines = make(mode=mode), []
        Trainer(
            model,
            WarmedWindows(Windows(stream, length=256, seed=3), 4),
            all_losses,
            adamw(model, lr=1e-3, weight_decay=0.1, clip_norm=1.0),
            TrainingConfig(steps=12, batch_size=2, precision="bf16", capture=capture, log_every=3),
            None,
            console=Console(quiet=True),
            observe=lines.append,
        ).run()
        told = [{k: x for k, x in line.items() if k not in MEASURED} for line in lines]
        found.append((told, [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert found[0][0][-1]["selected_keys"] < found[0][0][0]["selected_keys"]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_saturated_step_is_skipped_in_a_graph_and_told():
    """The batch of a graph is as it is captured; what saturates is a parameter's doing."""
    stream = draw(1, 20_000)[0].to(torch.uint8)
    model, lines = make(), []
    trainer = Trainer(
        model,
        WarmedWindows(Windows(stream, length=256, seed=3), 0),
        all_losses,
        adamw(model, lr=1e-3, weight_decay=0.1, clip_norm=1.0),
        TrainingConfig(steps=9, batch_size=2, precision="bf16", capture=True, log_every=3),
        None,
        console=Console(quiet=True),
        observe=lines.append,
    )
    trainer.run(until=6)
    weight = model.embedding.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1e6)
    others = [p.detach().clone() for p in model.parameters() if p is not weight]
    trainer.run(until=9)
    assert [line.get("saturated_batches", 0) for line in lines] == [0, 0, 3]
    assert lines[-1]["skipped_steps"] == 3
    assert torch.equal(weight.detach(), before * 1e6)
    rest = [p.detach() for p in model.parameters() if p is not weight]
    assert all(map(torch.equal, others, rest))


@pytest.mark.parametrize("preset", ["mini", "350m"])
@pytest.mark.large
def test_step_of_a_preset_in_bf16_is_finite_and_keeps_little(preset):
    """At T = 4096: what is kept beside two states is choices alone."""
    torch.manual_seed(1)
    model = HybridLM(HYBRID[preset]).cuda()
    tokens = torch.randint(HYBRID[preset].vocab_size, (1, 4097), device="cuda")
    found = stepped(model, tokens)
    assert all(x.isfinite().all() for x in found)
    following = found[1].item()
    assert abs(following - torch.log(torch.tensor(float(model.config.vocab_size))).item()) < 0.5
    with bf16():
        kept = model.losses(tokens).tape_bytes
    sparse = sum(model.config.is_sparse(place) for place in range(model.config.layers))
    assert kept == sparse * 4096 * (model.config.k_max + 1) * 4


def test_sequence_read_in_pieces_is_read_whole():
    """In fp64 by the reference on the GPU: caches lie where the model does."""
    model = make("reference").double().eval()
    tokens = draw(2, 70)
    with torch.no_grad():
        whole = model(tokens)
    caches, found = None, []
    for piece in tokens.split([50, 1, 1, 18], 1):
        hidden, caches = model.read(piece, caches)
        found.append(hidden)
    unit = 2.0**-model.config.fraction_bits
    assert (torch.cat(found, 1) - whole).abs().max() < model.config.layers * unit
