"""Steps that are replayed from CUDA graphs have the bits of eager ones."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch
from fusewright_models.cli.titan_mac import next_token_loss
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data.sizes import MOST_CAPACITIES
from fusewright_models.training import (
    OPTIMIZER_NAMES,
    Trainer,
    TrainingConfig,
    make_optimizer,
)
from fusewright_models.training.captured import CapturedStepper
from fusewright_testkit import no_synchronisation
from rich.console import Console

from . import trainers as of_trainers
from .trainers import MODELS, quiet_trainer, score_of, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_pictures")]
CONFIG = TrainingConfig(
    steps=44, batch_size=4, warmup_steps=4, precision="bf16", log_every=4, evaluate_every=20
)
# Chunks of M3 and the steps in which a nested optimizer learns are captured in the third one; the
# steps of others, each of which is host time where it is eager, before that.
FEW = 24


def make(
    path,
    model_name,
    *,
    capture,
    name="adamw",
    ragged=True,
    padded=False,
    data="digits",
    loss=None,
    extra=False,
    held_out=False,
    **changes,
) -> Trainer:
    """With ``extra`` the model has a parameter of that name that the plain loss does not know; with
    ``held_out`` evaluations are what the programs' are.
    """
    given = {"ragged": ragged, "padded": padded, "data": data}
    model, source, plain = tiny(model_name, device="cuda", length=100, **given)
    if extra:
        model.extra = torch.nn.Parameter(torch.ones(2, 3, device="cuda"))
    config = replace(CONFIG, capture=capture, **changes)
    optimizer = make_optimizer(name, model, lr=1e-3, weight_decay=0.1, clip_norm=config.clip_norm)
    rows = source.sample(8)

    def evaluation() -> dict[str, float]:
        if held_out:
            return score_of(model_name, model, trainer.stepper.scored, device="cuda")
        with torch.no_grad():
            return {"score": float(plain(model, rows))}

    parts = model, source, loss or plain, optimizer, config
    trainer = quiet_trainer(path, *parts, evaluate=evaluation)
    return trainer


def run_both(path, model_name, **options) -> list[Trainer]:
    """Eager and captured."""
    trainers = [
        make(path / str(capture), model_name, capture=capture, **options)
        for capture in (False, True)
    ]
    for trainer in trainers:
        trainer.run()
    return trainers


def assert_same_bits(one: Trainer, other: Trainer) -> None:
    of_trainers.assert_same_bits(one, other)
    assert len({line["loss"] for line in of_trainers.training_lines(one)}) > 5


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_captured_training_has_the_bits_of_eager_training(tmp_path, model, name):
    patterns = 2 if name in ("m3", "nested") else 1
    steps = FEW if patterns == 1 else CONFIG.steps
    trainers = run_both(tmp_path, model, name=name, steps=steps)
    stepper = trainers[1].stepper
    assert isinstance(stepper, CapturedStepper)
    # Forward and backward pass, and a step for each pattern; the first of "nested" comes once.
    assert len(stepper.graphs) == 1 + patterns
    assert_same_bits(*trainers)


@pytest.mark.parametrize("model", MODELS)
def test_captured_evaluations_have_the_numbers_of_eager_ones(tmp_path, model):
    """Between captured steps, whose graphs use the same memory."""
    options = {"held_out": True, "evaluate_every": 4, "steps": FEW}
    one, other = run_both(tmp_path, model, **options)
    assert_same_bits(one, other)
    # Each has three shapes of batches.
    assert len(other.stepper.scores) == 3
    assert len(other.stepper.graphs) == 2 + 3
    assert "eager" not in other.console.file.getvalue()


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_batches_are_captured(tmp_path, model):
    trainers = run_both(tmp_path, model, accumulation_steps=3)
    # The first batch finds no gradients, the others do.
    assert len(trainers[1].stepper.graphs) == 3
    assert_same_bits(*trainers)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_losses_are_captured(tmp_path, model):
    trainers = run_both(tmp_path, model, compile=True)
    assert_same_bits(*trainers)


def test_batches_of_many_shapes_are_captured_each(tmp_path):
    trainers = run_both(tmp_path, "transformer-np", ragged=False, steps=150)
    assert len(trainers[1].stepper.graphs) > 10
    assert_same_bits(*trainers)


def test_shapes_beyond_the_most_stay_eager(tmp_path, monkeypatch):
    for module in ("captured", "held_batches"):
        monkeypatch.setattr(f"fusewright_models.training.{module}.MOST_SHAPES", 3)
    trainers = run_both(tmp_path, "transformer-np", ragged=False, steps=100)
    assert trainers[1].console.file.getvalue().count("more than 3 shapes of batches") == 1
    assert_same_bits(*trainers)


DRAWN = {"ragged": False, "padded": True, "data": "gp-matern"}


def test_few_graphs_serve_300_drawn_sizes(tmp_path):
    trainers = run_both(tmp_path, "transformer-np", **DRAWN, steps=300)
    stepper = trainers[1].stepper
    assert 10 < len(stepper.batches) <= MOST_CAPACITIES
    # Each has been drawn often enough, and the optimizer's is one more.
    assert len(stepper.graphs) == len(stepper.batches) + 1
    assert "shapes of batches" not in trainers[1].console.file.getvalue()
    assert_same_bits(*trainers)


def test_replayed_steps_of_padded_batches_do_not_synchronise(tmp_path):
    changes = {"steps": 300, "log_every": 300, "evaluate_every": 300}
    trainer = make(tmp_path, "transformer-np", capture=True, **DRAWN, **changes)
    trainer.run(until=250)
    with no_synchronisation():
        trainer.run(until=299)
    trainer.run()


def test_resumed_run_of_padded_batches_equals_uninterrupted_run(tmp_path):
    whole = make(tmp_path / "whole", "transformer-np", capture=True, **DRAWN)
    whole.run()
    make(tmp_path / "parts", "transformer-np", capture=True, **DRAWN).run(until=27)
    rest = make(tmp_path / "parts", "transformer-np", capture=True, **DRAWN)
    rest.resume()
    assert rest.step == 20
    rest.run()
    assert_same_bits(whole, rest)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_resumed_run_equals_uninterrupted_run(tmp_path, name):
    whole = make(tmp_path / "whole", "titan-mac", capture=True, name=name)
    whole.run()
    make(tmp_path / "parts", "titan-mac", capture=True, name=name).run(until=27)
    rest = make(tmp_path / "parts", "titan-mac", capture=True, name=name)
    rest.resume()
    assert rest.step == 20
    rest.run()
    assert_same_bits(whole, rest)


def test_trainer_that_has_captured_resumes_from_its_checkpoint(tmp_path):
    """The graphs know memory of before."""
    whole = make(tmp_path / "whole", "titan-mac", capture=True)
    whole.run()
    again = make(tmp_path / "parts", "titan-mac", capture=True)
    again.run(until=27)
    again.resume()
    again.run()
    assert_same_bits(whole, again)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_replayed_steps_do_not_synchronise(tmp_path, name):
    trainer = make(tmp_path, "titan-mac", capture=True, name=name, log_every=50, evaluate_every=50)
    trainer.run(until=34)
    with no_synchronisation():
        trainer.run(until=43)
    trainer.run()


@pytest.mark.parametrize("capture", ["auto", True])
def test_loss_that_waits_for_the_device_is_told_of(tmp_path, capture):
    def waiting(model, batch):
        loss = next_token_loss(model, batch)
        assert float(loss) == float(loss)
        return loss

    trainer = make(tmp_path, "titan-mac", capture=capture, loss=waiting)
    if capture is True:
        with pytest.raises(RuntimeError, match="wanted steps that are captured"):
            trainer.run()
    else:
        trainer.run()
    # Whatever the broken capture has used draws again.
    assert 0 <= torch.rand((), device="cuda").item() < 1
    if capture is True:
        return
    assert trainer.console.file.getvalue().count("steps are eager: ") == 1
    eager = make(tmp_path / "eager", "titan-mac", capture=False)
    eager.run()
    assert_same_bits(eager, trainer)


def of_some_shapes(batch):
    return batch.x_context.shape[1] % 2 == 0


def of_captures(batch):
    return torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("gives", [of_some_shapes, of_captures])
@pytest.mark.parametrize("capture", ["auto", True])
def test_parameter_with_gradients_of_some_batches_is_told_of(tmp_path, capture, gives):
    def sometimes(model, batch):
        loss = negative_log_likelihood(model, batch)
        return loss + model.extra.square().mean() if gives(batch) else loss

    common = {"loss": sometimes, "ragged": gives is of_captures, "extra": True}
    trainer = make(tmp_path, "transformer-np", capture=capture, **common)
    told = "not all batches give gradients to the same parameters"
    if capture is True:
        with pytest.raises(RuntimeError, match=f"wanted steps that are captured; {told}"):
            trainer.run()
        return
    trainer.run()
    assert trainer.console.file.getvalue().count(f"steps are eager: {told}") == 1
    eager = make(tmp_path / "eager", "transformer-np", capture=False, **common)
    eager.run()
    assert_same_bits(eager, trainer)


def test_optimizer_whose_rate_is_the_hosts_is_told_of(tmp_path):
    model = torch.nn.Linear(2, 1, device="cuda")
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([model.bias])):
        console = Console(file=StringIO(), width=400)
        common = (model, None, lambda model, batch: None, optimizer)
        Trainer(*common, replace(CONFIG, capture="auto"), None, console=console)
        told = console.file.getvalue()
        assert f"a learning rate of torch.{type(optimizer).__name__} is a number" in told
        with pytest.raises(ValueError, match="wanted steps that are captured; a learning rate of"):
            Trainer(*common, replace(CONFIG, capture=True), None, console=console)


def test_replays_train_faster_than_the_host(tmp_path):
    """TitanMAC is some hundreds of launches a block: what a graph is for."""
    rates = []
    for capture in (False, True):
        trainer = make(tmp_path / str(capture), "titan-mac", capture=capture, steps=60)
        trainer.run()
        rates.append(trainer.folder.read_metrics()[-2]["tokens_per_second"])
    assert rates[1] > 1.5 * rates[0]
