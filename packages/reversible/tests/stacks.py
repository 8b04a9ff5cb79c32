"""Stacks of small layers, and what they give: states, aux and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fusewright.reversible import MidpointStack, Tape
from torch import Tensor, nn

WIDTH = 6


class Layer(nn.Module):
    """x -> W2 tanh(W1 x) with what a layer may have besides: a choice, dropout, a mean that it
    keeps, and something to add to the loss.
    """

    def __init__(self, *, drop: float = 0.0, keeps: bool = False, chooses: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(drop)
        self.keeps, self.chooses = keeps, chooses
        self.calls: list[bool] = []
        if keeps:
            self.register_buffer("mean", torch.ones(()))
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)

    def force(
        self, x: Tensor, *, tape: Tape | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(torch.is_grad_enabled())
        y = self.outer(self.dropout(torch.tanh(self.inner(x * self.table))))
        if self.keeps:
            y = y * self.mean.clone()
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * x.detach().abs().mean())
        if self.chooses:
            columns = None if tape is None else tape.replayed()
            if columns is None:
                columns = torch.randint(0, WIDTH, (WIDTH,))
            if tape is not None:
                tape.record(columns)
            y = y[..., columns]
        return scale * y, y.square().mean()


def make(mode="exact", layers=5, backend="auto", **options):
    torch.manual_seed(3)
    return MidpointStack([Layer(**options) for _ in range(layers)], mode=mode, backend=backend)


def results(stack: MidpointStack, x: Tensor, **context: object) -> list[Tensor]:
    """Last state, aux, and the gradients of x and of the parameters."""
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    passed = stack(x, **context)
    loss = (passed.x * torch.cos(passed.x.detach())).sum() + 0.3 * passed.aux
    grads = torch.autograd.grad(loss, [x, *stack.parameters()])
    assert not passed.saturated.item()
    return [passed.x.detach(), passed.aux.detach(), *grads]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


class Force(nn.Module):
    """A layer of one function of x and of what else the stack passes."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def force(self, x, *, tape, **context):
        return self.function(self, x, **context)


class Random(nn.Module):
    """A layer of one function of x and of numbers that it draws itself."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Linear(WIDTH, WIDTH)

    def force(self, x, *, tape):
        return self.draw(torch.tanh(self.linear(x))), None


DRAWS = {
    "dropout": lambda y: F.dropout(y, 0.4),
    "noise": lambda y: y * torch.randn_like(y),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.5),
    "relu": lambda y: F.rrelu(y, training=True),
    "switch": lambda y: y if torch.rand(()) < 0.5 else 2.0 * y.sin(),
    "gumbel": lambda y: F.gumbel_softmax(y),
}
