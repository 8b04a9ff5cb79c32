"""A hyperparameter's gradient twice: by TorchOpt's implicit differentiation at the end of a
training, and through all steps of that training.

    pip install ./packages/optimizer torchopt
    python torchopt_implicit.py

Ridge regression with a learned strength s: the training solves

    p(s) = argmin_p mean (x p - y)^2 / 2 + exp(s) |p|^2 / 2

and the gradient of another data set's loss for s is wanted. TorchOpt's ``custom_root`` takes any
solver and differentiates its result by what holds there, that the training's gradient is zero;
``FunctionalAdamW`` is the solver. Its steps are differentiable themselves, and where it has
converged both gradients are the same: implicitly in the memory of one step, unrolled without a
linear system.
"""

from __future__ import annotations

from typing import Any

import torch
from fusewright.optimizer import FunctionalAdamW, FunctionalLearnedOptimizer
from torchopt.base import GradientTransformation
from torchopt.diff.implicit import custom_root
from torchopt.linear_solve import solve_cg

Tensor = torch.Tensor
Data = tuple[Tensor, Tensor]


def as_torchopt(optimizer: FunctionalAdamW | FunctionalLearnedOptimizer) -> GradientTransformation:
    """The optimizer as TorchOpt has them: for ``torchopt.FuncOptimizer``, ``apply_updates`` and
    ``chain``.
    """

    def update(gradients: Any, state: Any, *, params: Any = None, inplace: bool = False) -> Any:
        if inplace:
            raise ValueError("steps are pure functions: inplace must be False")
        return optimizer.update(gradients, state, params)

    return GradientTransformation(optimizer.init, update)


def error(p: Tensor, data: Data) -> Tensor:
    x, y = data
    return (x @ p - y).square().mean() / 2.0


def optimality(p: Tensor, strength: Tensor, data: Data) -> Tensor:
    """The gradient of the training's objective, zero at its end."""

    def objective(p: Tensor) -> Tensor:
        return error(p, data) + strength.exp() * p.square().sum() / 2.0

    return torch.func.grad(objective)(p)


# With an eps as large as the gradients, steps near the end are those of descent with momentum,
# which converge; with a small one they would keep the size of lr.
SOLVER = FunctionalAdamW(lr=0.05, betas=(0.5, 0.9), eps=0.1, weight_decay=0.0)


def unrolled(p: Tensor, strength: Tensor, data: Data, steps: int = 400) -> Tensor:
    """The trained parameters; gradients pass through every step."""
    state = SOLVER.init(p)
    for _ in range(steps):
        updates, state = SOLVER.update(optimality(p, strength, data), state, p)
        p = SOLVER.apply(p, updates)
    return p


@custom_root(optimality, argnums=1, solve=solve_cg(rtol=0.0, atol=1e-14))
def implicit(p: Tensor, strength: Tensor, data: Data) -> Tensor:
    """The same parameters, with the gradient that follows from ``optimality``."""
    with torch.no_grad():
        return unrolled(p, strength, data)


def problem(columns: int = 5) -> tuple[Tensor, Data, Data]:
    """Where the training starts, its data, and the other data."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth = drawn(columns)
    x, other = drawn(40, columns), drawn(40, columns)
    data = x, x @ truth + drawn(40)
    return torch.zeros_like(truth), data, (other, other @ truth)


def main() -> None:
    start, data, other = problem()
    for solver in (implicit, unrolled):
        strength = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
        loss = error(solver(start.requires_grad_(), strength, data), other)
        (gradient,) = torch.autograd.grad(loss, strength)
        print(f"{solver.__name__}: loss {loss.item():.15f}, gradient {gradient.item():.15f}")


if __name__ == "__main__":
    main()
