"""The Triton kernels train as the reference does: steps from equal states, and where trainings
end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.data import LinearRegression, Size, Task, make_sampler

from .steps import ENDS, SEEDS, LossOf, check_final_losses, check_steps, trained

STEPS = 11
# Before anything is learned, and when AdamW has moved all of it some way.
LOOKED_AT = (0, 10)
Batch = tuple[torch.Tensor | None, ...]
Make = Callable[..., TransformerNP]

every_norm = pytest.mark.parametrize("norm", ["pre", "post"])


def batch_of(task: Task) -> Batch:
    rows = task.x_context, task.y_context, task.x_target, task.y_target
    return *rows, task.context_lengths, task.target_lengths


def loss_of_batches(batches: list[Batch], padded: list[Batch] | None = None) -> LossOf:
    """The kernels may be given the same tasks ``padded``."""

    def loss_of(model: TransformerNP, step: int) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        given = padded if padded and model.head.backend == "triton" else batches
        return model.loss(
            *(x.to(dtype) if x is not None and x.is_floating_point() else x for x in given[step])
        )

    return loss_of


def check_losses(
    make: Make,
    batches: list[Batch],
    dtype: torch.dtype = torch.float32,
    padded: list[Batch] | None = None,
) -> None:
    models = [make(backend=backend).to(batches[0][0].device) for backend in ("triton", "reference")]
    loss_of = loss_of_batches(batches, padded)
    losses = check_steps(*models, loss_of, LOOKED_AT, steps=STEPS, dtype=dtype)
    assert losses[-1] != losses[0]


def check_trainings(make: Make, batches: list[Batch], dtype: torch.dtype = torch.float32) -> None:
    """All seeds of the parameters see the same few batches again and again."""
    loss_of = loss_of_batches([batches[step % ENDS] for step in range(40)])
    found = {backend: [] for backend in ("triton", "reference")}
    for seed in range(SEEDS):
        for backend, losses in found.items():
            torch.manual_seed(seed)
            model = make(backend=backend).to(batches[0][0].device)
            losses.append(trained(model, loss_of, 40, dtype))
    check_final_losses(found["triton"], found["reference"])


@pytest.fixture
def smallest(small) -> Make:
    """As small as a model gets: the interpreter takes a while for each program."""
    return lambda **options: small(layers=1, heads=1, components=2, **options)


@pytest.fixture
def batches(rows, device) -> list[Batch]:
    return [tuple(x.to(device) for x in rows(1, 3, 2)) for _ in range(STEPS)]


@pytest.fixture
def ragged(rows, device) -> list[Batch]:
    lengths = ((torch.randint(1, 6, (2,)), torch.randint(1, 5, (2,))) for _ in range(STEPS))
    return [tuple(x.to(device) for x in (*rows(2, 5, 4), *each)) for each in lengths]


@every_norm
def test_steps_of_a_training_follow_the_reference(smallest, batches, norm):
    check_losses(lambda **given: smallest(norm=norm, **given), batches)


@every_norm
def test_steps_with_ragged_batches_follow_the_reference(small, ragged, norm):
    """A block that computes context rows, and the last one, which does not."""
    check_losses(lambda **given: small(norm=norm, layers=2, **given), ragged)


@pytest.mark.slow
@every_norm
def test_trainings_end_where_the_references_end(smallest, batches, norm):
    check_trainings(lambda **given: smallest(norm=norm, **given), batches)


@pytest.mark.slow
@every_norm
def test_trainings_with_ragged_batches_end_where_the_references_end(small, ragged, norm):
    check_trainings(lambda **given: small(norm=norm, **given), ragged)


@pytest.fixture(params=[64, 300], ids=lambda context: f"M{context}")
def tasks(request) -> list[Batch]:
    """Up to 128 keys are one tile of the attention; more are streamed."""
    sampler = LinearRegression(
        context_size=Size(request.param // 2, request.param),
        target_size=Size(64, 64),
        ragged=True,
        device="cuda",
    )
    return [batch_of(sampler.sample(16)) for _ in range(STEPS)]


def wide(*, backend: str, **changes: int) -> TransformerNP:
    config = TransformerNPConfig(width=128, layers=4, heads=2, feed_forward_width=341, **changes)
    return TransformerNP(config, backend=backend)


@pytest.mark.gpu
def test_steps_in_bf16_follow_the_reference(tasks):
    check_losses(wide, tasks, torch.bfloat16)


@pytest.mark.gpu
def test_padded_steps_in_bf16_follow_the_reference_on_the_tasks_as_they_are():
    """Within the yardstick of the tasks without padding."""
    plain, padded = (
        make_sampler("gp-matern", padded=padded, device="cuda") for padded in (False, True)
    )
    batches, longer = (
        [batch_of(sampler.sample(16)) for _ in range(STEPS)] for sampler in (plain, padded)
    )
    assert all(batches[step][0].shape != longer[step][0].shape for step in LOOKED_AT)
    check_losses(lambda **given: wide(x_width=1, **given), batches, torch.bfloat16, longer)


@pytest.mark.gpu
@pytest.mark.slow
def test_trainings_in_bf16_end_where_the_references_end(tasks):
    check_trainings(wide, tasks, torch.bfloat16)
