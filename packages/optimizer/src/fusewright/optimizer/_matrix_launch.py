"""What Muon and M3 do to the elements of a stack of matrices, on a card: plans launches, and
launches.
"""

from __future__ import annotations

from typing import Any

import torch

from ._adamw_launch import KernelPart
from ._adamw_state import new_results
from ._configs import MATRICES
from ._launch import Launch
from ._matrix_kernels import (
    SHARES,
    _m3_memories_kernel,
    _m3_move_kernel,
    _muon_momentum_kernel,
    _muon_move_kernel,
    _unit_kernel,
)
from ._members import Kind, Member, Rules, Step
from ._norm_launch import triton_dtype
from ._stack import Stack
from ._tables import Uploaded, addresses_of, aligned, kinds_of

Tensor = torch.Tensor
# Of AdamW, whose group is given with every step.
RULES = Rules(groups=1, decoupled=True, rounding="nearest", seed=0, max_grad_norm=None)


class MatrixLaunches:
    """Of one stack.

    Attributes:
        numbers: what gradients are multiplied by, what parameters keep of themselves, and how far
            they move; fp32.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack, self.device = stack, stack.device
        count, elements = len(stack.params), stack.shape.numel()
        self.parameters = Uploaded(count, torch.int64, self.device, apart=True)
        self.gradients = Uploaded(count, torch.int64, self.device, apart=True)
        self.uploaded = Uploaded(3, torch.float32, self.device)
        self.numbers = self.uploaded.table
        # A stretch of whole tiles for each program.
        tiles = -(-elements // MATRICES.size)
        self.span = MATRICES.size * max(1, -(-tiles // SHARES.value))
        self.programs = -(-elements // self.span)
        self.elements = elements
        self.aligned: tuple[bool, bool] = (False, False)
        self.launches: dict[tuple, Launch] = {}
        # Copies of gradients that lie otherwise, for as long as a step reads them.
        self.copies: list[Tensor] = []

    def begin(self, factor: float | Tensor, kept: float | Tensor, rate: float | Tensor) -> None:
        """Show the launches this step's gradients and numbers."""
        stack = self.stack
        found = [p.grad.contiguous().resolve_neg() for p in stack.params if p.grad is not None]
        self.copies = found
        here, there = addresses_of(stack.params), addresses_of(found)
        self.parameters.hold(here)
        self.gradients.hold(there)
        self.dtype = found[0].dtype
        self.aligned = aligned(there), aligned(here)
        given = factor, kept, rate
        if any(isinstance(x, Tensor) for x in given):
            self.numbers = torch.stack([number(x, self.device) for x in given])
        else:
            self.uploaded.hold(list(given))
            self.numbers = self.uploaded.table

    def shares(self) -> Tensor:
        """Of a sum over each matrix."""
        shape = len(self.stack.params), SHARES.value
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def launch(
        self,
        kernel: Any,
        tensors: tuple[Tensor | None, ...],
        floats: tuple[float, ...] = (),
        *integers: int,
        **constants: Any,
    ) -> None:
        """One program for each stretch of each matrix; planned once for each kind of call."""
        key = (kernel, *constants.values(), *(x is None or x.dtype for x in tensors))
        if key not in self.launches:
            self.launches[key] = Launch(
                kernel,
                (len(self.stack.params), self.programs),
                self.device,
                (self.elements, self.span, *integers),
                dict(num_warps=MATRICES.num_warps),
                **constants,
                SIZE=MATRICES.size,
            )
        # A whole number would be compiled in.
        self.launches[key](tensors, tuple(map(float, floats)))

    def of_gradients(self) -> dict[str, Any]:
        return dict(G=triton_dtype(self.dtype), ALIGNED=self.aligned[0])

    def of_parameters(self) -> dict[str, Any]:
        return dict(P=triton_dtype(self.stack.params[0].dtype), ALIGNED=self.aligned[1])

    def unit(
        self, m: Tensor, squares: Tensor, dtype: torch.dtype | None, mu: float, nesterov: bool
    ) -> Tensor:
        """``[matrices, rows, columns]``: each over its norm."""
        m = m.flatten(2)
        out = torch.empty(m.shape, dtype=dtype or m.dtype, device=self.device)
        tensors = self.gradients.table, m, self.numbers, squares, out
        self.launch(
            _unit_kernel, tensors, (mu,), self.programs, **self.of_gradients(), NESTEROV=nesterov
        )
        return out

    def muon_direction(
        self, m: Tensor, mu: float, nesterov: bool, dtype: torch.dtype | None, skips: Tensor | None
    ) -> Tensor:
        """Moves the momentum; returns each matrix's direction over its norm."""
        squares = self.shares()
        self.launch(
            _muon_momentum_kernel,
            (self.gradients.table, m, self.numbers, skips, squares),
            (mu,),
            **self.of_gradients(),
            NESTEROV=nesterov,
            HAS_SKIPS=skips is not None,
        )
        return self.unit(m, squares, dtype, mu, nesterov)

    def muon_move(self, direction: Tensor, skips: Tensor | None) -> None:
        self.launch(
            _muon_move_kernel,
            (self.parameters.table, direction, self.numbers, skips),
            **self.of_parameters(),
            HAS_SKIPS=skips is not None,
        )

    def m3_memories(self, group: dict[str, Any], skips: Tensor | None) -> tuple[Tensor, Tensor]:
        """Moves momenta and second moments; returns the fast momentum of each matrix over its norm,
        and shares of the sums of second moments.
        """
        buffers = self.stack.buffers
        fast, second = buffers["fast_momentum"], buffers["second_moment"]
        squares, sums = self.shares(), self.shares()
        tensors = self.gradients.table, fast, second, buffers["slow_momentum"], self.numbers
        self.launch(
            _m3_memories_kernel,
            (*tensors, skips, squares, sums),
            (*group["retain"][:2], *group["betas"]),
            **self.of_gradients(),
            HAS_SKIPS=skips is not None,
        )
        return self.unit(fast, squares, group["ns_dtype"], 0.0, False), sums

    def m3_move(
        self, direction: Tensor, sums: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> None:
        buffers = self.stack.buffers
        state = buffers["slow_direction"], buffers["second_moment"]
        self.launch(
            _m3_move_kernel,
            (self.parameters.table, direction, *state, self.numbers, skips, sums),
            (group["alpha"], group["eps"]),
            self.programs,
            **self.of_parameters(),
            RELATIVE=group["relative"],
            HAS_SKIPS=skips is not None,
        )


class StackedAdamW:
    """AdamW's launches for a stack of what are no matrices."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.seen: list[Any] = []
        self.results = new_results(stack.device)

    def move(
        self, sign: float, scale: Tensor | None, group: dict[str, Any], skips: Tensor | None
    ) -> None:
        """Take the step, unless it is skipped."""
        stack = self.stack
        pairs = [(p.detach(), p.grad) for p in stack.params if p.grad is not None]
        gradients = [g for _, g in pairs]
        seen = [sign, addresses_of(p for p, _ in pairs), kinds_of(gradients)]
        if seen != self.seen:
            views = stack.views
            kind = Kind(pairs[0][0].dtype, gradients[0].dtype, torch.float32, False, False, 0)
            members = [
                Member(place, p, (m, v, None, None), t, 0, sign, kind, None)
                for place, ((p, _), m, v, t) in enumerate(
                    zip(pairs, views["exp_avg"], views["exp_avg_sq"], views["step"], strict=True)
                )
            ]
            self.part = KernelPart(members, RULES, stack.device)
            self.seen = seen
        part = self.part
        betas, eps = group["adam_betas"], group["adam_eps"]
        part.point(part.gradients_of(gradients), [{**group, "betas": betas, "eps": eps}])
        found = None if skips is None else skips.float()
        part.move(Step(None, scale, found, *self.results))
        part.gradients = []


def number(x: float | Tensor, device: torch.device) -> Tensor:
    """0-d, fp32, on the device, without waiting for it."""
    if isinstance(x, Tensor):
        return x.to(device, torch.float32, non_blocking=True).reshape(())
    return torch.full((), x, dtype=torch.float32, device=device)
