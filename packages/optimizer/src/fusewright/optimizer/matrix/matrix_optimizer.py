"""Optimizers that update groups of matrices, and other groups by AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core.backends import KERNEL_DTYPES, decline, uses_triton
from .._core.launches import cdiv
from ..adamw.stacked import StackedAdamW, stacked_adamw
from ..common.checks import check_betas, check_elements, check_number, check_plain_number
from ..common.placement import local
from ..common.sharding import check_rows, mesh_of_rows
from . import launch, launch_hopper
from .newton_schulz import chain, check_chain, newton_schulz
from .shares import Shares, process_count, shared_out
from .stack import Stack, check_switch, factor_of, new_buffer
from .stacked_optimizer import StackedOptimizer

Tensor = torch.Tensor


class MatrixOptimizer(StackedOptimizer):
    """A subclass updates groups with matrix=True; AdamW updates the others."""

    def _check_matrices(self, group: dict[str, Any]) -> None:
        """Raise where a group of matrices has options out of their range."""
        raise NotImplementedError

    def _new_matrix_state(self, p: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def _move_matrices(
        self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        raise NotImplementedError

    def _move_matrices_by_kernels(
        self, launches: Any, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        raise NotImplementedError

    def _scale_of(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """What lr is multiplied by for matrices of this size."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers have it; dtypes by name, since torch.distributed.checkpoint takes
        no others to another device.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["ns_dtype"] = None if group["ns_dtype"] is None else str(group["ns_dtype"])
        return saved

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "ns_dtype": dtype_of(group["ns_dtype"])} for group in saved["param_groups"]
        ]
        return super()._checked({**saved, "param_groups": groups})

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        check_elements("a parameter", p)
        if group["matrix"] is True and p.dim() > 1:
            check_rows(p)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_switch("matrix", group["matrix"])
        check_chain(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"])
        check_betas("adam_betas", group["adam_betas"])
        for number, beta in enumerate(group["adam_betas"]):
            check_plain_number(f"adam_betas[{number}]", beta, below=1.0)
        check_number("adam_eps", group["adam_eps"])
        self._check_matrices(group)
        if group["matrix"]:
            for p in group["params"]:
                if p.dim() < 2:
                    raise ValueError(
                        "parameters of a group with matrix=True must have two axes or more, got "
                        f"one of shape {list(p.shape)}: vectors go into a group with matrix=False"
                    )

    def _new_state(self, p: Tensor, group: dict[str, Any], place: int) -> dict[str, Tensor]:
        if group["matrix"]:
            return self._new_matrix_state(p)
        return {
            "exp_avg": new_buffer(p),
            "exp_avg_sq": new_buffer(p),
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
        }

    def _move_stack(
        self,
        stack: Stack,
        sign: float,
        scale: Tensor | None,
        group: dict[str, Any],
        skips: Tensor | None,
    ) -> Iterator[None]:
        if not stack.by_kernels:
            g = stack.gradients(factor_of(sign, scale))
            if group["matrix"]:
                yield from self._move_matrices(stack, g, group, skips)
            else:
                self._move(stack, g, group, skips)
        elif group["matrix"]:
            if stack.launches is None:
                stack.launches = launch.MatrixLaunches(stack)
            lr = group["lr"]
            rate = lr * self._scale_of(stack.rows, stack.columns, group)
            decay = 1.0 - lr * group["weight_decay"]
            stack.launches.begin(factor_of(sign, scale), decay, rate)
            yield from self._move_matrices_by_kernels(stack.launches, group, skips)
            # Gradients that are set to None are freed.
            stack.launches.copies = []
        else:
            if stack.launches is None:
                stack.launches = StackedAdamW(stack.memories)
            memories = stack.local_params(), stack.local_gradients()
            stack.launches.move(*memories, sign, scale, group, skips)

    def _planned(self, stacks: list[Stack]) -> None:
        sharded = []
        for stack in stacks:
            mesh = mesh_of_rows(stack.params[0])
            if mesh is not None and self.param_groups[stack.number]["matrix"]:
                sharded.append((stack, mesh))
        shares = shared_out([(mesh, len(stack.params), stack.shape) for stack, mesh in sharded])
        for (stack, mesh), own in zip(sharded, shares, strict=True):
            stack.shares = Shares(mesh, stack.rows, own)

    def _check_stacks(self, stacks: list[Stack]) -> None:
        for stack in stacks:
            stack.by_kernels = self._uses_triton(stack)

    def _largest_stack(self, params: list[Tensor], group: dict[str, Any]) -> int:
        p, processes = params[0], process_count(params[0])
        # A process has some rows of each, and multiplies some of them.
        largest = processes * super()._largest_stack(params, group)
        if not group["matrix"] or not p.numel() or not uses_triton(local(p), self.backend):
            return largest
        shape = cdiv(len(params), processes), len(p), p.numel() // len(p)
        dtype = group["ns_dtype"]
        if dtype is None or not launch_hopper.serves(shape, dtype, p.device):
            return largest
        return processes * launch_hopper.fastest_stack(shape, dtype, p.device)

    def _uses_triton(self, stack: Stack) -> bool:
        first = local(stack.params[0])
        # All processes exchange the same: those without rows of a matrix, too.
        parts = stack.params[0] if stack.shares is not None else first
        if not parts.numel() or not uses_triton(first, self.backend):
            return False
        dtypes = {p.grad.dtype for p in stack.params if p.grad is not None}
        if len(dtypes) > 1 or not dtypes <= set(KERNEL_DTYPES):
            names = sorted(map(str, dtypes))
            decline(f"the kernels take gradients of one narrow dtype, not {names}", self.backend)
        elif not all(p.is_contiguous() for p in stack.params):
            decline("the kernels take contiguous parameters", self.backend)
        else:
            return True
        return False

    def _move(self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None) -> None:
        p = stack.values()
        new, state = stacked_adamw(p, g, stack.buffers, group)
        stack.move(skips, p, new)
        stack.keep(skips, **state)


def dtype_of(name: Any) -> Any:
    """A dtype by its name; anything else as it is."""
    found = getattr(torch, name.removeprefix("torch."), name) if isinstance(name, str) else name
    return found if isinstance(found, torch.dtype) else name


def orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """The orthogonal factor of each matrix, by a group's options."""
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    return newton_schulz(matrices, steps, coefficients, dtype=group["ns_dtype"])


def orthogonal_of(unit: Tensor, group: dict[str, Any]) -> Tensor:
    """The same for matrices of norm 1, in the dtype of the products; may write to their memory."""
    triples = check_chain(group["ns_steps"], group["ns_coefficients"], group["ns_dtype"])
    if launch_hopper.serves(unit.shape, unit.dtype, unit.device):
        return launch_hopper.chain_on_hopper(unit, triples)
    return chain(unit, triples)
