r"""Momentum at several frequencies for each parameter, with an update that a small network makes of
it. Level l of frequency f_l adds gradients up, and at every f_l-th step t takes their mean:

    t mod f_l = 0:    g_l = sum_l / f_l    sum_l = 0    (u_l, m_l) = update(g_l, m_l)
    d = sum u_l / sqrt(levels that fired) + wd p    p' = p - lr d

Momentum is clipped to |m_l| <= 100 |g_l|. A level whose u_l is not finite keeps its momentum, adds
nothing and is not counted; a parameter that no level updates stays. The device selects all of this.
Which levels fire follows from t alone, on the host.

These are buffers of an optimizer, one set for each parameter. They are neither the chain of blocks
nor the optimizer M3 that the Nested Learning paper (arXiv 2512.24695) calls continuum memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core.precision import wide
from ..adamw.adamw import AdamW
from .continuum_networks import ElementNetwork, ScalarNetwork

Tensor = torch.Tensor
BOUND, TINY = 100.0, 1e-8
RETAINED, ADDED = 0.9, 0.1
# This many elements go through a network at a time.
PIECE = 1 << 20
# Of the element network's training: parameters, elements of each, and how often.
SAMPLED_PARAMETERS, SAMPLED_ELEMENTS, TRAINING_FREQUENCY = 20, 4096, 5


class Continuum:
    """Steps of the levels of some parameters.

    Args:
        frequencies: of the levels, whole numbers of at least 1, in any order.
        preprocessing: take the network of elements, else that of scalars.
        hidden, layers: of the network; that of elements has at most 20 units a layer.

    Attributes:
        network: that makes updates.
        buffers: names in the state of a parameter: its momenta, and sums where a level takes more
            than one gradient.
        previous: the element network's outputs when it was trained last, in one axis over the
            parameters and elements that it is trained on.
    """

    def __init__(
        self, frequencies: Sequence[int], preprocessing: bool, hidden: int, layers: int, **like: Any
    ) -> None:
        self.frequencies = tuple(frequencies)
        self.buffers = [
            name
            for level, f in enumerate(self.frequencies)
            for name in (f"momentum_{level}",) + (f"sum_{level}",) * (f > 1)
        ]
        network = ElementNetwork if preprocessing else ScalarNetwork
        self.network: Any = network(hidden, layers, **like)
        self.trainer: Any = None
        if preprocessing:
            weights = self.network.parameters()
            self.trainer = AdamW(weights, 1e-3, weight_decay=0.0, max_grad_norm=1.0)
        self.previous: Tensor | None = None

    def firing(self, t: int) -> list[int]:
        """The levels that fire at this step."""
        return [level for level, f in enumerate(self.frequencies) if t % f == 0]

    def prepare(self, p: Tensor, state: dict[str, Any]) -> None:
        """Allocate a parameter's missing buffers."""
        for name in self.buffers:
            if name not in state:
                state[name] = torch.zeros_like(wide(p), memory_format=torch.preserve_format)

    def step(
        self,
        t: int,
        ps: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Any]],
        rates: Sequence[Tensor],
        decays: Sequence[float],
        base: Sequence[Tensor],
        loss: Tensor,
        goes_on: Tensor,
    ) -> list[Tensor | None]:
        """Step t; nothing changes where ``goes_on`` is False.

        Args:
            ps: parameters, none of them empty.
            gradients: clipped, in fp32 or fp64.
            rates, base: learning rates with multipliers and without, 0-d.

        Returns:
            d of each parameter, zero where it was not updated; None where no level fires.
        """
        levels = self.firing(t)
        means = [
            self._accumulate(level, t % f == 0, gradients, states, goes_on)
            for level, f in enumerate(self.frequencies)
        ]
        if not levels:
            return [None] * len(ps)
        rounds = t // self.frequencies[0]
        if self.trainer is not None and levels[0] == 0 and rounds % TRAINING_FREQUENCY == 0:
            self._train(means[0], [state["momentum_0"] for state in states], goes_on)
        totals = [torch.zeros_like(g) for g in gradients]
        counts = torch.zeros(len(ps), dtype=loss.dtype, device=loss.device)
        for level in levels:
            momenta = [state[f"momentum_{level}"] for state in states]
            updates, new_momenta = self._update(t, means[level], momenta, base, loss)
            valid = finite(updates) & finite(new_momenta)
            for m, after, ok in zip(momenta, new_momenta, (valid & goes_on).unbind(), strict=True):
                m.copy_(torch.where(ok, after, m))
            for total, u, ok in zip(totals, updates, valid.unbind(), strict=True):
                total.add_(torch.where(ok, u, 0.0))
            counts += valid
        scaled_(totals, counts.clamp(min=1.0).rsqrt())
        moves = (finite(totals) & (counts > 0) & goes_on).unbind()
        directions: list[Tensor | None] = []
        for p, total, decay, rate, ok in zip(ps, totals, decays, rates, moves, strict=True):
            d = torch.where(ok, total + decay * wide(p), 0.0)
            p.copy_(torch.where(ok, wide(p) - rate.to(d.dtype) * d, p))
            directions.append(d)
        return directions

    def _accumulate(
        self,
        level: int,
        fires: bool,
        gradients: list[Tensor],
        states: list[dict[str, Any]],
        goes_on: Tensor,
    ) -> list[Tensor]:
        """Add this step's gradients; returns their means where the level fires."""
        f = self.frequencies[level]
        if f == 1:
            return gradients
        sums = [state[f"sum_{level}"] for state in states]
        added = torch._foreach_add(sums, gradients)
        for total, after in zip(sums, added, strict=True):
            total.copy_(torch.where(goes_on, 0.0 if fires else after, total))
        return list(torch._foreach_div(added, f)) if fires else []

    def _update(
        self,
        t: int,
        means: list[Tensor],
        momenta: list[Tensor],
        base: Sequence[Tensor],
        loss: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The updates of one level, and its momenta after the step."""
        if self.trainer is not None:
            updates = self._by_element(means, momenta)
            new_momenta = list(torch._foreach_mul(momenta, RETAINED))
            torch._foreach_add_(new_momenta, updates, alpha=ADDED)
            bounded_(new_momenta, means)
            return updates, new_momenta
        size = torch.sign(loss) * loss.abs().log1p()
        rows = [
            torch.stack(
                [*moments(m), *moments(g), torch.full_like(size, t / 1000), lr.to(size), size]
            )
            for m, g, lr in zip(momenta, means, base, strict=True)
        ]
        scale, shift, damping = self.network(torch.stack(rows))
        new_momenta = [
            a * m + b * g
            for m, g, a, b in zip(momenta, means, scale.unbind(), shift.unbind(), strict=True)
        ]
        bounded_(new_momenta, means)
        factors = (1.0 - damping).unbind()
        updates = [m * factor for m, factor in zip(new_momenta, factors, strict=True)]
        return updates, new_momenta

    def _by_element(self, means: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        flat = [torch.cat([x.reshape(-1) for x in some]) for some in (means, momenta)]
        pieces = zip(*(x.split(PIECE) for x in flat), strict=True)
        updates = torch.cat([self.network(g, m) for g, m in pieces])
        split = updates.split([g.numel() for g in means])
        return [u.view(g.shape) for u, g in zip(split, means, strict=True)]

    def _train(self, means: list[Tensor], momenta: list[Tensor], goes_on: Tensor) -> None:
        """A step of the element network towards the gradient's direction and size, and towards its
        outputs before: of each parameter (1 - cos(u, g)) + 0.1 (|u| / |g| - 1)^2 + 0.1 mean (u -
        u_before)^2, on up to 20 parameters and 4096 elements of each.
        """
        places = range(0, len(means), -(-len(means) // SAMPLED_PARAMETERS))
        samples = [[sample(some[place]) for place in places] for some in (means, momenta)]
        lengths = [len(x) for x in samples[0]]
        g, m = (torch.cat(some) for some in samples)
        if self.previous is None or len(self.previous) != len(g):
            self.previous = torch.full_like(g, float("nan"))
        with torch.enable_grad():
            u = self.network(g, m)
            # NaN where there was no output before.
            changes = torch.where(self.previous.isnan(), 0.0, u - self.previous).square()
            losses = [
                dissimilarity(*some)
                for some in zip(*(x.split(lengths) for x in (u, g, changes)), strict=True)
            ]
            value = torch.stack(losses).mean()
        weights = list(self.network.parameters())
        for weight, slope in zip(weights, torch.autograd.grad(value, weights), strict=True):
            weight.grad = slope
        self.trainer.found_inf = (~goes_on).float()
        self.trainer.step()
        for weight in weights:
            weight.grad = None
        valid = goes_on & u.isfinite()
        self.previous.copy_(torch.where(valid, u.detach(), self.previous))

    def state_dict(self) -> dict[str, Any]:
        trainer = None if self.trainer is None else self.trainer.state_dict()
        network = self.network.state_dict()
        return {"network": network, "trainer": trainer, "previous": self.previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        if self.trainer is not None and state["trainer"] is not None:
            self.trainer.load_state_dict(state["trainer"])
        weight = next(self.network.parameters())
        previous = state["previous"]
        self.previous = None if previous is None else previous.to(weight, copy=True)


def finite(tensors: list[Tensor]) -> Tensor:
    """Of each tensor whether all of it is, ``[tensors]``; none is empty."""
    return torch.stack(torch._foreach_norm(tensors, torch.inf)).isfinite()


def scaled_(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each by its number of ``[tensors]``."""
    torch._foreach_mul_(tensors, list(factors.unbind()))


def bounded_(momenta: list[Tensor], means: list[Tensor]) -> None:
    """Clip the norm of each momentum to 100 times that of its gradient."""
    bounds = BOUND * torch.stack(torch._foreach_norm(means)).clamp(min=TINY)
    norms = torch.stack(torch._foreach_norm(momenta))
    tiny = torch.finfo(norms.dtype).tiny
    scaled_(momenta, (bounds / norms.clamp(min=tiny)).clamp(max=1.0))


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviation and norm."""
    return x.mean(), x.std(correction=0), torch.linalg.vector_norm(x)


def sample(x: Tensor) -> Tensor:
    """Up to 4096 elements, evenly over all."""
    flat = x.reshape(-1)
    return flat[:: -(-len(flat) // SAMPLED_ELEMENTS)]


def dissimilarity(u: Tensor, g: Tensor, changes: Tensor) -> Tensor:
    """The loss of one parameter's update."""
    of_u, of_g = (torch.linalg.vector_norm(x).clamp(min=TINY) for x in (u, g))
    cosine = (u * g).sum() / (of_u * of_g)
    return 1.0 - cosine + 0.1 * (of_u / of_g - 1.0).square() + 0.1 * changes.mean()
