r"""A small network that looks at each parameter group and scales its learning rate.

Its inputs are the norm of the group's gradients, the norm of its parameters, and its depth. With
x = [log1p(norm), log1p(norm), depth] and net a perceptron that all groups share:

    out = net(x)    m = 0.1 + 1.9 sigmoid(out)

The last layer begins with no weight and a bias at which m is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from .._core.checks import check_option, checked_count
from .._core.typed import called_as
from .continuum_networks import perceptron
from .reference import INPUTS, START, multipliers_of

Tensor = torch.Tensor
Features = Literal["log", "raw"]


class NestedController(torch.nn.Module):
    """Multipliers of parameter groups' learning rates, from 0.1 to 2 and at first 1.

    Args:
        hidden: width of the hidden layers.
        layers: how many hidden layers, at least 1.
        features: "log" takes log1p of the norms; "raw" the norms themselves, with which large
            parameters saturate a trained network.
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
        """Take the arguments that the class names."""
        hidden, layers = checked_count("hidden", hidden), checked_count("layers", layers)
        check_option("features", features, get_args(Features))
        super().__init__()
        self.hidden: int = hidden
        self.features: Features = features
        widths = [INPUTS] + [hidden] * layers + [1]
        self.layers: torch.nn.ModuleList = perceptron(widths, device=device, dtype=dtype)
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
        """``statistics``: ``[groups, 3]``; returns multipliers ``[groups]``."""
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

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return f"features={self.features!r}"
