r"""Deep momentum gradient descent: momentum is a small MLP m(.) for each matrix, which learns from
each gradient. Eq. 50 of Nested Learning, with u the gradient over its root mean square
r, whose rows are what the MLP takes:

    m(u) = W2 s(u)    s(u) = tanh(W1 u) / sqrt(hidden)
    m' = alpha m - inner_lr grad L(m; u)    W' = (1 - lr wd) W + lr r m'(u)

    L = mean over rows of <m(u), u>            objective "dot"
    L = mean over rows of |m(u) + u|^2 / 2     objective "regression"

so that m(u) learns to descend along the gradients so far. The inner gradient is written
out: with e = u or m(u) + u, over the count of rows,

    dL/dW2 = e^T s    dL/dW1 = ((e W2) (1 - tanh^2) / sqrt(hidden))^T u

Behrouz, Razaviyayn, Zhong and Mirrokni, Nested Learning, arXiv 2512.24695, section 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch

from .._core.checks import check_option
from ..common.checks import check_int32, check_plain_number
from .newton_schulz import newton_schulz, unit
from .stack import Stack, check_switch, working_dtype
from .stacked_optimizer import StackedOptimizer

Tensor = torch.Tensor
Objective = Literal["dot", "regression"]
OBJECTIVES = ("dot", "regression")


class DeepMomentum(StackedOptimizer):
    """Momentum by an MLP for each parameter, which is trained inside the step.

    Where the paper leaves something open, this is the choice:

    * Objective. It proposes the dot product of m(u) and 1, with the gradient as the key; here 1 is
      u again, the value that makes descent of what is learned (its eq. 46 with P = u): the inner
      step moves m(u) towards -u, and likewise for similar gradients. "regression" is its second
      objective, whose memory corrects what it already gives.
    * Shape. The MLP takes rows of the gradient, for which the shapes of its eq. 50 fit: a matrix
      [rows, columns] has W1 [hidden, columns] and W2 [columns, hidden]. A vector is a column, so
      that one small MLP takes each of its elements; a tensor of more than two axes is a matrix of
      its first axis by all others.
    * Nonlinearity. tanh, which is odd as momentum is: opposite gradients have opposite steps.
    * Unit. u is the gradient over its root mean square, and the output has it again, so that steps
      are as large as gradients are.
    * Start. W2 is zero, W1 random from the seed and the parameter's place. alpha pulls both there,
      since an MLP that decays to zero learns no more.
    * Output. ``orthogonal`` takes the orthogonal factor of m(u) for a step: eq. 52 with
      Newton-Schulz as sigma.

    Args:
        params: tensors, parameter groups or named parameters, as torch's optimizers take them:
            floating, not sharded.
        lr, weight_decay: numbers, or 0-d tensors that a captured step reads again. Decay is
            decoupled.
        alpha: the part of what the MLP has learned that an inner step retains, from 0 to below 1.
        inner_lr: of the inner step; 1 - alpha where left out, which makes W2 a running mean.
        hidden: width of the MLP.
        objective: "dot" or "regression".
        orthogonal: step along the orthogonal factor of m(u), in fp32 and not times r; for groups of
            matrices.
        seed: of W1.
        maximize, capturable, skip_nonfinite: as ``Muon`` has them.

    The state of a parameter is ``w1``, ``w2`` and ``w1_start``, together 3 hidden columns numbers
    however many rows there are. Arithmetic and state are fp32 for narrower parameters; fp32
    products follow torch's TF32 switch.

    Raises:
        TypeError: a parameter is not floating, not strided or sharded; a gradient is sparse.
        ValueError: an option is out of its range, a gradient or a loaded state has another shape or
            device than its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        inner_lr: float | None = None,
        hidden: int = 32,
        weight_decay: float | Tensor = 0.0,
        *,
        objective: Objective = "dot",
        orthogonal: bool = False,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        """Take the arguments that the class names."""
        defaults = dict(
            lr=lr,
            alpha=alpha,
            inner_lr=inner_lr,
            hidden=hidden,
            weight_decay=weight_decay,
            objective=objective,
            orthogonal=orthogonal,
            seed=seed,
            maximize=maximize,
            capturable=capturable,
        )
        super().__init__(params, defaults, skip_nonfinite)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_plain_number("alpha", group["alpha"], below=1.0)
        if group["inner_lr"] is not None:
            check_plain_number("inner_lr", group["inner_lr"])
        check_option("objective", group["objective"], OBJECTIVES)
        check_switch("orthogonal", group["orthogonal"])
        check_int32("hidden", group["hidden"], lowest=1)
        check_int32("seed", group["seed"])

    def _new_state(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        width, hidden = as_columns(p.unsqueeze(0)).shape[-1], group["hidden"]
        like: dict[str, Any] = dict(dtype=working_dtype(p.dtype), device=p.device)
        generator = torch.Generator(p.device).manual_seed(group["seed"] + place)
        w1 = torch.randn(hidden, width, generator=generator, **like) / math.sqrt(max(1, width))
        return {"w1": w1, "w2": torch.zeros(width, hidden, **like), "w1_start": w1}

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        lr, p = group["lr"], stack.values()
        buffers = stack.buffers
        gradient = as_columns(g)
        if gradient.numel() == 0:
            return
        size = math.sqrt(gradient[0].numel())
        u, norm = unit(gradient)
        u, r = size * u, norm / size
        w1, w2 = trained(u, buffers["w1"], buffers["w2"], buffers["w1_start"], group)
        output = momentum_of(u, w1, w2)
        output = newton_schulz(output) if group["orthogonal"] else r * output
        stack.move(skips, p, (1.0 - lr * group["weight_decay"]) * p + lr * output.view_as(p))
        stack.keep(skips, w1=w1, w2=w2)


def as_columns(x: Tensor) -> Tensor:
    """``[stack, rows, columns]``; of vectors one column, of more axes the first by all others."""
    return x.flatten(2) if x.dim() > 2 else x.reshape(x.shape[0], -1, 1)


def momentum_of(u: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """m(u), row by row."""
    return torch.tanh(u @ w1.mT) @ w2.mT / math.sqrt(w1.shape[-2])


def trained(
    u: Tensor, w1: Tensor, w2: Tensor, w1_start: Tensor, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Both layers after an inner step on these rows."""
    alpha, rate = group["alpha"], group["inner_lr"]
    rate = 1.0 - alpha if rate is None else rate
    activations = torch.tanh(u @ w1.mT)
    s = activations / math.sqrt(w1.shape[-2])
    e = u if group["objective"] == "dot" else s @ w2.mT + u
    e = e / u.shape[-2]
    gradient2 = e.mT @ s
    gradient1 = ((e @ w2) * (1.0 - activations * activations) / math.sqrt(w1.shape[-2])).mT @ u
    w1 = w1_start + alpha * (w1 - w1_start) - rate * gradient1
    return w1, alpha * w2 - rate * gradient2
