"""The Triton kernels train as the reference does: steps from equal states, and where trainings
end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.data import LinearRegression, Size

from .steps import ENDS, SEEDS, LossOf, check_final_losses, check_steps, trained

STEPS = 11
# Before anything is learned, and when AdamW has moved all of it some way.
LOOKED_AT = (0, 10)
Batch = tuple[torch.Tensor, ...]
Make = Callable[..., TransformerNP]

every_norm = pytest.mark.parametrize("norm", ["pre", "post"])


def loss_of_batches(batches: list[Batch]) -> LossOf:
    def loss_of(model: TransformerNP, step: int) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        return model.loss(*(x.to(dtype) if x.is_floating_point() else x for x in batches[step]))

    return loss_of


def check_losses(make: Make, batches: list[Batch], dtype: torch.dtype = torch.float32) -> None:
    models = [make(backend=backend).to(batches[0][0].device) for backend in ("triton", "reference")]
    losses = check_steps(*models, loss_of_batches(batches), LOOKED_AT, steps=STEPS, dtype=dtype)
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
    return [
        tuple(x.to(device) for x in (*rows(2, 5, 4), torch.randint(1, 6, (2,))))
        for _ in range(STEPS)
    ]


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
    drawn = [sampler.sample(16) for _ in range(STEPS)]
    return [(t.x_context, t.y_context, t.x_target, t.y_target, t.context_lengths) for t in drawn]


def wide(*, backend: str) -> TransformerNP:
    config = TransformerNPConfig(width=128, layers=4, heads=2, feed_forward_width=341)
    return TransformerNP(config, backend=backend)


@pytest.mark.gpu
def test_steps_in_bf16_follow_the_reference(tasks):
    check_losses(wide, tasks, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.slow
def test_trainings_in_bf16_end_where_the_references_end(tasks):
    check_trainings(wide, tasks, torch.bfloat16)
