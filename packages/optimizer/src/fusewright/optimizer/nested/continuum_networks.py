"""The two networks that a continuum of momenta may take: one of elements, one of scalars."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.typed import called_as

Tensor = torch.Tensor
# Log-sign features are linear below e^-REACH (Andrychowicz et al., arXiv 1606.04474, A).
REACH = 10.0
# The element network's largest width, and the factor of the sign that it begins with.
WIDEST, SIGN_FACTOR = 20, 0.1


def log_sign(g: Tensor) -> tuple[Tensor, Tensor]:
    """(log |g| / 10, sign g) where |g| >= e^-10, else (-1, e^10 g)."""
    least = torch.e**-REACH
    size = g.abs()
    large = size >= least
    scale = torch.where(large, size.clamp(min=least).log() / REACH, -1.0)
    # NaN is not large.
    return scale, torch.where(large, g.sign(), g / least)


def perceptron(widths: Sequence[int], **like: Any) -> Any:
    """Linear layers of these widths, from the input's to the output's."""
    return torch.nn.ModuleList(
        torch.nn.Linear(width, after, **like) for width, after in itertools.pairwise(widths)
    )


def through(layers: Any, x: Tensor) -> Tensor:
    *inner, last = layers
    for layer in inner:
        x = torch.nn.functional.silu(layer(x))
    return last(x)


class ElementNetwork(torch.nn.Module):
    """u of each element, of the log-sign features of its gradient and momentum: 4 inputs, SiLU.

    It begins as 0.1 times the gradient's sign, or e^10 / 10 times a gradient below e^-10: since
    silu(x) - silu(-x) = x, two units carry a number through a layer.
    """

    def __init__(self, hidden: int, layers: int, **like: Any) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        hidden = min(hidden, WIDEST)
        self.layers = perceptron([4] + [hidden] * layers + [1], **like)
        *inner, last = self.layers
        with torch.no_grad():
            for number, layer in enumerate(inner):
                # The sign is the second feature; the difference of two units carries a number.
                carried = [0.0, 1.0] if number == 0 else [1.0, -1.0]
                layer.weight[:2].zero_()
                layer.weight[0, :2].copy_(torch.tensor(carried))
                layer.weight[1] = -layer.weight[0]
                layer.bias[:2].zero_()
            last.weight.zero_()
            last.weight[0, 0], last.weight[0, 1] = SIGN_FACTOR, -SIGN_FACTOR
            last.bias.zero_()

    def forward(self, g: Tensor, m: Tensor) -> Tensor:
        """``[elements]`` of gradient and momentum to ``[elements]``."""
        features = torch.stack([*log_sign(g), *log_sign(m)], dim=1)
        return through(self.layers, features).squeeze(1)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class ScalarNetwork(torch.nn.Module):
    """Scale, shift and damping of a parameter's momentum, of mean, deviation and norm of momentum
    and gradient, t / 1000, learning rate and log(1 + loss): 9 inputs, SiLU.

    The last layer begins with no weight and biases at which they are about 0.90, 0.995 and 0.007;
    nothing here trains it.
    """

    def __init__(self, hidden: int, layers: int, **like: Any) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.layers = perceptron([9] + [hidden] * layers + [3], **like)
        with torch.no_grad():
            self.layers[-1].weight.zero_()
            self.layers[-1].bias.copy_(torch.tensor([1.5, 3.0, -5.0]))

    def forward(self, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[parameters, 9]`` to three of ``[parameters]``."""
        scale, shift, damping = through(self.layers, statistics).unbind(1)
        return 0.5 + 0.49 * scale.sigmoid(), shift.tanh(), damping.sigmoid()

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
