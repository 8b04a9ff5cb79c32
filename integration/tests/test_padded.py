"""Batches of drawn sizes in tensors of a few: padding has no part in anything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data import DATA_NAMES, Sampler, Size, Task, evaluate, make_sampler
from fusewright_models.data.sizes import MOST_CAPACITIES, Capacity, capacities_of
from fusewright_models.training import TrainingConfig, adamw

from .trainers import quiet_trainer, tiny

CONTEXTS, TARGETS = (5, 1, 3), (2, 4, 1)


@pytest.fixture
def padded(rows):
    """Three tasks in tensors of 5 context points and 4 targets, NaN past their lengths."""

    def make(*, dtype=torch.float64, y_width=1) -> Task:
        x_context, y_context, x_target, y_target = rows(3, 5, 4, dtype=dtype, y_width=y_width)
        for task, (context, targets) in enumerate(zip(CONTEXTS, TARGETS, strict=True)):
            for each in (x_context, y_context):
                each[task, context:] = torch.nan
            for each in (x_target, y_target):
                each[task, targets:] = torch.nan
        lengths = torch.tensor(CONTEXTS), torch.tensor(TARGETS)
        return Task(x_context, y_context, x_target, y_target, {}, *lengths)

    return make


def alone(task: Task, number: int) -> Task:
    """One task of a batch, without its padding."""
    one = slice(number, number + 1)
    context, targets = (int(x[number]) for x in (task.context_lengths, task.target_lengths))
    shown = (rows[one, :context] for rows in (task.x_context, task.y_context))
    asked = (rows[one, :targets] for rows in (task.x_target, task.y_target))
    return Task(*shown, *asked, {name: value[one] for name, value in task.truth.items()})


def gradients(model, loss: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss, model.parameters())]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("y_width", [1, 2])
def test_padded_tasks_equal_the_tasks_alone(
    small, padded, assert_same_but_for_rounding, norm, y_width
):
    model, task = small(norm=norm, y_width=y_width, dtype=torch.float64), padded(y_width=y_width)
    loss = negative_log_likelihood(model, task)
    parts = [alone(task, number) for number in range(3)]
    # A target counts as much as any other, whatever task it is of.
    losses = [negative_log_likelihood(model, part) * part.x_target.shape[1] for part in parts]
    expected = torch.stack(losses).sum() / sum(TARGETS)
    assert_same_but_for_rounding([loss.detach()], [expected.detach()])
    assert_same_but_for_rounding(gradients(model, loss), gradients(model, expected))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_contents_of_the_padding_change_no_bit(small, padded, device, backend):
    model, task = small(backend=backend, layers=1).to(device), padded(dtype=torch.float32)
    results = []
    for filling in (torch.nan, 7.0):
        filled = [
            x.nan_to_num(filling).to(device)
            for x in (task.x_context, task.y_context, task.x_target, task.y_target)
        ]
        lengths = task.context_lengths.to(device), task.target_lengths.to(device)
        loss = negative_log_likelihood(model, Task(*filled, {}, *lengths))
        results.append([loss.detach(), *gradients(model, loss)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][0].isfinite()


def test_padding_gets_gradients_of_zero(small, padded):
    task = padded(dtype=torch.float32)
    leaves = [rows.requires_grad_() for rows in (task.x_target, task.y_target)]
    negative_log_likelihood(small(), task).backward()
    for number, targets in enumerate(TARGETS):
        for leaf in leaves:
            assert leaf.grad[number, :targets].count_nonzero() > 0
            assert leaf.grad[number, targets:].count_nonzero() == 0


def test_full_lengths_are_no_lengths(small, rows, assert_same_but_for_rounding):
    model, inputs = small(dtype=torch.float64), rows(2, 5, 4, dtype=torch.float64)
    expected = model.loss(*inputs)
    for lengths in (torch.tensor([4, 4]), torch.tensor([9, 2**40])):
        assert_same_but_for_rounding([model.loss(*inputs, None, lengths)], [expected])


def test_tasks_without_targets_have_a_loss_of_zero(small, rows):
    model, inputs = small(), rows(2, 5, 4)
    lengths = torch.tensor([0, -3], dtype=torch.int32)
    loss = model.loss(*inputs, None, lengths)
    assert loss == 0.0
    assert all(each.count_nonzero() == 0 for each in gradients(model, loss))
    assert model.log_likelihood(*inputs, None, lengths).count_nonzero() == 0


def test_predictions_of_targets_are_those_of_the_tasks_alone(
    small, padded, assert_same_but_for_rounding
):
    model, task = small(dtype=torch.float64), padded()
    inputs = task.x_context, task.y_context, task.x_target
    prediction = model.predict(*inputs, task.context_lengths, task.target_lengths)
    assert all(each.isfinite().all() for each in prediction)
    for number, targets in enumerate(TARGETS):
        part = alone(task, number)
        expected = model.predict(part.x_context, part.y_context, part.x_target)
        found = prediction.mean[number : number + 1, :targets]
        assert_same_but_for_rounding([found], [expected.mean])


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, 1, 3], TypeError, "wanted target_lengths as a tensor; got list"),
        (torch.ones(3), TypeError, r"target_lengths in one of int32, int64; got torch\.float32"),
        (torch.ones(2, dtype=torch.int64), ValueError, r"target_lengths \[3\].*got \[2\]"),
    ],
    ids=["list", "floating", "batch"],
)
def test_wrong_lengths_are_refused(small, rows, lengths, error, message):
    model, inputs = small(), rows(3, 5, 4)
    with pytest.raises(error, match=message):
        model(*inputs[:3], None, lengths)
    with pytest.raises(error, match=message):
        model.loss(*inputs, None, lengths)


SIZES = {
    "gp": {number: Size(3, 49 - number) for number in range(3, 47)},
    "digits": {number: Size(64 - number, 64 - number) for number in range(4, 49)},
    "square": {number: Size(1, 64) for number in range(1, 65)},
    "flat": {number: Size(5, 5) for number in range(2, 1000)},
    "tall": {7: Size(1, 5000)},
    "few": {number: Size(2, 5) for number in range(3, 7)},
    "one": {64: Size(64, 64)},
}


@pytest.mark.parametrize("name", SIZES)
def test_capacities_are_few_and_each_batch_has_one(name):
    sizes, capacities = SIZES[name], capacities_of(SIZES[name])
    assert len(capacities) <= MOST_CAPACITIES
    served = dict.fromkeys(capacities, 0)
    for context, size in sizes.items():
        for targets in range(size.low, size.high + 1):
            (one,) = (c for c in capacities if context in c.contexts and targets in c.targets)
            served[one] += 1
    assert all(served.values())


@pytest.mark.parametrize(
    ("name", "rows"),
    # Of a task, on average: 38.25 of its own, 64, 65.
    [("gp", 46.8), ("digits", 66.0), ("square", 80.0)],
)
def test_capacities_waste_little(name, rows):
    sizes, capacities = SIZES[name], capacities_of(SIZES[name])
    total = 0.0
    for context, size in sizes.items():
        for targets in range(size.low, size.high + 1):
            (one,) = (c for c in capacities if context in c.contexts and targets in c.targets)
            probability = 1.0 / len(sizes) / (size.high - size.low + 1)
            total += probability * (one.contexts.high + one.targets.high)
    assert total == pytest.approx(rows, abs=0.05)


def test_sizes_of_few_are_not_padded():
    every = {(context, targets) for context in range(3, 7) for targets in range(2, 6)}
    assert {(c.low, t.low) for c, t in capacities_of(SIZES["few"])} == every
    sampler = make_sampler("blr", padded=True)
    assert sampler.sample(2).padding is None


KINDS = [
    *((name, {}) for name in DATA_NAMES),
    ("gp-rbf", {"ragged": True}),
    ("digits", {"ragged": True, "context_size": Size(2, 30), "target_size": Size(1, 34)}),
    ("blr", {"context_size": Size(2, 40), "target_size": Size(1, 30)}),
]
KIND_IDS = [*DATA_NAMES, "gp-rbf-ragged", "digits-ragged", "blr-drawn"]


def both(name, **options) -> tuple[Sampler, Sampler]:
    """As it is, and padded."""
    return make_sampler(name, **options), make_sampler(name, padded=True, **options)


@pytest.mark.parametrize(("name", "options"), KINDS, ids=KIND_IDS)
def test_padded_batches_are_the_same_tasks_in_few_shapes(name, options):
    plain, padded = both(name, **options)
    shapes, drawn = set(), set()
    for _ in range(60):
        one, other = plain.sample(3), padded.sample(3)
        context, targets = one.x_context.shape[1], one.x_target.shape[1]
        for rows, longer in (
            (one.x_context, other.x_context),
            (one.y_context, other.y_context),
            (one.x_target, other.x_target),
            (one.y_target, other.y_target),
        ):
            assert torch.equal(longer[:, : rows.shape[1]], rows)
            assert longer[:, rows.shape[1] :].count_nonzero() == 0
        if other.target_lengths is not None:
            assert other.target_lengths.tolist() == [targets] * 3
        if one.context_lengths is not None:
            assert torch.equal(one.context_lengths, other.context_lengths)
        elif other.context_lengths is not None:
            assert other.context_lengths.tolist() == [context] * 3
        wasted = 0 if one.padding is None else int(one.padding)
        assert other.tokens - (other.padding or 0) == one.tokens - wasted
        drawn.add((context, targets))
        shapes.add((other.x_context.shape[1], other.x_target.shape[1]))
    assert len(shapes) <= MOST_CAPACITIES
    assert drawn <= {
        (context, targets)
        for context, size in plain.sizes().items()
        for targets in range(size.low, size.high + 1)
    }
    # Of 64 and 64 points alone there is nothing to draw.
    assert len(drawn) > len(shapes) or (name == "blr" and not options)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_loss_and_gradients_of_padded_batches_are_those_of_others(
    small, assert_same_but_for_rounding, name
):
    sizes = {"context_size": Size(1, 5), "target_size": Size(1, 9)}
    plain, padded = both(name, **sizes)
    model = small(x_width=plain.x_width, layers=2, dtype=torch.float64)
    for _ in range(6):
        results = [negative_log_likelihood(model, each.sample(3)) for each in (plain, padded)]
        expected, found = ([loss.detach(), *gradients(model, loss)] for loss in results)
        assert_same_but_for_rounding(found[:1], expected[:1])
        assert_same_but_for_rounding(found[1:], expected[1:])


@pytest.mark.parametrize("name", ["digits", "gp-rbf", "blr"])
def test_padding_has_no_part_in_an_evaluation(small, assert_same_but_for_rounding, name):
    plain, padded = both(name, context_size=Size(1, 6), target_size=Size(1, 9))
    model = small(x_width=plain.x_width, layers=1, dtype=torch.float64)
    assert any(padded.sample(2).padding for _ in range(5))
    one, other = (evaluate(model, each, batches=4, batch_size=3) for each in (plain, padded))
    numbers = [
        torch.tensor(
            [each.log_likelihood, each.standard_error, each.reference, each.crps, *each.coverage],
            dtype=torch.float64,
        )
        for each in (one, other)
    ]
    assert one.pit == other.pit
    # Functions have a variance of at most 1 and a noise of 0.02: so much grows a rounding.
    assert_same_but_for_rounding([numbers[1]], [numbers[0]], 6 / 0.02**2)


def test_state_is_that_of_the_sampler_without_padding():
    plain, padded = both("gp-matern")
    plain.sample(2)
    padded.sample(2)
    assert plain.state_dict()["tasks"] == padded.state_dict()["tasks"]
    assert "padded" not in padded.state_dict()["tasks"]
    state = plain.state_dict()
    expected = plain.sample(2)
    other = make_sampler("gp-matern", padded=True, seed=5)
    other.load_state_dict(state)
    targets = expected.x_target.shape[1]
    assert torch.equal(other.sample(2).x_target[:, :targets], expected.x_target)


def test_capacity_of_one_size_needs_no_lengths():
    task = make_sampler("blr", context_size=Size(3, 3), target_size=Size(4, 4)).sample(2)
    assert task.padded(Capacity(Size(3, 3), Size(4, 4))) is task
    longer = task.padded(Capacity(Size(3, 3), Size(2, 6)))
    assert longer.context_lengths is None
    assert longer.x_context is task.x_context
    assert longer.target_lengths.tolist() == [4, 4]
    assert longer.padding == 2 * 2


def test_batch_of_sizes_that_were_not_told_is_refused(monkeypatch):
    sampler = make_sampler("gp-rbf", padded=True)
    monkeypatch.setattr(type(sampler), "draw_sizes", lambda self: (47, 50))
    with pytest.raises(ValueError, match=r"GaussianProcess's sizes.*M = 47 and N = 50"):
        sampler.sample(2)


def test_lengths_beyond_the_rows_are_no_padding():
    task = make_sampler("blr", context_size=Size(3, 3), target_size=Size(4, 4)).sample(2)
    lengths = torch.tensor([9, -1]), torch.tensor([4, 1])
    assert replace(task, context_lengths=lengths[0], target_lengths=lengths[1]).padding == 3 + 3
    scores = torch.arange(8.0).view(2, 4, 1)
    means = replace(task, target_lengths=torch.tensor([3, 0])).mean_over_targets(scores)
    assert means.tolist() == [1.0, 0.0]
    assert task.mean_over_targets(scores).tolist() == [1.5, 5.5]


def test_padded_batches_are_drawn_without_waiting(host_reads):
    samplers = itertools.chain(*(both(name)[1:] for name in DATA_NAMES))
    with host_reads:
        for sampler in samplers:
            for _ in range(3):
                assert sampler.sample(2).tokens > 0
    assert host_reads.count == 0


@pytest.mark.usefixtures("without_pictures")
def test_padding_is_counted_as_long_as_tokens_are(tmp_path, monkeypatch):
    """A run that ends between log points goes on with a clock of its own."""
    model, source, loss = tiny("transformer-np", padded=True)
    config = TrainingConfig(steps=10, batch_size=2, log_every=5, evaluate_every=10)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.0)
    trainer, tasks = quiet_trainer(tmp_path, model, source, loss, optimizer, config), []
    sample = source.sample
    monkeypatch.setattr(source, "sample", lambda batch: tasks.append(sample(batch)) or tasks[-1])
    trainer.run(until=4)
    trainer.run(until=5)
    (line,) = trainer.folder.read_metrics()
    padding = int(tasks[-1].padding)
    rates = line["tokens_per_second"], line.get("padded_tokens_per_second", 0.0)
    counted = [round(rate * line["seconds"]) for rate in rates]
    assert sum(int(task.padding) for task in tasks[:-1]) > 0
    assert counted == [tasks[-1].tokens - padding, padding]
