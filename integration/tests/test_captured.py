"""What is replayed and what is not, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from fusewright.optimizer import DeepNestedOptimizer
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data import make_sampler
from fusewright_models.data.sizes import MOST_CAPACITIES
from fusewright_models.text import TextBatch
from fusewright_models.training import (
    OPTIMIZER_NAMES,
    Trainer,
    TrainingConfig,
    captured,
    held_batches,
    make_optimizer,
)
from fusewright_models.training.captured import WARM_UP, CapturedStepper
from fusewright_models.training.held_batches import shape_of, tensors_of, with_tensors

from .stood import Stood, leave_out_streams
from .trainers import assert_same_bits, quiet_trainer, tiny, training_lines

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = TrainingConfig(steps=44, batch_size=2, warmup_steps=4, log_every=4, evaluate_every=20)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    leave_out_streams(monkeypatch)


def make(path, *, stood, name="adamw", ragged=True, padded=False, gives=None, **changes) -> Trainer:
    """``gives`` says by batch, and by the number of it, whether one parameter more gets a
    gradient.
    """
    model, source, loss = tiny("transformer-np", ragged=ragged, padded=padded)
    if gives is not None:
        model.extra = torch.nn.Parameter(torch.ones(2, 3))
        numbers = itertools.count()

        def loss(model, batch):
            found = negative_log_likelihood(model, batch)
            return found + model.extra.square().mean() if gives(batch, next(numbers)) else found

    config = replace(CONFIG, **changes)
    optimizer = make_optimizer(name, model, lr=1e-3, weight_decay=0.1, clip_norm=config.clip_norm)
    trainer = quiet_trainer(path, model, source, loss, optimizer, config)
    if stood:
        trainer.stepper = Stood(model, loss, optimizer, config, say=trainer.record.say)
    return trainer


def both(path, **options) -> list[Trainer]:
    """Eager and replayed."""
    return [make(path / str(stood), stood=stood, **options) for stood in (False, True)]


def run_both(path, **options) -> list[Trainer]:
    trainers = both(path, **options)
    for trainer in trainers:
        trainer.run()
    return trainers


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_replays_and_eager_steps_make_one_training(tmp_path, name):
    one, other = run_both(tmp_path, name=name)
    patterns = 2 if name in ("m3", "nested") else 1
    assert len(other.stepper.graphs) == 1 + patterns
    assert_same_bits(one, other)


def test_accumulated_batches_of_many_shapes_are_replayed(tmp_path):
    changes = {"accumulation_steps": 3, "ragged": False, "steps": 60}
    one, other = run_both(tmp_path, **changes)
    kinds = {key[1] for key in other.stepper.graphs if key is not None}
    # The first batch of a step and the others are graphs of their own.
    assert kinds == {True, False}
    assert_same_bits(one, other)


def test_shapes_beyond_the_most_stay_eager_and_are_told_of_once(tmp_path, monkeypatch):
    for module in (captured, held_batches):
        monkeypatch.setattr(module, "MOST_SHAPES", 3)
    one, other = run_both(tmp_path, ragged=False)
    assert other.console.file.getvalue().count("of more than 3 shapes of batches") == 1
    assert len(other.stepper.batches) == 3
    assert_same_bits(one, other)


def test_few_graphs_serve_the_sizes_of_padded_batches(tmp_path):
    one, other = run_both(tmp_path, ragged=False, padded=True, steps=64)
    shapes = len(other.stepper.batches)
    assert 10 < shapes <= MOST_CAPACITIES
    # Of each shape but those that came late, and the optimizer's.
    assert len(other.stepper.graphs) > shapes - 5
    assert_same_bits(one, other)
    for line in training_lines(other):
        rates = line["tokens_per_second"], line["padded_tokens_per_second"]
        tokens, padding = (rate * line["seconds"] for rate in rates)
        # A digit has 64 pixels, and one or two more rows where it is padded.
        assert tokens == pytest.approx(64 * CONFIG.batch_size * CONFIG.log_every)
        assert 0.0 < padding < tokens / 16


def test_capture_that_fails_leaves_the_training_as_it_is(tmp_path):
    one, other = trainers = both(tmp_path, name="m3")
    other.stepper.fails = True
    for trainer in trainers:
        trainer.run()
    assert not other.stepper.graphs
    assert other.console.file.getvalue().count("steps are eager: it cannot be") == 1
    assert_same_bits(one, other)


def test_capture_that_fails_later_lets_go_of_the_graphs(tmp_path):
    one, other = trainers = both(tmp_path, name="nested")
    for trainer in trainers:
        trainer.run(until=10)
    stepper = other.stepper
    assert stepper.graphs
    # The steps in which it learns have not been captured.
    stepper.fails = True
    for trainer in trainers:
        trainer.run()
    assert stepper.failed
    assert not stepper.graphs
    assert not stepper.batches
    assert_same_bits(one, other)


def test_levels_of_a_continuum_are_not_captured():
    optimizer = DeepNestedOptimizer(torch.nn.Linear(2, 1), update="continuum")
    assert "levels of a continuum fire by the host's count" in captured.obstacle(optimizer)


def test_capture_that_is_asked_for_and_fails_is_an_error(tmp_path):
    trainer = make(tmp_path, stood=True)
    trainer.stepper.fails = True
    trainer.stepper.config = replace(CONFIG, capture=True)
    with pytest.raises(RuntimeError, match="wanted steps that are captured; it cannot be"):
        trainer.run()
    assert trainer.step == WARM_UP


def test_graphs_are_forgotten_where_a_checkpoint_is_loaded(tmp_path):
    whole = make(tmp_path / "whole", stood=True, name="nested")
    whole.run()
    again = make(tmp_path / "parts", stood=True, name="nested")
    again.run(until=27)
    assert again.stepper.graphs
    again.resume()
    assert not again.stepper.graphs
    again.run()
    assert_same_bits(whole, again)


def of_some_shapes(batch, number):
    return batch.x_context.shape[1] % 2 == 0


# When a parameter has gradients: in batches of some shapes; in the second one of every step; in the
# first one of every other step; from a step on, when the others have been captured; and until it.
SOMETIMES = {
    "shapes": (of_some_shapes, {"ragged": False}),
    "batches": (lambda batch, number: number % 3 == 1, {"accumulation_steps": 3}),
    "first": (lambda batch, number: number % 6 == 0, {"accumulation_steps": 3}),
    "late": (lambda batch, number: number >= 15, {}),
    "not late": (lambda batch, number: number < 15, {}),
}
TOLD = "not all batches give gradients to the same parameters"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "adamw") for kind in SOMETIMES), ("late", "nested")]
)
def test_parameter_with_gradients_of_some_batches_leaves_an_eager_run(tmp_path, kind, name):
    gives, changes = SOMETIMES[kind]
    one, other = run_both(tmp_path, name=name, gives=gives, steps=24, **changes)
    assert other.stepper.failed
    assert not other.stepper.graphs
    assert not other.stepper.held.gradients
    assert other.console.file.getvalue().count(f"steps are eager: {TOLD}") == 1
    assert_same_bits(one, other)


@pytest.mark.parametrize("kind", SOMETIMES)
def test_parameter_with_gradients_of_some_batches_is_an_error_of_capture(tmp_path, kind):
    gives, changes = SOMETIMES[kind]
    trainer = make(tmp_path, stood=True, gives=gives, **changes)
    trainer.stepper.config = replace(trainer.config, capture=True)
    with pytest.raises(RuntimeError, match=f"wanted steps that are captured; {TOLD}"):
        trainer.run()


def test_capture_on_the_cpu_is_refused_and_auto_is_silent(tmp_path):
    trainer = make(tmp_path, stood=False)
    assert not isinstance(trainer.stepper, CapturedStepper)
    assert trainer.console.file.getvalue() == ""
    message = "wanted steps that are captured; the parameters are on cpu, and CUDA graphs want"
    with pytest.raises(ValueError, match=message):
        make(tmp_path, stood=False, capture=True)
    with pytest.raises(ValueError, match="capture must be True, False or 'auto'; got 'always'"):
        make(tmp_path, stood=False, capture="always")


def test_batches_of_one_shape_share_a_graph():
    ragged = make_sampler("digits", ragged=True)
    batches = [ragged.sample(3), ragged.sample(3), ragged.sample(2)]
    assert shape_of(batches[0]) == shape_of(batches[1]) != shape_of(batches[2])
    # Without lengths the model computes something else.
    assert shape_of(batches[0]) != shape_of(replace(batches[0], context_lengths=None))
    windows = torch.zeros(2, 5, dtype=torch.int64)
    assert shape_of(TextBatch(windows)) != shape_of(TextBatch(windows.int()))
    assert shape_of({"windows": windows}) is None


def test_tensors_of_a_batch_are_put_in_their_places():
    @dataclass(frozen=True)
    class Nested:
        rows: torch.Tensor
        more: dict
        tokens: int = 7

    first, second = torch.zeros(2), torch.ones(3)
    batch = Nested(first, {"a": second, "b": "text"})
    assert [x is y for x, y in zip(tensors_of(batch), (first, second), strict=True)] == [True] * 2
    other = with_tensors(batch, [second, first])
    assert other.rows is second
    assert other.more["a"] is first
    assert (other.more["b"], other.tokens) == ("text", 7)
