"""The learned optimizer as functions, for unrolled training of its network.

    updates, statistics' = update(network, params, gradients, statistics)
    params' = (1 - lr wd) params - lr updates

On a card the updates of all tensors are computed as ``LearnedOptimizer`` does it, without their
features in memory, and the gradients of the network's weights and biases, and of what the caller
adds, by one launch that computes features and layers again. They are exact for this step: in these
launches parameters, gradients and statistics are constants. Plain torch differentiates everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ._backends import Backend, check_backend, decline, uses_triton
from ._learned_autograd import by_kernels
from ._learned_checks import check_arguments, network_obstacle, tensor_obstacle
from .learned_features import Statistics, advanced, new_statistics, update_of
from .update_mlp import UpdateMLP

Tensor = torch.Tensor


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
        extra: for each parameter ``[extra_features]``, numbers for all of its elements, or what can
            be broadcast to ``[*shape, extra_features]``; they are not normalised.
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
    decays = mlp.decays()
    updates, after = [], []
    for place, (p, g, kept) in enumerate(zip(params, gradients, statistics, strict=True)):
        moved = advanced(kept, g, decays)
        added = None if extra is None else extra[place]
        updates.append(update_of(mlp.weights(), p, g, moved, added, mlp.exp_mult, mlp.step_mult))
        after.append(moved)
    return updates, after


def learned_apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float | Tensor = 1.0,
    weight_decay: float | Tensor = 0.0,
) -> list[Tensor]:
    """(1 - lr wd) p - lr update of each, in the parameters' dtypes, in fp32 at least on the way."""
    found = []
    for p, update in zip(params, updates, strict=True):
        wide = p.to(torch.promote_types(p.dtype, update.dtype))
        found.append(((1.0 - lr * weight_decay) * wide - lr * update).to(p.dtype))
    return found


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
        found, after = learned_update(
            self.mlp, leaves, tree_leaves(gradients), state, extra, backend=self.backend
        )
        decay = self.lr * self.weight_decay
        added = [-self.lr * u - decay * p for u, p in zip(found, leaves, strict=True)]
        return tree_unflatten(added, form), tuple(after)

    def apply(self, params: Any, updates: Any) -> Any:
        """The parameters after the step, in their own dtypes."""
        return tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def wants_gradient(x: Tensor) -> bool:
    """Whether anyone differentiates in it, at any level of transforms."""
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
