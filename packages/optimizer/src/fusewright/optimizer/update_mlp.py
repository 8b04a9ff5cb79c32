"""The network of the learned optimizer, its decays, and the public file that has its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from ._backends import Backend
from ._public_files import read_weights
from .learned_features import (
    FACTORED_DECAYS,
    FEATURES,
    MOMENTUM_DECAYS,
    SQUARE_DECAYS,
    Decays,
    Statistics,
    Weights,
    decays_of,
)

Tensor = torch.Tensor
HIDDEN = 32
# The public file's name of each weight, and ours.
PUBLIC_NAMES = {
    "network.input.weight": "first.weight",
    "network.input.bias": "first.bias",
    "network.linear_0.weight": "second.weight",
    "network.linear_0.bias": "second.bias",
    "network.output.weight": "last.weight",
    "network.output.bias": "last.bias",
}
# What was learned with the public weights and is not in their file: defaults of PyLO's AdafacLO.
PUBLIC_OFFSETS = {
    "momentum_offsets": (0.15216392, 0.14245212, 0.06812963),
    "square_offsets": (0.01079706,),
    "factored_offsets": (0.18621896, -0.10864615, -0.06185547),
}


class UpdateMLP(nn.Module):
    """The network of ``fusewright.optimizer.LearnedOptimizer``: 39 features and what the caller
    adds, 32 ReLU, 32 ReLU, direction and magnitude of an element's update.

    Args:
        extra_features: how many numbers the caller adds, which are not normalised.
        exp_mult, step_mult: update = direction exp(exp_mult magnitude) step_mult.

    Attributes:
        first, second, last: ``nn.Linear`` of fp32 (kernels read them) or fp64; weights start
            normal, cut at two deviations of 1 / sqrt(inputs), biases at zero.
        momentum_offsets, square_offsets, factored_offsets: ``[3]``, ``[1]`` and ``[3]``, learned
            changes of the decays (.9, .99, .999), (.999) and (.9, .99, .999); they start at zero
            and without ``requires_grad``.

    A call is one step as a function whose gradients reach the weights: see ``forward``. Metz et
    al., arXiv 2203.11860.

    Raises:
        ValueError: extra_features is no whole number of at least 0.
    """

    def __init__(
        self, extra_features: int = 0, *, exp_mult: float = 0.001, step_mult: float = 0.01
    ) -> None:
        super().__init__()
        if isinstance(extra_features, bool) or not isinstance(extra_features, int):
            raise ValueError(f"extra_features must be a whole number, got {extra_features!r}")
        if extra_features < 0:
            raise ValueError(f"extra_features must be at least 0, got {extra_features}")
        self.extra_features = extra_features
        self.exp_mult, self.step_mult = float(exp_mult), float(step_mult)
        self.first = nn.Linear(FEATURES + extra_features, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 2)
        self.momentum_offsets = zeros(MOMENTUM_DECAYS)
        self.square_offsets = zeros(SQUARE_DECAYS)
        self.factored_offsets = zeros(FACTORED_DECAYS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for layer in (self.first, self.second, self.last):
            deviation = layer.in_features**-0.5
            nn.init.trunc_normal_(layer.weight, 0.0, deviation, -2 * deviation, 2 * deviation)
            nn.init.zeros_(layer.bias)

    def extra_repr(self) -> str:
        return (
            f"extra_features={self.extra_features}, exp_mult={self.exp_mult}, "
            f"step_mult={self.step_mult}"
        )

    def weights(self) -> Weights:
        """Weights and biases in the order of the layers."""
        layers = (self.first, self.second, self.last)
        return Weights(*(x for layer in layers for x in (layer.weight, layer.bias)))

    def offsets(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.momentum_offsets, self.square_offsets, self.factored_offsets

    def decays(self) -> Decays:
        """The decays of momenta ``[3]``, square ``[1]`` and rows and columns ``[3]``, fp64."""
        return decays_of(*self.offsets())

    def forward(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        statistics: Sequence[Statistics],
        extra: Sequence[Tensor] | None = None,
        *,
        backend: Backend = "auto",
    ) -> tuple[list[Tensor], list[Statistics]]:
        """One step as a function: see ``fusewright.optimizer.learned_update``."""
        from .learned_update import learned_update

        return learned_update(self, params, gradients, statistics, extra, backend=backend)


def zeros(decays: Sequence[float]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(len(decays)), requires_grad=False)


def load_update_mlp(path: str | os.PathLike, *, step_mult: float = 0.01) -> UpdateMLP:
    """The public weights from a local file: model.safetensors of the Hugging Face model
    btherien/mulo, with the decays that were learned with them.

    Args:
        path: of the file; nothing is fetched.
        step_mult: of the update; the public weights go with 0.01.

    Returns:
        A network without gradients. ``requires_grad_()`` of its ``weights()`` makes it live; with
        gradients to its offsets too only plain torch serves.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: the file is no safetensors file, or has other names or shapes than those of the
            public weights.
    """
    found = read_weights(path, "load_update_mlp")
    mlp = UpdateMLP(step_mult=step_mult)
    wanted = mlp.state_dict()
    if set(found) != set(PUBLIC_NAMES):
        raise ValueError(
            f"the file must have the weights {sorted(PUBLIC_NAMES)}, got {sorted(found)}"
        )
    for public, name in PUBLIC_NAMES.items():
        if found[public].shape != wanted[name].shape:
            raise ValueError(
                f"{public} must have shape {list(wanted[name].shape)}, got "
                f"{list(found[public].shape)}"
            )
    offsets = {name: torch.tensor(values) for name, values in PUBLIC_OFFSETS.items()}
    mlp.load_state_dict({PUBLIC_NAMES[name]: x for name, x in found.items()} | offsets)
    return mlp.requires_grad_(False)
