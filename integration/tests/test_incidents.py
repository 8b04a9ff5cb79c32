"""What goes wrong without ending a run is told once each time, with what was done."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import torch
from fusewright_models.training import adamw
from fusewright_models.training.reporting import incidents
from fusewright_models.training.reporting.incidents import FEWEST, Incidents

from .test_training import CONFIG, Normal, linear_trainer, regression_loss
from .trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("without_pictures")


def lines(count):
    """Of log points in every second step: losses that fall a little and wave."""
    for number in range(count):
        wave = 0.01 * (-1) ** number
        line = {"loss": 2.0 - 0.01 * number + wave, "gradient_norm": 1.0 + wave, "lr": 0.1}
        yield line | {"seconds": 4.0 + wave, "step": 2 * number + 2}


def after(*more):
    """What is told of lines that follow ordinary ones, of which nothing is."""
    found = Incidents(clip_norm=0.5)
    before = list(lines(FEWEST + 2))
    assert [found.look(line) for line in before] == [[]] * len(before)
    told = []
    for number, changes in enumerate(more):
        step = before[-1]["step"] + 2 * (number + 1)
        told.append(found.look(before[-1] | {"step": step} | changes))
    return told


CUT = "gradients were cut to a norm of 0.5 as ever, and nothing else done"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": 3.0}, f"steps 21 to 22: loss 3, after 1.955; {CUT}"),
        ({"gradient_norm": 11.0}, f"steps 21 to 22: gradient norm 11, after 1; {CUT}"),
        (
            {"seconds": 60.0},
            "steps 21 to 22: 60 s, after 4.0 s for as many before; data or device were waited for, "
            "and nothing done",
        ),
        (
            {"skipped_steps": 1},
            "steps 21 to 22: 1 skipped, with losses or gradients that are not finite; parameters "
            "and moments are as if they had not been taken",
        ),
    ],
    ids=["loss", "gradient-norm", "seconds", "skipped"],
)
def test_incident_is_told_once_and_again_after_it_was_over(change, text):
    first, second, over, again = after(change, change, {}, change)
    assert (first, second, over) == ([text], [], [])
    # What was usual has moved on.
    (found,) = again
    assert found.split(", after")[0] == text.replace("21 to 22", "27 to 28").split(", after")[0]


@pytest.mark.parametrize(
    "change",
    [{"loss": 2.05}, {"gradient_norm": 9.0}, {"seconds": 13.0}, {"seconds": 19.0}],
    ids=["loss", "gradient-norm", "seconds", "many-seconds"],
)
def test_what_may_be_expected_is_no_incident(change):
    assert after(change) == [[]]


def test_first_lines_and_evaluations_are_no_incidents():
    found = Incidents(1.0)
    assert found.look({"step": 0, "held_out_log_likelihood": -9.0}) == []
    for line in lines(FEWEST - 1):
        assert found.look(line) == []
    assert (
        found.look({"step": 99, "loss": 1e9, "gradient_norm": 1e9, "lr": 1.0, "seconds": 1e9}) == []
    )


def output(trainer):
    return trainer.console.file.getvalue()


def test_skipped_steps_are_told_as_they_are_noted_and_a_resumed_run_tells_no_more(tmp_path):
    config = replace(CONFIG, steps=20, evaluate_every=20, checkpoint_every=2)

    def trained(until=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1, bias=False)
        # It skips steps by itself where it clips.
        optimizer = adamw(model, lr=0.1, weight_decay=0.01, clip_norm=1.0)
        trainer = quiet_trainer(tmp_path, model, Normal(), regression_loss, optimizer, config)
        if until is None:
            trainer.resume()
        plain = trainer.stepper.loss_function

        def infinite_at_times(model, batch):
            bad = trainer.step in (4, 5, 6, 12)
            return plain(model, batch) * (float("inf") if bad else 1.0)

        trainer.stepper.loss_function = infinite_at_times
        trainer.run(until)
        return re.findall(r"steps \d+ to \d+: \d skipped", output(trainer))

    assert trained(until=6) == ["steps 5 to 6: 2 skipped"]
    # Steps 7 and 8 are of the same series.
    assert trained() == ["steps 13 to 14: 1 skipped"]


def test_step_that_does_not_end_is_told_of_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(incidents, "PATIENCE", 0.05)
    trainer = linear_trainer(tmp_path)
    sample = trainer.source.sample

    def slow(size):
        if trainer.step == 3:
            time.sleep(0.3)
            assert output(trainer).count("nothing has ended for 0.05 s since step 3") == 1
        return sample(size)

    trainer.source.sample = slow
    trainer.run()
    assert not trainer.watch.thread.is_alive()
