r"""Delta momentum: momentum that forgets along each new gradient. For each matrix W
[rows, columns] of gradient g, eq. 48 and 49 of Nested Learning with the preconditioner P = I:

    m' = m (alpha I - delta k^T k) - lr g    W' = (1 - lr wd) W + m'

with the key k = g / |g|_F, or k = g as in the paper. Momentum is here a memory that regression of
the gradients teaches, by the delta rule, where plain momentum is taught by their dot product alone:
what it holds along the gradient's rows is replaced, all else stays.

Behrouz, Razaviyayn, Zhong and Mirrokni, Nested Learning, arXiv 2512.24695, section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..common.checks import check_plain_number
from .newton_schulz import unit
from .stack import Stack, check_switch, new_buffer
from .stacked_optimizer import StackedOptimizer

Tensor = torch.Tensor


class DeltaMomentum(StackedOptimizer):
    """Momentum with a decay that depends on the gradient, for parameters of any shape.

    Where the paper leaves something open, this is the choice:

    * P, which maps gradients to the values that the memory learns for them, is the identity.
    * Stability. As the paper writes it, alpha I - g^T g has eigenvalues alpha - s^2 for the
      gradient's singular values s: beyond s^2 = 1 + alpha momentum grows without bound. With
      ``normalize``, the default, the key is the gradient over its Frobenius norm, as in normalised
      least mean squares: the eigenvalues lie between alpha - delta and alpha whatever the gradient.
      normalize=False with delta=1 is the paper's.
    * A vector is a matrix of one row, so that what is forgotten lies along the gradient; a tensor
      of more than two axes is one of its first axis by all others.
    * lr multiplies a gradient when it enters momentum, as eta does in the paper: a new lr does not
      change what momentum holds.
    * Weight decay is decoupled, and 0 by default: the paper has none.

    Args:
        params: tensors, parameter groups or named parameters, as torch's optimizers take them:
            floating, not sharded.
        lr, weight_decay: numbers, or 0-d tensors that a captured step reads again.
        alpha: what momentum retains, from 0 to 1; 1 excluded.
        delta: how much of what it holds along the gradient is taken away, from 0, which is
            torch.optim.SGD's momentum, to 1 + alpha.
        normalize: take the gradient over its norm as the key.
        maximize, capturable, skip_nonfinite: as ``Muon`` has them; without normalize the step takes
            squares of gradients.

    The state of a parameter is ``momentum_buffer``. Arithmetic and state are fp32 for narrower
    parameters; fp32 products follow torch's TF32 switch.

    Raises:
        TypeError: a parameter is not floating, not strided or sharded; a gradient is sparse.
        ValueError: an option is out of its range, a gradient or a loaded state has another shape or
            device than its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        alpha: float = 0.9,
        delta: float = 1.0,
        weight_decay: float | Tensor = 0.0,
        *,
        normalize: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        """Take the arguments that the class names."""
        defaults = dict(
            lr=lr,
            alpha=alpha,
            delta=delta,
            weight_decay=weight_decay,
            normalize=normalize,
            maximize=maximize,
            capturable=capturable,
        )
        super().__init__(params, defaults, skip_nonfinite)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_plain_number("alpha", group["alpha"], below=1.0)
        check_plain_number("delta", group["delta"])
        if group["delta"] > 1.0 + group["alpha"]:
            wanted = f"delta must be at most 1 + alpha = {1.0 + group['alpha']:g}"
            raise ValueError(f"{wanted}, got {group['delta']!r}")
        check_switch("normalize", group["normalize"])

    def _new_state(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        return {"momentum_buffer": new_buffer(p)}

    def _squared(self, stack: Stack) -> list[torch.dtype]:
        # The product of a gradient with itself.
        plain = not self.param_groups[stack.number]["normalize"]
        return [x.dtype for x in stack.buffers.values()] if plain else []

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        lr, p = group["lr"], stack.values()
        m = stack.buffers["momentum_buffer"]
        forgotten = projected(as_rows(m), as_rows(g), group["normalize"]).view_as(p)
        m = group["alpha"] * m - group["delta"] * forgotten - lr * g
        stack.move(skips, p, (1.0 - lr * group["weight_decay"]) * p + m)
        stack.keep(skips, momentum_buffer=m)


def as_rows(x: Tensor) -> Tensor:
    """``[stack, rows, columns]``; of vectors one row, of more axes the first by all others."""
    return x.flatten(2) if x.dim() > 2 else x.reshape(x.shape[0], 1, -1)


def projected(m: Tensor, g: Tensor, normalize: bool) -> Tensor:
    """m k^T k."""
    if g.numel() == 0:
        return m
    k = unit(g)[0] if normalize else g
    # In the order that takes fewer multiplications.
    return (m @ k.mT) @ k if k.shape[-2] <= k.shape[-1] else m @ (k.mT @ k)
