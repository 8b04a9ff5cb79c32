"""Gradients stay where they are held, and are averaged there over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fusewright_models.training.gradients import ALIGNED_BYTES, HeldGradients
from fusewright_models.training.processes import ALONE

from .groups import run_group

SHAPES = (3,), (), (5, 7), (0, 4), (2, 64)


def parameters_of(*shapes) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64)))
    return parameters


def test_gradients_stay_side_by_side_and_later_batches_are_added_there():
    parameters = parameters_of(*SHAPES)
    unused = parameters.pop(1)
    held = HeldGradients([*parameters[:1], unused, *parameters[1:]], ALONE)
    # A gradient keeps the strides that autograd gave it.
    transposed = torch.randn(7, 5).mT
    for step in range(3):
        for p in parameters:
            p.grad = None
        drawn = [torch.randn_like(p) for p in parameters]
        drawn[1] = transposed
        for number in range(2):
            sum((p * g).sum() for p, g in zip(parameters, drawn, strict=True)).backward()
            held.hold(first=number == 0)
        if not step:
            places = [g.data_ptr() for g in held.gradients]
        assert held.trained == parameters
        assert [p.grad.data_ptr() for p in parameters] == places
        for p, g in zip(parameters, drawn, strict=True):
            assert torch.equal(p.grad, g + g)
    assert [x.dtype for x in held.whole] == [torch.float32, torch.float64]
    for x in held.whole:
        mine = [g for g in held.gradients if g.dtype == x.dtype]
        assert all((g.data_ptr() - x.data_ptr()) % ALIGNED_BYTES == 0 for g in mine if g.numel())
        assert sum(g.numel() for g in mine) <= x.numel()
        assert x.isfinite().all()


def test_gradients_of_other_parameters_are_refused():
    parameters = parameters_of((2,), (3,))
    held = HeldGradients(parameters, ALONE)
    sum(p.sum() for p in parameters).backward()
    held.hold(first=True)
    for p in parameters:
        p.grad = None
    parameters[0].sum().backward()
    with pytest.raises(RuntimeError, match="not all batches give gradients to the same parameters"):
        held.hold(first=True)


def test_processes_average_what_they_hold():
    run_group(
        """
from fusewright_models.training.gradients import HeldGradients
parameters = [torch.nn.Parameter(torch.ones(n)) for n in (5, 3)]
held = HeldGradients(parameters, processes)
for step in range(2):
    for p in parameters:
        p.grad = None
    sum((processes.rank + step) * p.square().sum() for p in parameters).backward()
    held.hold(first=True)
    held.average_()
    for p in parameters:
        assert torch.equal(p.grad, torch.full_like(p, 2.0 * step + 1.0))
""",
        2,
    )


def test_processes_whose_gradients_differ_are_told():
    run_group(
        """
from fusewright_models.training.gradients import HeldGradients
parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
parameters[processes.rank].sum().backward()
try:
    HeldGradients(parameters, processes).hold(first=True)
except RuntimeError as error:
    assert str(error) == "not all processes give gradients to the same parameters"
else:
    raise AssertionError("they were held")
""",
        2,
    )


def test_all_processes_begin_with_the_parameters_of_the_first():
    run_group(
        """
model = torch.nn.BatchNorm1d(4)
model.register_buffer("transposed", torch.arange(6.0).view(2, 3).mT * (1 + processes.rank))
with torch.no_grad():
    model.weight.add_(processes.rank)
    model.running_mean.add_(processes.rank)
processes.same_(model)
assert torch.equal(model.weight, torch.ones(4))
assert torch.equal(model.running_mean, torch.zeros(4))
assert torch.equal(model.transposed, torch.arange(6.0).view(2, 3).mT)
""",
        2,
    )


def test_captured_steps_of_several_processes_are_of_one_model():
    tests = str(Path(__file__).parent)
    run_group(
        f"""
import sys
sys.path.insert(0, {tests!r})
import pytest
from fusewright_models.training import TrainingConfig
from stood import Stood, leave_out_streams
leave_out_streams(pytest.MonkeyPatch())
torch.manual_seed(processes.rank)
model = torch.nn.Linear(3, 2)
drawn = model.weight.tolist()
optimizer = torch.optim.AdamW(model.parameters())
config = TrainingConfig(steps=1, batch_size=2)
Stood(model, None, optimizer, config, processes, say=print)
assert processes.told(drawn)[0] == model.weight.tolist()
assert (drawn == model.weight.tolist()) == processes.is_main
""",
        2,
    )
