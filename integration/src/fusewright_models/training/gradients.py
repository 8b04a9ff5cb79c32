"""Gradients in memory that stays, one behind another: graphs find them there, and one call averages
them over processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .processes import Processes

# Each begins at a multiple of it, as a tensor of its own does.
ALIGNED_BYTES = 512


class HeldGradients:
    """The gradients of those parameters that the first batch of all gives any.

    Args:
        parameters: that an optimizer moves.
        processes: whose gradients are averaged.

    Attributes:
        trained: the parameters that have gradients; none before the first batch.
        gradients: of each of them, a part of one of ``whole``.
        whole: all gradients of a dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], processes: Processes) -> None:
        self.parameters, self.processes = parameters, processes
        self.trained: list[nn.Parameter] = []
        self.gradients: list[Tensor] = []
        self.whole: list[Tensor] = []

    @torch.no_grad()
    def hold(self, *, first: bool) -> None:
        """After a batch's backward pass: the gradients that the ``first`` batch of a step has made
        move to where they stay, and those of the others are added to them there by autograd.

        Raises:
            RuntimeError: other parameters than ever before have gradients, here or in another
                process.
        """
        trained = [p for p in self.parameters if p.grad is not None]
        fresh = [p.grad for p in trained if p.grad is not None]
        if not self.trained:
            self._allocate(trained, fresh)
        if list(map(id, trained)) != list(map(id, self.trained)):
            raise RuntimeError("not all batches give gradients to the same parameters")
        if first:
            torch._foreach_copy_(self.gradients, fresh)
            for p, g in zip(trained, self.gradients, strict=True):
                p.grad = g

    def average_(self) -> None:
        """They become their means over processes."""
        for x in self.whole:
            self.processes.average_(x)

    def _allocate(self, trained: list[nn.Parameter], fresh: list[Tensor]) -> None:
        places = {id(p): place for place, p in enumerate(self.parameters)}
        mine = [places[id(p)] for p in trained]
        if any(others != mine for others in self.processes.told(mine)):
            raise RuntimeError("not all processes give gradients to the same parameters")
        self.trained, self.gradients = trained, list(fresh)
        for dtype in dict.fromkeys(g.dtype for g in fresh):
            of_dtype = [place for place, g in enumerate(fresh) if g.dtype == dtype]
            whole, parts = side_by_side([fresh[place] for place in of_dtype])
            self.whole.append(whole)
            for place, part in zip(of_dtype, parts, strict=True):
                self.gradients[place] = part


def side_by_side(like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros in the shapes and strides of tensors of one dtype, in one allocation: all of it, and
    each of them.
    """
    each = ALIGNED_BYTES // like[0].itemsize
    sizes = [-(-x.numel() // each) * each for x in like]
    whole = like[0].new_zeros(sum(sizes))
    # Strides of a tensor that is dense, as a gradient need not be.
    strides = (torch.empty_like(x, device="meta").stride() for x in like)
    parts = zip(whole.split(sizes), like, strides, strict=True)
    return whole, [part.as_strided(x.shape, stride) for part, x, stride in parts]
