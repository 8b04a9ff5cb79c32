"""What is asked of every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def assert_every_parameter_learns(
    model: nn.Module, loss: Callable[[], Tensor], *, lr: float = 1e-3
) -> None:
    """Within three steps of AdamW each has had a gradient that is not zero, and none that is not
    finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    left = dict(model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        left = {name: p for name, p in left.items() if p.grad is None or not p.grad.any()}
        optimizer.step()
    assert list(left) == []


@torch.no_grad()
def assert_nothing_sees_the_future(
    read: Callable[[Tensor], Tensor], tokens: Tensor, places: Iterable[int], vocab_size: int
) -> None:
    """Another token in the first row changes what is read of it and of later ones there alone."""
    before = read(tokens)
    for place in places:
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % vocab_size
        after = read(changed)
        assert torch.equal(after[0, :place], before[0, :place])
        assert (after[0, place] != before[0, place]).any()
        assert torch.equal(after[1:], before[1:])
