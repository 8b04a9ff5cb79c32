"""Optimizers whose groups are of matrices, or of what is moved by AdamW beside them.

With g the gradient and t the count of steps that were taken, a group with matrix=False moves by

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

from typing import Any

import torch

from ._backends import KERNEL_DTYPES, decline, launchers, uses_triton
from ._checks import check_number
from ._stack import (
    Stack,
    check_fraction,
    check_switch,
    factor_of,
    per_parameter,
    working_dtype,
)
from ._stacked import StackedOptimizer
from .newton_schulz import chain, check_chain, newton_schulz

Tensor = torch.Tensor


class MatrixOptimizer(StackedOptimizer):
    """Asks every group whether it is of matrices; a subclass moves those."""

    def _check_matrices(self, group: dict[str, Any]) -> None:
        """Raise where a group of matrices has options out of their range."""
        raise NotImplementedError

    def _fresh_matrix(self, p: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def _move_matrices(
        self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> None:
        raise NotImplementedError

    def _move_matrices_by_kernels(
        self, launches: Any, group: dict[str, Any], skips: Tensor | None
    ) -> None:
        raise NotImplementedError

    def _scale_of(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """What lr is multiplied by for matrices of so many rows and columns."""
        return 1.0

    def _check_options(self, group: dict[str, Any]) -> None:
        check_switch("matrix", group["matrix"])
        check_chain(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"])
        betas = group["adam_betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"adam_betas must be two numbers, got {betas!r}")
        for number, beta in enumerate(betas):
            check_fraction(f"adam_betas[{number}]", beta)
        check_number("adam_eps", group["adam_eps"])
        self._check_matrices(group)
        if group["matrix"]:
            for p in group["params"]:
                if p.dim() < 2:
                    raise ValueError(
                        "parameters of a group with matrix=True must have two axes or more, got "
                        f"one of shape {list(p.shape)}: vectors go into a group with matrix=False"
                    )

    def _fresh(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        if group["matrix"]:
            return self._fresh_matrix(p)
        return {
            "exp_avg": zeros(p),
            "exp_avg_sq": zeros(p),
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
        }

    def _move_stack(
        self,
        stack: Stack,
        sign: float,
        scale: Tensor | None,
        group: dict[str, Any],
        skips: Tensor | None,
    ) -> None:
        if not stack.by_kernels:
            super()._move_stack(stack, sign, scale, group, skips)
        elif group["matrix"]:
            if stack.launches is None:
                stack.launches = launchers().MatrixLaunches(stack)
            lr, rows = group["lr"], stack.shape[0]
            rate = lr * self._scale_of(rows, stack.shape.numel() // rows, group)
            kept = 1.0 - lr * group["weight_decay"]
            stack.launches.begin(factor_of(sign, scale), kept, rate)
            self._move_matrices_by_kernels(stack.launches, group, skips)
            # Whoever sets gradients to None gets their memory back.
            stack.launches.copies = []
        else:
            if stack.launches is None:
                stack.launches = launchers().StackedAdamW(stack)
            stack.launches.move(sign, scale, group, skips)

    def _check_stacks(self, stacks: list[Stack]) -> None:
        for stack in stacks:
            stack.by_kernels = self._uses_triton(stack)

    def _uses_triton(self, stack: Stack) -> bool:
        first = stack.params[0]
        if not first.numel() or not uses_triton(first, self.backend):
            return False
        dtypes = {p.grad.dtype for p in stack.params if p.grad is not None}
        if len(dtypes) > 1 or not dtypes <= set(KERNEL_DTYPES):
            found = sorted(map(str, dtypes))
            decline(f"the kernels take gradients of one narrow dtype, not {found}", self.backend)
        elif not all(p.is_contiguous() for p in stack.params):
            decline("the kernels take parameters that are contiguous", self.backend)
        else:
            return True
        return False

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        if group["matrix"]:
            self._move_matrices(stack, g, group, skips)
        else:
            move_by_adamw(stack, g, group, skips)


def zeros(p: Tensor) -> Tensor:
    """State of a parameter, in at least fp32."""
    return torch.zeros(p.shape, dtype=working_dtype(p.dtype), device=p.device)


def orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """By a group's options."""
    chain = group["ns_steps"], group["ns_coefficients"]
    return newton_schulz(matrices, *chain, dtype=group["ns_dtype"])


def orthogonal_of(unit: Tensor, group: dict[str, Any]) -> Tensor:
    """The same of matrices of norm 1, in the dtype of the products."""
    chained = check_chain(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"])
    return chain(unit, chained)


def move_by_adamw(stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
    (beta1, beta2), eps = group["adam_betas"], group["adam_eps"]
    lr, weight_decay = group["lr"], group["weight_decay"]
    buffers, p = stack.buffers, stack.values()
    t = buffers["step"] + 1.0
    m = torch.lerp(buffers["exp_avg"], g, 1.0 - beta1)
    v = beta2 * buffers["exp_avg_sq"] + (1.0 - beta2) * g * g
    # In fp64: near 1 the powers of a beta leave fp32 few bits.
    rest1, rest2 = (per_parameter(1.0 - beta ** t.double(), p) for beta in (beta1, beta2))
    root = v.sqrt() * rest2.rsqrt().to(p.dtype) + eps
    new = (1.0 - lr * weight_decay) * p - (lr / rest1).to(p.dtype) * (m / root)
    stack.move(skips, p, new)
    stack.keep(skips, exp_avg=m, exp_avg_sq=v, step=t)
