"""Every optimizer of the training program trains every model, and is taken up again to the bit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fusewright.optimizer import M3, DeepNestedOptimizer, LearnedOptimizer
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.cli.presets import TRANSFORMER_NP
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.text import Windows
from fusewright_models.training import (
    OPTIMIZER_NAMES,
    RunFolder,
    Trainer,
    TrainingConfig,
    default_decay,
    make_optimizer,
)
from fusewright_models.training.optimization import hidden_matrices
from fusewright_models.training.optimizer_traits import OURS, network_digest
from torch.utils import _pytree as pytree

from .trainers import (
    MODELS,
    assert_same_bits,
    assert_same_state,
    quiet_trainer,
    tiny,
    training_lines,
)

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = TrainingConfig(steps=24, batch_size=4, warmup_steps=2, log_every=4, evaluate_every=12)
every_optimizer = pytest.mark.parametrize("name", OPTIMIZER_NAMES)


@pytest.fixture
def make_trainer(weights):
    """A trainer of the smallest preset of a model, from one seed."""

    def make(path, model_name, name, config=CONFIG, *, dtype=torch.float32, **options) -> Trainer:
        model, source, loss = tiny(model_name)
        optimizer = make_optimizer(
            name,
            model.to(dtype),
            # The network by hand moves every element by a hundredth of it.
            lr=0.2 if name == "learned" else 2e-3,
            weight_decay=default_decay(name, 0.1),
            clip_norm=config.clip_norm,
            weights=weights if name == "learned" else None,
        )
        return quiet_trainer(path, model, source, loss, optimizer, config, **options)

    return make


@pytest.mark.sampled
@pytest.mark.parametrize("model", MODELS)
@every_optimizer
def test_loss_falls(tmp_path, make_trainer, model, name):
    config = replace(CONFIG, steps=12, evaluate_every=12)
    trainer = make_trainer(tmp_path, model, name, config)
    trainer.run()
    losses = [line["loss"] for line in training_lines(trainer)]
    assert losses == sorted(losses, reverse=True)
    assert all(line["gradient_norm"] > 0.0 for line in training_lines(trainer))


@pytest.mark.sampled
@every_optimizer
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path, make_trainer, name):
    """Chunks of M3 and the steps in which a nested optimizer learns lie on both sides."""
    whole, rest = (make_trainer(tmp_path / p, "transformer-np", name) for p in ("whole", "parts"))
    whole.run()
    make_trainer(tmp_path / "parts", "transformer-np", name).run(until=14)
    rest.resume()
    assert rest.step == 12
    rest.run()
    assert_same_bits(whole, rest)
    assert_same_state(whole, rest)


def test_checkpoint_of_another_optimizer_is_refused(tmp_path, make_trainer):
    make_trainer(tmp_path, "transformer-np", "adamw").run(until=12)
    other = make_trainer(tmp_path, "transformer-np", "torch-adamw")
    before = [p.clone() for p in other.model.parameters()]
    wanted = r"wanted the state of a torch\.AdamW in .*; got that of a fusewright\.AdamW"
    with pytest.raises(ValueError, match=wanted):
        other.resume()
    assert all(map(torch.equal, before, other.model.parameters()))


def test_checkpoint_of_another_network_is_refused(tmp_path, make_trainer):
    make_trainer(tmp_path, "transformer-np", "learned").run(until=12)
    other = make_trainer(tmp_path, "transformer-np", "learned")
    with torch.no_grad():
        other.optimizer.mlp.last.bias[0] += 1.0
    other = Trainer(
        other.model, other.source, negative_log_likelihood, other.optimizer, CONFIG, other.folder
    )
    before = [p.clone() for p in other.model.parameters()]
    drawn = pytree.tree_leaves(other.source.state_dict())
    with pytest.raises(ValueError, match=r"with the network of digest \w{64} in .*; got one with"):
        other.resume()
    assert all(map(torch.equal, before, other.model.parameters()))
    assert str(drawn) == str(pytree.tree_leaves(other.source.state_dict()))


def test_digest_is_of_weights_and_multipliers(weights):
    def digest(**changes) -> str | None:
        model = torch.nn.Linear(2, 1)
        numbers = {"lr": 1.0, "weight_decay": 0.0, "clip_norm": 1.0}
        optimizer = make_optimizer("learned", model, weights=weights, **numbers)
        vars(optimizer.mlp).update(changes)
        return network_digest(optimizer)

    assert digest() == digest()
    assert len({digest(), digest(step_mult=0.02), digest(exp_mult=0.002)}) == 3
    assert network_digest(torch.optim.SGD([torch.ones(1)])) is None


def test_checkpoint_of_other_data_leaves_the_model_as_it_was(tmp_path, make_trainer):
    make_trainer(tmp_path, "titan-mac", "adamw").run(until=12)
    other = make_trainer(tmp_path, "titan-mac", "adamw")
    other.source = Windows(torch.zeros(4096).long(), length=64, digest="other")
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(ValueError, match="wanted the data that the run was begun with"):
        other.resume()
    assert all(map(torch.equal, before, other.model.parameters()))


@pytest.mark.parametrize("corrupt", [lambda state: {}, lambda state: state | {"state": 3}])
def test_damaged_state_of_an_optimizer_is_refused(tmp_path, make_trainer, corrupt):
    trainer = make_trainer(tmp_path, "transformer-np", "torch-adamw")
    trainer.run(until=12)
    state = trainer.folder.load_checkpoint()
    trainer.folder.save_checkpoint(state | {"optimizer": corrupt(state["optimizer"])})
    with pytest.raises(ValueError, match=r"wanted this model's checkpoint in .*; got: "):
        trainer.resume()


@pytest.mark.parametrize("name", ["m3", "muon"])
def test_gradients_whose_squares_overflow_are_clipped(tmp_path, make_trainer, name):
    trainer = make_trainer(tmp_path, "transformer-np", name, replace(CONFIG, log_every=1))
    plain = trainer.stepper.loss_function
    trainer.stepper.loss_function = lambda model, batch: plain(model, batch) * 1e25
    trainer.run(until=1)
    (line,) = training_lines(trainer)
    assert "skipped_steps" not in line
    assert 1e20 < line["gradient_norm"] < math.inf


def test_adamw_trains_as_torchs_whose_gradients_are_clipped_before(
    tmp_path, make_trainer, assert_same_but_for_rounding
):
    """Nothing is clipped twice, and the norm is the one before clipping; every step from equal
    parameters.
    """
    config = replace(CONFIG, clip_norm=0.02, steps=8, log_every=1, evaluate_every=8)
    trainers = [
        make_trainer(tmp_path / name, "transformer-np", name, config, dtype=torch.float64)
        for name in ("adamw", "torch-adamw")
    ]
    ours, theirs = ([p.detach() for p in trainer.model.parameters()] for trainer in trainers)
    for step in range(1, config.steps + 1):
        for trainer in trainers:
            trainer.run(until=step)
        # Roundings of a gradient near zero are large beside it, and AdamW divides by its size.
        assert_same_but_for_rounding(ours, theirs, condition=1e6)
        trainers[0].model.load_state_dict(trainers[1].model.state_dict())
    norms = [[line["gradient_norm"] for line in training_lines(t)] for t in trainers]
    assert min(norms[0]) > 2 * config.clip_norm
    # fusewright's norm is told in fp32.
    assert norms[0] == pytest.approx(norms[1], rel=8 * torch.finfo(torch.float32).eps)


def corrupted(trainer: Trainer, calls: set[int]) -> Trainer:
    """Losses of these calls are not finite."""
    plain, seen = trainer.stepper.loss_function, []

    def loss(model, batch):
        seen.append(batch)
        return plain(model, batch) * (math.nan if len(seen) in calls else 1.0)

    trainer.stepper.loss_function = loss
    return trainer


@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "torch-adamw"])
def test_step_that_is_not_finite_is_skipped_and_told(tmp_path, make_trainer, name):
    trainer = corrupted(make_trainer(tmp_path, "transformer-np", name), {3})
    trainer.run(until=2)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.run(until=3)
    assert isinstance(trainer.optimizer, OURS)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    trainer.run(until=8)
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    first, second = training_lines(trainer)
    assert first["skipped_steps"] == 1
    assert "skipped_steps" not in second
    assert math.isfinite(first["loss"])
    assert math.isfinite(first["gradient_norm"])


def test_means_are_of_the_steps_that_were_taken(tmp_path, make_trainer):
    whole = make_trainer(tmp_path / "whole", "transformer-np", "adamw")
    skipping = make_trainer(tmp_path / "skipping", "transformer-np", "adamw")
    whole.run(until=3)
    corrupted(skipping, {4}).run(until=4)
    # The first three are the same; the fourth counts for nothing.
    means = whole.stepper.means()
    assert training_lines(skipping)[0]["loss"] == means.loss
    assert training_lines(skipping)[0]["gradient_norm"] == means.gradient_norm
    assert means.taken == 3


def test_run_whose_losses_stay_not_finite_is_stopped(tmp_path, make_trainer):
    config = replace(CONFIG, steps=28)
    trainer = corrupted(
        make_trainer(tmp_path, "transformer-np", "adamw", config), set(range(14, 99))
    )
    with pytest.raises(
        FloatingPointError, match="the last 11 steps up to 24 were skipped in a row"
    ):
        trainer.run()
    lines = trainer.folder.read_metrics()
    assert [line.get("skipped_steps") for line in lines] == [None] * 3 + [3, 4]
    # Of no steps there is no mean.
    assert ["loss" in line and "gradient_norm" in line for line in lines] == [True] * 4 + [False]
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 12


def test_skipped_step_ends_no_run_whose_log_points_are_one_step_apart(tmp_path, make_trainer):
    config = replace(CONFIG, log_every=1)
    trainer = corrupted(
        make_trainer(tmp_path, "transformer-np", "muon", config), {1, *range(3, 12)}
    )
    trainer.run()
    skipped = [line.get("skipped_steps", 0) for line in trainer.folder.read_metrics()]
    assert skipped == [1, 0, *[1] * 9, *[0] * 13]


def test_skipped_steps_are_counted_on_where_a_run_is_resumed(tmp_path, make_trainer):
    """Seven before the checkpoint and three after it."""
    corrupted(make_trainer(tmp_path, "transformer-np", "adamw"), {*range(6, 99)}).run(until=12)
    rest = corrupted(make_trainer(tmp_path, "transformer-np", "adamw"), {1, 2, 3, 4})
    rest.resume()
    with pytest.raises(
        FloatingPointError, match="the last 11 steps up to 16 were skipped in a row"
    ):
        rest.run()


def test_parameters_that_are_not_finite_reach_no_checkpoint(tmp_path, make_trainer):
    """A last step may corrupt them, which its loss does not tell."""
    trainer = make_trainer(tmp_path, "transformer-np", "adamw")
    trainer.run(until=11)
    step = trainer.optimizer.step

    def spoiling():
        step()
        with torch.no_grad():
            next(trainer.model.parameters())[0, 0] = math.inf

    trainer.optimizer.step = spoiling
    with pytest.raises(FloatingPointError, match="parameters after step 12: not finite"):
        trainer.run()
    assert not trainer.folder.holds_a_checkpoint


@every_optimizer
def test_vectors_do_not_decay_and_every_parameter_is_taken_once(tmp_path, make_trainer, name):
    trainer = make_trainer(tmp_path, "titan-mac", name)
    groups = trainer.optimizer.param_groups
    taken = Counter(id(p) for group in groups for p in group["params"])
    assert taken == Counter(map(id, trainer.model.parameters()))
    for group in groups:
        for p in group["params"]:
            if p.ndim < 2:
                assert group["weight_decay"] == 0.0
            elif name != "learned":
                # What a step takes of a matrix: as M3 scales its rates.
                decay = group["weight_decay"] * group["lr"]
                assert decay == pytest.approx(0.1 * 2e-3)


def test_hidden_matrices_are_those_between_embedding_and_head():
    models = [
        TitanMAC(TITAN_MAC["tiny"]),
        TransformerNP(TransformerNPConfig(x_width=2, **TRANSFORMER_NP["tiny"].architecture)),
    ]
    found = []
    for model in models:
        hidden = set(map(id, hidden_matrices(model)))
        names = [name for name, p in model.named_parameters() if id(p) in hidden]
        found.append(
            [name.removeprefix("blocks.0.") for name in names if name.startswith("blocks.0.")]
        )
        assert len(names) == 2 * len(found[-1])
    assert found[0] == [
        "layers.0.attention.query.weight",
        "layers.0.attention.key_value.weight",
        "layers.0.output.weight",
        "layers.0.memory.projections.joint.weight",
        "layers.0.memory.output.weight",
        "layers.0.gate.linear.weight",
        "feed_forward.joint.weight",
        "feed_forward.output.weight",
    ]
    assert found[1] == [
        "attention.query.weight",
        "attention.key_value.weight",
        "attention.output.weight",
        "feed_forward.hidden.weight",
        "feed_forward.output.weight",
    ]


@every_optimizer
def test_stored_columns_that_are_not_used_stay_zero(tmp_path, make_trainer, name):
    trainer = make_trainer(tmp_path, "transformer-np", name)
    trainer.run(until=3)
    assert sum(unused.numel() for unused in trainer.model.padding()) > 0
    assert not any(unused.any() for unused in trainer.model.padding())


@pytest.mark.sampled
@every_optimizer
def test_steps_between_log_points_read_nothing_on_the_host(
    tmp_path, make_trainer, host_reads, name
):
    """Among them some in which M3's slow momentum fires and a nested controller learns."""
    config = replace(CONFIG, log_every=24, evaluate_every=24)
    trainer = make_trainer(tmp_path, "transformer-np", name, config)
    with host_reads:
        trainer.run(until=12)
    assert host_reads.count == 0


def test_controller_of_the_nested_optimizer_learns(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "transformer-np", "nested")
    trainer.run(until=24)
    assert isinstance(trainer.optimizer, DeepNestedOptimizer)
    multipliers = trainer.optimizer.get_lr_multipliers()
    assert set(multipliers) == {"core", "embed", "vectors"}
    assert all(m != 1.0 for m in multipliers.values())


def test_slow_momentum_of_m3_moves_parameters(tmp_path, make_trainer):
    trainer = make_trainer(tmp_path, "transformer-np", "m3")
    trainer.run(until=12)
    assert isinstance(trainer.optimizer, M3)
    hidden = hidden_matrices(trainer.model)
    assert all(trainer.optimizer.state[p]["slow_direction"].any() for p in hidden)


def test_shipped_network_makes_the_step_where_no_file_is_given():
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer("learned", model, lr=1.0, weight_decay=0.0, clip_norm=1.0)
    assert isinstance(optimizer, LearnedOptimizer)
    (3.0 * model(torch.ones(4, 3))).square().mean().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
