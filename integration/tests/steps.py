"""How a training is compared with the same one in fp64: step by step, from equal states.

Training is chaotic: what one step rounds moves all later ones, and a choice that flips moves them
far. So no losses of later steps are held against those of another training. Both take the same
steps of one training instead, each from the state that this training has come to; and of whole
trainings the final losses of several seeds are compared, by the spread that the seeds have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from fusewright_testkit.yardstick import (
    MOVES,
    Allowance,
    MovedResults,
    RoundedProducts,
    assert_within,
)
from torch import Tensor, nn

SEEDS = 5
# How many of the last steps make a final loss, and of the first one a loss at the start.
ENDS = 5

# The loss of a model, in its own dtype, on the batch of a step.
LossOf = Callable[[nn.Module, int], Tensor]


def autocast_to(model: nn.Module, dtype: torch.dtype) -> torch.autocast:
    p = next(model.parameters())
    enabled = dtype != torch.float32 and p.dtype != torch.float64
    return torch.autocast(p.device.type, dtype if enabled else None, enabled=enabled)


def step_of(model: nn.Module, loss: Callable[[nn.Module], Tensor], dtype: torch.dtype):
    """The loss and the gradient of each parameter, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    with autocast_to(model, dtype):
        value = loss(model)
    gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
    return {"the loss": value.detach(), **dict(zip(names, gradients, strict=True))}


def check_steps(
    found: nn.Module,
    reference: nn.Module,
    loss_of: LossOf,
    looked_at: Collection[int],
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Train the reference, under autocast to ``dtype``, and at some of the steps hold the loss and
    all gradients of ``found``, from the reference's state, to the yardstick.

    The truth is the reference in fp64, which is computed first; the allowance the largest error of
    the reference as it is, of the same with every operand of a product rounded, and of the truth
    when what fp32 rounds, and what autocast rounds of products, moves at random. Of all steps that
    are looked at together: a gradient of one number is more than one draw.

    Returns:
        The losses of all steps.
    """
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    seen, losses = [], []
    for step in range(steps):
        if step in looked_at:
            # A loss may move a buffer.
            start = copy.deepcopy(reference.state_dict())
            seen.append(runs_of(found, reference, lambda model, s=step: loss_of(model, s), dtype))
            reference.load_state_dict(start)
        optimizer.zero_grad()
        with autocast_to(reference, dtype):
            loss = loss_of(reference, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert len(seen) == len(looked_at)
    for name in seen[0][0]:
        runs = ([x[name] for x in some] for some in zip(*seen, strict=True))
        truth, value, *others = map(torch.stack, runs)
        assert_within(value, truth, Allowance.of(truth, *others), name)
    return torch.stack(losses)


def runs_of(
    found: nn.Module,
    reference: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    dtype: torch.dtype,
) -> list[dict[str, Tensor]]:
    """The same step in fp64, of ``found``, and those that make the allowance."""
    start = copy.deepcopy(reference.state_dict())

    def run(model: nn.Module) -> dict[str, Tensor]:
        model.load_state_dict(start)
        return step_of(model, loss, dtype)

    def moved() -> dict[str, Tensor]:
        reference.load_state_dict(start)
        with MovedResults(dtype):
            # Its parameters are moved, too.
            return step_of(copy.deepcopy(reference).double(), loss, dtype)

    runs = [run(copy.deepcopy(reference).double()), run(found), run(reference)]
    with RoundedProducts(dtype):
        runs.append(run(reference))
    return runs + [moved() for _ in range(MOVES)]


def trained(
    model: nn.Module, loss_of: LossOf, steps: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with autocast_to(model, dtype):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_final_losses(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Losses of trainings, paired by seed: all fall, and where they end differs, in the mean over
    the seeds, by less than the seeds do.
    """
    assert len(found) == len(expected) == SEEDS
    first, last = (
        torch.stack([torch.stack([x[part].mean() for x in some]) for some in (found, expected)])
        for part in (slice(ENDS), slice(-ENDS, None))
    )
    assert (last < first).all()
    difference, spread = (last[0] - last[1]).mean().abs(), last[1].std()
    assert difference < spread, f"final losses differ by {difference:.3e}; seeds by {spread:.3e}"
