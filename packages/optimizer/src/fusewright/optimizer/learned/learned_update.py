"""The network of the learned optimizer, and its step as functions, for unrolled training.

    updates, statistics' = update(network, params, gradients, statistics)
    params' = (1 - lr wd) (params - lr updates)

On a GPU the updates of all tensors are computed as by ``LearnedOptimizer``, their features never in
memory. One launch, which recomputes features and layers, gives the gradients of the network's
weights and biases, and of the features that the caller adds. They are exact for this step: in these
launches parameters, gradients and statistics are constants. Plain torch differentiates everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .._core.backends import Backend, check_backend, decline, uses_triton
from .._core.checks import checked_count
from .._core.typed import called_as
from ..common.statistics.checks import tensor_obstacle
from ..common.statistics.reference import (
    START_DECAYS,
    Decays,
    Statistics,
    Weights,
    advanced,
    new_statistics,
)
from ..common.weights_file import cut_normal_
from .autograd import by_kernels
from .checks import check_arguments, network_obstacle
from .reference import FEATURES, decays_of, update_of

Tensor = torch.Tensor
HIDDEN = 32


class UpdateMLP(nn.Module):
    """The network of ``fusewright.optimizer.LearnedOptimizer``: 39 features and those that the
    caller adds, 32 ReLU, 32 ReLU, direction and magnitude of an element's update.

    Args:
        extra_features: how many features the caller adds, which are not normalised.
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
        TypeError: extra_features is no whole number.
        ValueError: extra_features is below 0.
    """

    momentum_offsets: nn.Parameter
    square_offsets: nn.Parameter
    factored_offsets: nn.Parameter

    def __init__(
        self, extra_features: int = 0, *, exp_mult: float = 0.001, step_mult: float = 0.01
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.extra_features: int = checked_count("extra_features", extra_features, lowest=0)
        self.exp_mult: float = float(exp_mult)
        self.step_mult: float = float(step_mult)
        self.first: nn.Linear = nn.Linear(FEATURES + extra_features, HIDDEN)
        self.second: nn.Linear = nn.Linear(HIDDEN, HIDDEN)
        self.last: nn.Linear = nn.Linear(HIDDEN, 2)
        offsets = (torch.zeros(len(some)) for some in START_DECAYS)
        parameters = (nn.Parameter(x, requires_grad=False) for x in offsets)
        self.momentum_offsets, self.square_offsets, self.factored_offsets = parameters
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        for layer in (self.first, self.second, self.last):
            cut_normal_(layer.weight, layer.in_features)
            nn.init.zeros_(layer.bias)

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
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
        return learned_update(self, params, gradients, statistics, extra, backend=backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


def learned_init(params: Sequence[Tensor]) -> list[Statistics]:
    """What ``learned_update`` keeps of each parameter, before the first step."""
    return [new_statistics(p.detach()) for p in params]


def learned_update(
    mlp: UpdateMLP,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    statistics: Sequence[Statistics],
    extra: Sequence[Tensor] | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[list[Tensor], list[Statistics]]:
    """The learned optimizer's step as a function.

    Args:
        mlp: the network; live where its weights require gradients. Calling it is this function, so
            that ``torch.func.functional_call`` may give it other weights.
        params: real tensors of any shapes, on the device of the network.
        gradients: of the same shapes.
        statistics: of ``learned_init`` or of the step before.
        extra: for each parameter ``[extra_features]``, numbers for all of its elements, or a tensor
            that can be broadcast to ``[*shape, extra_features]``; they are not normalised.
        backend: "auto" takes the kernels for CUDA tensors and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Returns:
        The updates, fp32 (fp64 for fp64) of the parameters' shapes, and the statistics after this
        step. With the kernels gradients flow from the updates to weights, biases and ``extra``, and
        to nothing else, statistics are without gradients, and second derivatives are refused; where
        a parameter, a gradient, a statistic or an offset of the decays wants a gradient, plain
        torch serves, which gives it.

    Raises:
        TypeError: a parameter is complex, distributed, sparse or not floating, or a gradient is of
            another kind.
        ValueError: sequences of different lengths, or tensors of other shapes or devices.
        RuntimeError: backend is "triton" and the kernels cannot serve.
    """
    check_backend(backend)
    check_arguments(mlp, params, gradients, statistics, extra)
    constants = [*params, *gradients, *(x for some in statistics for x in some), *mlp.offsets()]
    if params and served(mlp, params, gradients, constants, extra, backend):
        return by_kernels(mlp, params, gradients, statistics, extra)
    decays, weights, multipliers = mlp.decays(), mlp.weights(), (mlp.exp_mult, mlp.step_mult)
    updates, after = [], []
    for place, (p, g, before) in enumerate(zip(params, gradients, statistics, strict=True)):
        statistics_of_p = advanced(before, g, decays)
        added = None if extra is None else extra[place]
        updates.append(update_of(weights, p, g, statistics_of_p, added, *multipliers))
        after.append(statistics_of_p)
    return updates, after


def learned_apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float | Tensor = 1.0,
    weight_decay: float | Tensor = 0.0,
) -> list[Tensor]:
    """(1 - lr wd) (p - lr update) of each, in the parameters' dtypes, of which narrow ones are
    computed in fp32.
    """
    applied = []
    for p, update in zip(params, updates, strict=True):
        wide = p.to(torch.promote_types(p.dtype, update.dtype))
        applied.append(((1.0 - lr * weight_decay) * (wide - lr * update)).to(p.dtype))
    return applied


class FunctionalLearnedOptimizer(NamedTuple):
    """The learned optimizer whose steps are functions of trees of tensors, as ``FunctionalAdamW``
    has them; ``learned_update`` says what gradients reach.

    Attributes:
        mlp: the network, live where its weights require gradients.
        lr, weight_decay: numbers, or tensors of one, which gradients reach.
        backend: of ``learned_update``.
    """

    mlp: UpdateMLP
    lr: float | Tensor = 1.0
    weight_decay: float | Tensor = 0.0
    backend: Backend = "auto"

    def init(self, params: Any) -> tuple[Statistics, ...]:
        """The statistics of each tensor of a tree (list, tuple, dict or tensor), before the first
        step.
        """
        return tuple(learned_init(tree_leaves(params)))

    def update(
        self,
        gradients: Any,
        state: Sequence[Statistics],
        params: Any,
        extra: Sequence[Tensor] | None = None,
    ) -> tuple[Any, tuple[Statistics, ...]]:
        """What a step adds to the parameters, and the statistics after it.

        Args:
            gradients, params: trees of one form.
            state: of ``init`` or of the step before.
            extra: as ``learned_update`` has it, in the order of the tree.
        """
        leaves, form = tree_flatten(params)
        updates, after = learned_update(
            self.mlp, leaves, tree_leaves(gradients), state, extra, backend=self.backend
        )
        decay = self.lr * self.weight_decay
        added = [
            (decay - 1.0) * self.lr * u - decay * p for u, p in zip(updates, leaves, strict=True)
        ]
        return tree_unflatten(added, form), tuple(after)

    def apply(self, params: Any, updates: Any) -> Any:
        """The parameters after the step, in their own dtypes."""
        return tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def wants_gradient(x: Tensor) -> bool:
    """Whether x requires a gradient at any level of torch.func's transforms."""
    while torch._C._functorch.is_gradtrackingtensor(x) and not x.requires_grad:
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def served(
    mlp: UpdateMLP,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    constants: Sequence[Tensor],
    extra: Sequence[Tensor] | None,
    backend: Backend,
) -> bool:
    """Whether the kernels serve a call of ``learned_update``."""
    if not all(uses_triton(x, backend) for x in (*params, *gradients)):
        return False
    obstacle = network_obstacle(mlp, params[0].device)
    if torch.is_grad_enabled() and any(map(wants_gradient, constants)):
        obstacle = (
            "to the kernels parameters, gradients, statistics and decays are constants, but one "
            "requires a gradient"
        )
    if extra is not None and any(x.ndim > 1 for x in extra):
        obstacle = "the kernels take extra features of whole tensors, not of elements"
    if len({(p.device, p.dtype) for p in params} | {(params[0].device, params[0].dtype)}) > 1:
        obstacle = "the parameters are of several dtypes or devices"
    if len({g.dtype for g in gradients}) > 1:
        obstacle = "the gradients are of several dtypes"
    for p in params:
        obstacle = obstacle or tensor_obstacle(p)
    if obstacle is not None:
        decline(obstacle, backend)
    return obstacle is None
