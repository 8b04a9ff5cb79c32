"""A learned optimizer that sees what a neural memory holds: extra features of each parameter."""

from __future__ import annotations

import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright.optimizer import LearnedOptimizer, UpdateMLP
from torch import nn


def test_a_learned_optimizer_sees_what_a_memory_holds(device):
    torch.manual_seed(0)
    memory, read = NeuralMemory(16, heads=2, chunk=4).to(device), nn.Linear(16, 16).to(device)
    x = torch.randn(2, 9, 16, device=device)
    # What the memory's weights have come to, of each head, and 0 where a parameter is not its own.
    held = torch.zeros(2, device=device)
    nothing = torch.zeros(2, device=device)
    own = set(memory.parameters())
    ps = [*memory.parameters(), *read.parameters()]
    mlp = UpdateMLP(extra_features=2).to(device)
    with torch.no_grad():
        for name, weight in mlp.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 if "weight" in name else weight)
    optimizer = LearnedOptimizer(
        ps, mlp, lr=0.1, extra_features=lambda p: held if p in own else nothing
    )

    def moves(told: bool) -> list[torch.Tensor]:
        before = [p.detach().clone() for p in ps]
        y, state, _ = memory(x)
        optimizer.zero_grad()
        (read(y) - x).square().mean().backward()
        held.copy_(state.weight_norm().mean(0) if told else nothing)
        optimizer.step()
        found = [p.detach() - was for p, was in zip(ps, before, strict=True)]
        with torch.no_grad():
            for p, was in zip(ps, before, strict=True):
                p.copy_(was)
        optimizer.state.clear()
        return found

    silent, told = moves(False), moves(True)
    assert all(move.isfinite().all() for move in told)
    for p, one, other in zip(ps, silent, told, strict=True):
        # The memory's parameters move as it is told, the others as before.
        assert torch.equal(one, other) == (p not in own), p.shape
