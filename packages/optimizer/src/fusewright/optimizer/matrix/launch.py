"""Launches of what Muon and M3 do to the elements of a stack of matrices."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._core.launches import cdiv
from .._core.lazy import lazy_module
from ..common.launch import Block, planned
from ..common.tables import Uploaded, addresses_of, aligned
from .stack import Stack

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
# The size is that of a tile, of which a program takes some; unmeasured.
MATRICES = Block(size=1024, num_warps=4)
# So many tiles or more: programs read the partial sums of all.
FEWEST_TILES = 4


class MatrixLaunches:
    """The launches of one stack.

    Attributes:
        numbers: the factor of the gradients, the factor of the parameters, 1 - lr wd, and the rate
            of the step; fp32.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack, self.device = stack, stack.device
        count, elements = len(stack.params), stack.local_params()[0].numel()
        self.parameters = Uploaded(count, torch.int64, self.device, exclusive=True)
        self.gradients = Uploaded(count, torch.int64, self.device, exclusive=True)
        self.uploaded = Uploaded(3, torch.float32, self.device)
        self.numbers = self.uploaded.table
        # Each program takes as many whole tiles.
        self.max_programs = kernels.MAX_PROGRAMS.value
        tiles = cdiv(elements, MATRICES.size)
        self.span = MATRICES.size * max(FEWEST_TILES, cdiv(tiles, self.max_programs))
        self.programs = cdiv(elements, self.span)
        self.elements = elements
        # Of kernels that read gradients, and of those that move parameters.
        self.of_gradients: dict[str, Any] = {}
        self.of_parameters: dict[str, Any] = {}
        # Contiguous gradients, for as long as a step reads them.
        self.copies: list[Tensor] = []

    def begin(self, factor: float | Tensor, decay: float | Tensor, rate: float | Tensor) -> None:
        """Take this step's gradients and numbers."""
        stack = self.stack
        gradients = [g.contiguous().resolve_neg() for g in stack.local_gradients()]
        self.copies = gradients
        parameters, addresses = addresses_of(stack.local_params()), addresses_of(gradients)
        self.parameters.hold(parameters)
        self.gradients.hold(addresses)
        self.of_gradients = dict(G=gradients[0].dtype, ALIGNED=aligned(addresses))
        self.of_parameters = dict(P=stack.params[0].dtype, ALIGNED=aligned(parameters))
        numbers = factor, decay, rate
        if any(isinstance(x, Tensor) for x in numbers):
            self.numbers = torch.stack([number(x, self.device) for x in numbers])
        else:
            self.uploaded.hold(list(numbers))
            self.numbers = self.uploaded.table

    def partial_sums(self) -> Tensor:
        """Memory for the partial sums over each matrix, ``[matrices, programs at most]``."""
        shape = len(self.stack.params), self.max_programs
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def sum_(self, *partials: Tensor) -> Iterator[None]:
        """Partial sums over this process's rows become those over all rows."""
        if self.stack.shares is None:
            return
        totals = torch.stack([x[:, : self.programs].sum(1) for x in partials])
        yield from self.stack.sum_(totals)
        for x, total in zip(partials, totals.unbind(), strict=True):
            x.zero_()[:, 0] = total

    def launch(
        self,
        kernel: str,
        tensors: tuple[Tensor | None, ...],
        skips: Tensor | None,
        floats: tuple[float, ...] = (),
        *integers: int,
        **constants: Any,
    ) -> None:
        """Launch a kernel by its name, one program for each span of each matrix."""
        if not self.elements:
            return
        grid, sizes = (len(self.stack.params), self.programs), (self.elements, self.span, *integers)
        constants |= {"HAS_SKIPS": skips is not None}
        launch = planned(kernels, self.device, kernel, grid, sizes, MATRICES, **constants)
        # A whole number would be compiled in.
        launch(tensors, tuple(map(float, floats)))

    def unit(
        self, m: Tensor, squares: Tensor, dtype: torch.dtype | None, mu: float, nesterov: bool
    ) -> Tensor:
        """The direction over its norm, ``[matrices, rows, columns]``."""
        m = m.flatten(2)
        out = torch.empty(m.shape, dtype=dtype or m.dtype, device=self.device)
        tensors = self.gradients.table, m, self.numbers, squares, out
        constants = self.of_gradients | {"NESTEROV": nesterov, "OUT": out.dtype}
        self.launch("unit_kernel", tensors, None, (mu,), self.programs, **constants)
        return out

    def muon_direction(
        self, m: Tensor, mu: float, nesterov: bool, dtype: torch.dtype | None, skips: Tensor | None
    ) -> Generator[None, None, Tensor]:
        """Update the momentum; returns each matrix's direction over its norm."""
        squares = self.partial_sums()
        tensors = self.gradients.table, m, self.numbers, skips, squares
        constants = self.of_gradients | {"NESTEROV": nesterov}
        self.launch("muon_momentum_kernel", tensors, skips, (mu,), **constants)
        yield from self.sum_(squares)
        return self.unit(m, squares, dtype, mu, nesterov)

    def muon_move(self, direction: Tensor, skips: Tensor | None) -> None:
        tensors = self.parameters.table, direction, self.numbers, skips
        constants = self.of_parameters | {"OUT": direction.dtype}
        self.launch("muon_move_kernel", tensors, skips, **constants)

    def m3_memories(
        self, group: dict[str, Any], skips: Tensor | None
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Update momenta and second moments; returns the fast momentum of each matrix over its
        norm, and partial sums of the second moments.
        """
        buffers = self.stack.buffers
        fast, second = buffers["fast_momentum"], buffers["second_moment"]
        squares, sums = self.partial_sums(), self.partial_sums()
        state = fast, second, buffers["slow_momentum"]
        tensors = self.gradients.table, *state, self.numbers, skips, squares, sums
        floats = *group["retain"][:2], *group["betas"]
        self.launch("m3_memories_kernel", tensors, skips, floats, **self.of_gradients)
        yield from self.sum_(squares, sums)
        if self.stack.shares is not None:
            # Their mean is taken over this process's rows.
            sums *= self.elements / self.stack.shape.numel()
        return self.unit(fast, squares, group["ns_dtype"], 0.0, False), sums

    def m3_move(
        self, direction: Tensor, sums: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> None:
        buffers = self.stack.buffers
        state = buffers["slow_direction"], buffers["second_moment"]
        tensors = self.parameters.table, direction, *state, self.numbers, skips, sums
        constants = self.of_parameters | {"OUT": direction.dtype, "RELATIVE": group["relative"]}
        floats = group["alpha"], group["eps"]
        self.launch("m3_move_kernel", tensors, skips, floats, self.programs, **constants)


def number(x: float | Tensor, device: torch.device) -> Tensor:
    """0-d, fp32, on the device, without waiting for it."""
    if isinstance(x, Tensor):
        return x.to(device, torch.float32, non_blocking=True).reshape(())
    return torch.full((), x, dtype=torch.float32, device=device)
