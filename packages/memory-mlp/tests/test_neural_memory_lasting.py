"""What makes a NeuralMemory last: what it forgets towards, its norm, its gates' starts; and what
its stats tell of it.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory

from .compared import assert_same_but_for_rounding
from .test_neural_memory import PAPER, applied, plain_projections

F64 = torch.float64


def test_memory_keeps_its_weights_over_thousands_of_tokens(device):
    """The paper's, which forgets towards zero, has lost them by then and cannot learn again: of two
    layers zero is a saddle.
    """
    sizes = dict(heads=1, hidden=64, chunk=16, device=device)
    x = torch.randn(1, 2000, 32, device=device)
    torch.manual_seed(1)
    lasting = NeuralMemory(32, **sizes)
    torch.manual_seed(1)
    paper = NeuralMemory(32, memory_length=100.0, **PAPER, **sizes)
    start = torch.stack([w.norm() for w in lasting.initial.values()]).norm()
    with torch.no_grad():
        assert paper(x)[1].weight_norm().item() < 0.1 * start
        assert 0.5 * start < lasting(x)[1].weight_norm().item() < 4.0 * start


def test_normed_memory_does_not_diverge_where_the_plain_one_does(device):
    """However large the initial weights are: what a step changes shrinks with them."""
    torch.manual_seed(2)
    x = torch.randn(1, 1, 32, device=device) + 0.01 * torch.randn(1, 512, 32, device=device)
    losses = {}
    for name, rule in (("normed", {}), ("paper", PAPER)):
        memory = NeuralMemory(32, hidden=64, chunk=16, device=device, **rule)
        with torch.no_grad():
            for w in memory.initial.values():
                w.mul_(20.0)
            losses[name] = memory(x)[2].loss[0, :, 0]
    assert losses["normed"].isfinite().all()
    assert losses["normed"][-16:].mean() < 2.0 * losses["normed"][:16].mean()
    assert not losses["paper"][-16:].isfinite().all()


def test_memory_that_knows_nothing_is_quiet(device):
    """Beside its input, of unit size: a model with it learns as one without it does at first."""
    x = torch.randn(4, 64, 128, device=device)
    for rule in ({}, PAPER):
        y = NeuralMemory(128, heads=2, device=device, **rule)(x)[0]
        assert y.square().mean().sqrt() < 0.2


def test_loss_is_the_inner_loss_of_each_token(memory_of, device):
    """Also of a sequence that is cut amid a chunk; of pooled steps, of each."""
    memory = memory_of()
    x = torch.randn(2, 15, memory.dim, dtype=F64, device=device)
    _, _, whole = memory(x)
    _, state, first = memory(x[:, :4])
    _, _, later = memory(x[:, 4:], state)
    assert_same_but_for_rounding([torch.cat([first.loss, later.loss], 1)], [whole.loss])
    _, k, v = plain_projections(memory, x)
    weights = list(memory.initial.values())
    for head in range(memory.heads):
        made = applied(k[0, :6, head], [w[head] for w in weights], memory.rules)
        truth = (made - v[0, :6, head]).square().sum(-1)
        assert_same_but_for_rounding([whole.loss[0, :6, head]], [truth.detach()])
    assert not whole.loss.requires_grad
    pooled = memory_of(granularity="chunk")
    assert pooled(x)[2].loss.shape == (2, 2, memory.heads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_length": 1.0}, "memory_length must be above 1, got 1.0"),
        ({"eta_start": 1.0}, "eta_start must be between 0 and 1, got 1.0"),
        ({"rate_start": 0.0}, "rate_start must be .* got 0.0"),
        ({"forget": "nothing"}, 'forget must be "zero" or "initial", got .nothing.'),
        (
            {"granularity": "chunk", "residual_norm": True},
            'residual_norm is for granularity "token", got it with "chunk"',
        ),
    ],
)
def test_starts_and_rules_that_it_does_not_take_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralMemory(8, **options)


def test_gates_start_as_asked_for(device):
    memory = NeuralMemory(
        12, chunk=4, memory_length=500.0, eta_start=0.5, rate_start=0.25, device=device
    )
    stats = memory(torch.randn(2, 7, 12, device=device))[2]
    torch.testing.assert_close(
        torch.stack(stats.means()), torch.tensor([1 / 500, 0.5, 0.5 * 0.5 * 0.25 / 4]).to(device)
    )
