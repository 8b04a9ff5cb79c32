"""Tasks of different context sizes in one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data import (
    DATA_NAMES,
    GaussianProcess,
    LinearRegression,
    Sampler,
    Size,
    Task,
    make_sampler,
)
from fusewright_models.data.gaussian_process import NOISE
from fusewright_testkit import capture
from torch._dynamo.testing import CompileCounterWithBackend

LENGTHS = (5, 1, 3)


@pytest.fixture
def padded(rows) -> Callable[..., tuple[list[torch.Tensor], torch.Tensor]]:
    """Inputs of three tasks with 5, 1 and 3 of 5 context rows, NaN in the others; the lengths."""

    def make(*, dtype=torch.float64):
        inputs = [*rows(3, 5, 4, dtype=dtype)]
        for task, length in enumerate(LENGTHS):
            for context in inputs[:2]:
                context[task, length:] = torch.nan
        return inputs, torch.tensor(LENGTHS)

    return make


def alone(inputs: list[torch.Tensor], task: int, length: int) -> list[torch.Tensor]:
    """One task of the batch, without its padding."""
    x_context, y_context, x_target, y_target = (rows[task : task + 1] for rows in inputs)
    return [x_context[:, :length], y_context[:, :length], x_target, y_target]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("indicator", [False, True], ids=["", "indicator"])
def test_padded_tasks_equal_the_tasks_alone(
    small, padded, assert_same_but_for_rounding, norm, indicator
):
    model = small(norm=norm, indicator=indicator, dtype=torch.float64)
    inputs, lengths = padded()
    params = model(*inputs[:3], lengths)
    parts = [alone(inputs, task, length) for task, length in enumerate(LENGTHS)]
    assert_same_but_for_rounding([params], [torch.cat([model(*part[:3]) for part in parts])])

    gradients = torch.autograd.grad(model.loss(*inputs, lengths), model.parameters())
    loss = sum(model.loss(*part) for part in parts) / len(parts)
    assert_same_but_for_rounding(gradients, torch.autograd.grad(loss, model.parameters()))


def test_padding_gets_gradients_of_zero_and_gives_none(small, padded):
    model = small()
    inputs, lengths = padded(dtype=torch.float32)
    leaves = [rows.requires_grad_() for rows in inputs]
    model.loss(*leaves, lengths).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for task, length in enumerate(LENGTHS):
        for context in leaves[:2]:
            assert context.grad[task, :length].count_nonzero() > 0
            assert context.grad[task, length:].count_nonzero() == 0


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_contents_of_the_padding_change_no_bit(small, padded, device, backend):
    model = small(backend=backend, layers=1).to(device)
    inputs, lengths = padded(dtype=torch.float32)
    results = []
    for rows in (inputs, [x.nan_to_num(7.0) for x in inputs]):
        model.zero_grad()
        loss = model.loss(*(x.to(device) for x in rows), lengths.to(device))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][0].isfinite()


def test_full_lengths_are_no_lengths(small, rows, assert_same_but_for_rounding):
    model = small(dtype=torch.float64)
    inputs = rows(2, 5, 4, dtype=torch.float64)[:3]
    for lengths in (torch.tensor([5, 5]), torch.tensor([9, 2**40])):
        assert_same_but_for_rounding([model(*inputs, lengths)], [model(*inputs)])


def test_task_without_context_is_predicted_from_its_targets_alone(small, rows):
    model = small()
    x_context, y_context, x_target, y_target = rows(2, 5, 4)
    lengths = torch.tensor([0, -3], dtype=torch.int32)
    x_target[1] = x_target[0]
    params = model(x_context, y_context, x_target, lengths)
    assert params.isfinite().all()
    assert torch.equal(params[0], params[1])
    model.loss(x_context, y_context, x_target, y_target, lengths).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_predictions_of_padded_tasks_are_those_of_the_mixture(small, padded):
    model = small(dtype=torch.float64)
    inputs, lengths = padded()
    prediction = model.predict(*inputs[:3], lengths)
    assert torch.equal(prediction.mean, model.head.mean(model(*inputs[:3], lengths)))
    assert prediction.variance.isfinite().all()
    assert prediction.sample.isfinite().all()


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, 1, 3], TypeError, "wanted context_lengths as a tensor; got list"),
        (torch.ones(3).numpy(), TypeError, "wanted context_lengths as a tensor; got ndarray"),
        (torch.ones(3), TypeError, r"context_lengths in one of int32, int64; got torch\.float32"),
        (torch.ones(2, dtype=torch.int64), ValueError, r"context_lengths \[3\].*got \[2\]"),
        (torch.ones(3, 1, dtype=torch.int64), ValueError, r"context_lengths \[3\].*got \[3, 1\]"),
        (
            torch.ones(3, dtype=torch.int64, device="meta"),
            ValueError,
            "wanted context_lengths on the model's device, cpu; got it on meta",
        ),
    ],
    ids=["list", "array", "floating", "batch", "rank", "device"],
)
def test_wrong_lengths_are_refused(small, rows, lengths, error, message):
    model, inputs = small(), rows(3, 5, 4)
    with pytest.raises(error, match=message):
        model(*inputs[:3], lengths)
    with pytest.raises(error, match=message):
        model.loss(*inputs, lengths)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_one_compiled_step_serves_every_context_size(small, assert_same_but_for_rounding, compiler):
    counter = CompileCounterWithBackend(compiler)
    torch._dynamo.reset()
    loss_function = torch.compile(negative_log_likelihood, fullgraph=True, backend=counter)
    sampler = LinearRegression(context_size=Size(1, 9), target_size=Size(4, 4), ragged=True)
    shape = {"x_width": sampler.x_width, "layers": 1}
    model, plain = (small(dtype=torch.float64, **shape) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    lengths = set()
    for _ in range(6):
        task = sampler.sample(3)
        lengths |= {*task.context_lengths.tolist()}
        loss, expected = loss_function(model, task), negative_log_likelihood(plain, task)
        loss.backward()
        expected.backward()
        assert_same_but_for_rounding([loss], [expected])
    assert len(lengths) > 3
    assert counter.frame_count == 1
    assert_same_but_for_rounding(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    )


@pytest.mark.parametrize("name", DATA_NAMES)
def test_ragged_batches_have_one_shape_and_sizes_of_the_given_range(name):
    sampler = make_sampler(name, context_size=Size(2, 5), target_size=Size(6, 6), ragged=True)
    tasks = [sampler.sample(8) for _ in range(10)]
    assert {task.x_context.shape[1] for task in tasks} == {5}
    assert {task.x_target.shape[1] for task in tasks} == {6}
    lengths = torch.stack([task.context_lengths for task in tasks])
    assert lengths.unique().tolist() == [2, 3, 4, 5]
    assert all(len(row.unique()) > 1 for row in lengths)
    sampler.reset()
    assert torch.equal(sampler.sample(8).context_lengths, lengths[0])


@pytest.mark.parametrize("name", ["digits", "blr"])
def test_targets_fit_beside_the_largest_context_of_a_ragged_batch(name):
    sampler = make_sampler(name, ragged=True)
    shapes = {sampler.sample(2).x_target.shape for _ in range(5)}
    assert len(shapes) == 1


def ragged_sizes(batches: int, batch: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """M ``[batches, batch]`` and N ``[batches, 1]`` of ragged tasks of a Gaussian process."""
    sampler = make_sampler("gp-rbf", ragged=True, **options)
    tasks = [sampler.sample(batch) for _ in range(batches)]
    targets = torch.tensor([[task.x_target.shape[1]] for task in tasks])
    return torch.stack([task.context_lengths for task in tasks]), targets


def test_ragged_tasks_of_a_gaussian_process_have_the_sizes_of_others():
    """M ~ U{3 ... 46}, N ~ U{3 ... 49 - M}."""
    contexts, targets = (sizes.flatten() for sizes in ragged_sizes(4400, 1))
    counts = contexts.bincount(minlength=50)
    assert counts[:3].sum() == counts[47:].sum() == 0
    # Six standard deviations of 4400 draws among 44.
    assert (counts[3:47] - 100).abs().max() <= 60
    assert targets.min() == 3
    assert (contexts + targets).max() == 49
    # N's place among its 47 - M numbers is uniform, whatever M.
    place = (targets - 3 + 0.5) / (47 - contexts)
    for part in (contexts <= 20, contexts > 20):
        few = place[part]
        assert (few.mean() - 0.5).abs() <= 6 * 12**-0.5 / len(few) ** 0.5


@pytest.mark.parametrize("sizes", [(3, 46), (1, 7), (46, 46)], ids=str)
def test_ragged_tasks_of_a_gaussian_process_are_of_49_points_at_most(sizes):
    contexts, targets = ragged_sizes(60, 9, context_size=Size(*sizes))
    assert (contexts + targets <= 49).all()
    assert contexts.min() >= sizes[0]
    assert contexts.max() <= sizes[1]
    assert len(targets.unique()) > 10 or sizes[0] == 46
    # Within a batch they differ.
    assert sizes[0] == 46 or sum(len(row.unique()) > 1 for row in contexts) > 30


def largest_condition(sampler: Sampler, task: Task) -> float:
    """No matrix of the sampler's reference has a larger condition: its trace over its least
    eigenvalue.
    """
    if isinstance(sampler, GaussianProcess):
        # Functions have a variance of at most 1 at each point.
        return task.x_context.shape[1] * (1.0 + NOISE**2) / NOISE**2
    if isinstance(sampler, LinearRegression):
        squares = 1.0 + task.x_context.square().sum(-1, keepdim=True)
        trace = 1.0 + sampler.x_width + (squares / task.truth["sigma"].square()).sum(1)
        return float(trace.max())
    return 1.0


@pytest.mark.parametrize("name", DATA_NAMES)
def test_reference_of_a_ragged_batch_is_that_of_each_task_alone(name, assert_same_but_for_rounding):
    sampler = make_sampler(name, context_size=Size(2, 9), target_size=Size(6, 6), ragged=True)
    task = sampler.sample(5)
    scores = sampler.reference_log_likelihood(task)
    for number, length in enumerate(task.context_lengths.tolist()):
        one = slice(number, number + 1)
        truth = {name: value[one] for name, value in task.truth.items()}
        context = task.x_context[one, :length], task.y_context[one, :length]
        single = Task(*context, task.x_target[one], task.y_target[one], truth)
        assert_same_but_for_rounding(
            [scores[one]],
            [sampler.reference_log_likelihood(single)],
            largest_condition(sampler, task),
        )
    changed = replace(task, y_context=task.y_context + 1.0)
    differs = (sampler.reference_log_likelihood(changed) != scores).any()
    assert bool(differs) == (name != "digits")


@pytest.mark.gpu
def test_captured_step_serves_every_context_size(small, rows):
    model = small(backend="triton").cuda()
    sizes = [torch.tensor(lengths) for lengths in ([5, 5, 5], LENGTHS, [2, 4, 1])]
    inputs = [x.cuda() for x in rows(3, 5, 4)]
    lengths = sizes[0].cuda()

    def step() -> list[torch.Tensor]:
        return [*torch.autograd.grad(model.loss(*inputs, lengths), model.parameters())]

    graph, captured = capture(step)
    for size in sizes:
        lengths.copy_(size)
        graph.replay()
        replayed = [gradient.clone() for gradient in captured]
        assert all(torch.equal(one, other) for one, other in zip(replayed, step(), strict=True))
