"""The Triton kernels train as the reference does."""

from __future__ import annotations

import pytest
import torch
from fusewright_models import TransformerNP
from fusewright_testkit.yardstick import Allowance, assert_within


def losses_of(model: TransformerNP, batches: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The loss of every AdamW step, each on a batch of its own."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = -model.log_likelihood(*(rows.to(dtype) for rows in batch)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("norm", "steps"),
    [("pre", 100), ("post", 5), pytest.param("post", 100, marks=pytest.mark.slow)],
)
def test_losses_of_the_kernels_follow_the_reference(small, rows, device, norm, steps):
    """The truth is the reference backend trained in fp64, the allowance the same in fp32."""
    start = small(norm=norm).state_dict()
    batches = [tuple(x.to(device) for x in rows(2, 5, 4)) for _ in range(steps)]
    losses = {}
    for name, backend, dtype in (
        ("truth", "reference", torch.float64),
        ("allowance", "reference", torch.float32),
        ("kernels", "triton", torch.float32),
    ):
        model = small(norm=norm, backend=backend, dtype=dtype).to(device)
        model.load_state_dict(start)
        losses[name] = losses_of(model, batches)
    allowed = Allowance.of(losses["truth"], losses["allowance"])
    assert_within(losses["kernels"], losses["truth"], allowed, "losses")
    assert losses["truth"][0] != losses["truth"][-1]
