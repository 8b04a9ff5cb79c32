"""The Triton kernels train as the reference does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.data import LinearRegression, Size
from fusewright_testkit.yardstick import Allowance, RoundedProducts, assert_within

STEPS = 100
Batch = tuple[torch.Tensor, ...]


def losses_of(
    model: TransformerNP, batches: list[Batch], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The loss of every AdamW step, each on a batch of its own, under autocast to ``dtype``."""
    device = batches[0][0].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_training(
    make: Callable[[str], TransformerNP], batches: list[Batch], dtype: torch.dtype
) -> None:
    """The truth is the reference trained in fp64, the allowance the same in the working dtype.

    Rounding in one step moves all later ones, and one training is one draw of that: the allowance
    is the larger error of two, with every operand of a product rounded and as the reference is.
    """
    device = batches[0][0].device
    models = {backend: make(backend).to(device) for backend in ("reference", "triton")}
    start = {name: value.clone() for name, value in models["reference"].state_dict().items()}

    def trained(backend: str) -> torch.Tensor:
        models[backend].load_state_dict(start)
        return losses_of(models[backend], batches, None if dtype == torch.float32 else dtype)

    found, eager = trained("triton"), trained("reference")
    with RoundedProducts(dtype):
        rounded = trained("reference")
    wide = [tuple(x.double() if x.is_floating_point() else x for x in b) for b in batches]
    models["reference"].load_state_dict(start)
    truth = losses_of(models["reference"].double(), wide)
    assert_within(found, truth, Allowance.of(truth, eager, rounded), "losses")
    assert truth[0] != truth[-1]


@pytest.mark.parametrize("norm", ["post", pytest.param("pre", marks=pytest.mark.slow)])
def test_losses_of_100_steps_follow_the_reference(small, rows, device, norm):
    """As small as a model gets: the interpreter takes a while for each program."""
    batches = [tuple(x.to(device) for x in rows(1, 3, 2)) for _ in range(STEPS)]
    shape = {"norm": norm, "layers": 1, "heads": 1, "components": 2}
    check_training(lambda backend: small(backend=backend, **shape), batches, torch.float32)


@pytest.mark.parametrize(
    ("norm", "steps"),
    [("pre", 3), *(pytest.param(norm, STEPS, marks=pytest.mark.slow) for norm in ("pre", "post"))],
)
def test_losses_of_ragged_batches_follow_the_reference(small, rows, device, norm, steps):
    batches = [
        tuple(x.to(device) for x in (*rows(2, 5, 4), torch.randint(1, 6, (2,))))
        for _ in range(steps)
    ]
    check_training(lambda backend: small(backend=backend, norm=norm), batches, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [64, 300], ids=lambda context: f"M{context}")
def test_losses_in_bf16_follow_the_reference(device, context):
    """Up to 128 keys are one tile of the attention; more are streamed."""
    config = TransformerNPConfig(width=128, layers=4, heads=2, feed_forward_width=341)
    sampler = LinearRegression(
        context_size=Size(context // 2, context),
        target_size=Size(64, 64),
        ragged=True,
        device=device,
    )
    tasks = [sampler.sample(16) for _ in range(STEPS)]
    batches = [(t.x_context, t.y_context, t.x_target, t.y_target, t.context_lengths) for t in tasks]
    check_training(lambda backend: TransformerNP(config, backend=backend), batches, torch.bfloat16)
