r"""A small network that looks at each parameter group and scales its learning rate.

Of each group: norm of its gradients, norm of its parameters, depth. With x = [log1p(norm),
log1p(norm), depth] and net a perceptron that all groups share:

    out = net(x)    m = 0.1 + 1.9 sigmoid(out)

The last layer begins with no weight and a bias at which m is 1. Around that start, where
sigmoid(start) = 9/19, the same formula is

    m = 1 + 0.95 tanh((out - start) / 2) (1 + tanh(out / 2) / 19)

which is 1 to the last bit there.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, get_args

import torch

Tensor = torch.Tensor
Features = Literal["log", "raw"]
LEAST, MOST = 0.1, 2.0
# Where the multiplier is 1.
START = math.log(0.9 / 1.0)
INPUTS = 3


class NestedController(torch.nn.Module):
    """Multipliers of parameter groups' learning rates, from 0.1 to 2 and at first 1.

    Args:
        hidden: width of the hidden layers.
        layers: how many hidden layers, at least 1.
        features: "log" takes log1p of the norms; "raw" the norms themselves, which large
            parameters saturate once it is trained.
        device, dtype: of the parameters.

    Shape: statistics ``[groups, 3]``, the norm of each group's gradients, the norm of its
    parameters and its relative depth, to multipliers ``[groups]`` in the parameters' dtype.

    Where any statistic is not finite all multipliers are 1, and one whose output is not finite is;
    both by selection, so that nothing waits for the device. Gradients reach the parameters; where a
    multiplier was selected they are zero.

    Raises:
        ValueError: an option is out of its range, or statistics have another shape.
    """

    def __init__(
        self,
        hidden: int = 32,
        layers: int = 2,
        *,
        features: Features = "log",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, number in (("hidden", hidden), ("layers", layers)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
        if features not in get_args(Features):
            raise ValueError(f'features must be "log" or "raw", got {features!r}')
        super().__init__()
        self.hidden, self.features = hidden, features
        widths = [INPUTS] + [hidden] * layers + [1]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, after, device=device, dtype=dtype)
            for width, after in itertools.pairwise(widths)
        )
        self.reset_parameters()

    @property
    def linears(self) -> list[torch.nn.Linear]:
        return list(self.layers)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Xavier's uniform weights and no bias; of the last layer no weight and START."""
        *inner, last = self.linears
        with torch.no_grad():
            for layer in inner:
                torch.nn.init.xavier_uniform_(layer.weight)
                layer.bias.zero_()
            last.weight.zero_()
            last.bias.fill_(START)

    def forward(self, statistics: Tensor) -> Tensor:
        if statistics.ndim != 2 or statistics.shape[1] != INPUTS:
            wanted = f"statistics must have shape [groups, {INPUTS}]"
            raise ValueError(f"{wanted}, got {list(statistics.shape)}")
        weight = self.linears[0].weight
        finite = statistics.isfinite().all()
        # Selected before the network: what is not finite would make its gradients NaN.
        x = torch.where(finite, statistics, 0.0)
        if self.features == "log":
            x = torch.cat([x[:, :2].log1p(), x[:, 2:]], dim=1)
        x = x.to(weight.dtype)
        *inner, last = self.linears
        for layer in inner:
            x = layer(x).relu()
        out = last(x).squeeze(1)
        return torch.where(finite, multipliers_of(out), 1.0)

    def extra_repr(self) -> str:
        return f"features={self.features!r}"


def multipliers_of(out: Tensor) -> Tensor:
    """m of the network's outputs; 1 of those that are not finite."""
    # In the outputs' dtype, as the bias has it.
    start = torch.full((), START, dtype=out.dtype, device=out.device)
    out = torch.where(out.isfinite(), out, start)
    m = 1.0 + 0.95 * ((out - start) / 2).tanh() * (1.0 + (out / 2).tanh() / 19.0)
    return m.clamp(LEAST, MOST)
