r"""Muon: momentum, and a step along its orthogonal factor. For each matrix W of gradient g

    m' = m + (1 - mu) (g - m)    u = g + mu (m' - g), or m' without Nesterov
    W' = (1 - lr wd) W - lr scale NewtonSchulz(u)

In Nested Learning this is momentum as a linear memory with Newton-Schulz as the nonlinearity of its
output, W' = W + sigma(m'(u)) (eq. 52). Newton-Schulz does not see the size of m, so that this
running mean and the paper's sum m' = alpha m - eta g (eq. 42) give the same steps.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is
scalable for LLM training, arXiv 2502.16982; Behrouz et al., Nested Learning, arXiv 2512.24695.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from .._core.backends import Backend
from .._core.checks import check_option
from ..common.checks import check_plain_number
from .matrix_optimizer import MatrixOptimizer, orthogonal, orthogonal_of
from .newton_schulz import QUINTIC, Coefficients
from .stack import Stack, as_matrices, check_switch, new_buffer

Tensor = torch.Tensor
Scale = Literal["output_rms", "adamw_rms", "none"]
SCALES = ("output_rms", "adamw_rms", "none")
# By torch.optim.Muon's adjust_lr_fn; by any other name it multiplies by 1. The first of a scale is
# the one that a state dict has.
TORCH_SCALES = {
    "original": "output_rms",
    None: "output_rms",
    "match_rms_adamw": "adamw_rms",
    "none": "none",
}
# torch.optim.Muon's bound of a norm from below, which changes nothing here.
TORCH_EPS = 1e-7


class Muon(MatrixOptimizer):
    """torch.optim.Muon's formula and state dict, with the matrices of one shape in one chain of
    batched products.

    Args:
        params: tensors, parameter groups or named parameters, as torch's optimizers take them:
            floating. Each group may have options of its own. DTensors are moved where their shards
            are: of each matrix sharded by rows, as FSDP2 shards, one process has all rows for as
            long as it multiplies, and each process multiplies its share of the matrices.
        lr, weight_decay: numbers, or 0-d tensors that a captured step reads again. Decay is
            decoupled: a step takes lr weight_decay of a parameter away.
        momentum: mu, from 0 to below 1.
        nesterov: step along g + mu (m' - g) rather than m'.
        scale: of an orthogonal step, by the matrix's shape. "output_rms": sqrt(max(1, rows /
            columns)), so that tall matrices change their outputs as much as square ones;
            "adamw_rms": 0.2 sqrt(max(rows, columns)), about the size of AdamW's steps, whose lr and
            weight_decay then serve; "none": 1.
        ns_steps, ns_coefficients, ns_dtype: of ``newton_schulz``; None computes in the working
            dtype.
        matrix: whether a group is of matrices. These have two axes or more, and of more all but the
            first are columns. Embeddings, heads, norms and biases belong in a group with
            matrix=False, which AdamW updates by the group's lr and weight_decay.
        adam_betas, adam_eps: of such groups.
        maximize: ascend.
        capturable: make lr a tensor on the parameters' device, so that learning-rate
            schedulers reach a captured step.
        skip_nonfinite: leave everything as it was where the gradients have no norm that is finite
            in the working dtype, or one of 2^63 or more and the state has their squares: where
            AdamW updates a group, and in ``M3``. Decided on the device, by one more reading of the
            gradients.

    Arithmetic and state are fp32 for narrower parameters, fp64 for fp64; parameters are rounded
    once. With a ``torch.amp.GradScaler`` unscaling happens inside the step, and its skip is one.
    ``grad_norm``, ``skipped`` and ``skipped_steps`` are as AdamW's.

    Raises:
        TypeError: a parameter is not floating or not strided, or a matrix is sharded otherwise
            than by rows; a gradient is sparse.
        ValueError: an option is out of its range, a matrix has fewer than two axes, a gradient or a
            loaded state has another shape or device than its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        scale: Scale = "output_rms",
        ns_steps: int = 5,
        ns_coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
        ns_dtype: torch.dtype | None = torch.bfloat16,
        matrix: bool = True,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        maximize: bool = False,
        capturable: bool = False,
        skip_nonfinite: bool = False,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            scale=scale,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            matrix=matrix,
            adam_betas=adam_betas,
            adam_eps=adam_eps,
            maximize=maximize,
            capturable=capturable,
        )
        super().__init__(params, defaults, skip_nonfinite, backend)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Muon's, which takes it; ours has more options."""
        saved = super().state_dict()
        groups = saved["param_groups"]
        none: Iterable[dict[str, Any]] = itertools.repeat({})
        for group, theirs in zip(groups, itertools.chain(self._theirs, none), strict=False):
            names = [name for name, scale in TORCH_SCALES.items() if scale == group["scale"]]
            chosen = theirs.get("adjust_lr_fn", names[0])
            group["adjust_lr_fn"] = chosen if chosen in names else names[0]
            group.setdefault("eps", TORCH_EPS)
        return saved

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        groups = []
        for group in saved["param_groups"]:
            if "adjust_lr_fn" in group:
                # torch.optim.Muon's name for the scale.
                options, adjustment = dict(group), group["adjust_lr_fn"]
                if adjustment not in TORCH_SCALES:
                    wanted = ", ".join(map(repr, TORCH_SCALES))
                    raise ValueError(f"adjust_lr_fn must be one of {wanted}, got {adjustment!r}")
                del options["adjust_lr_fn"]
                group = options | {"scale": TORCH_SCALES[adjustment]}
            groups.append(group)
        return super()._checked({**saved, "param_groups": groups})

    def _check_matrices(self, group: dict[str, Any]) -> None:
        check_plain_number("momentum", group["momentum"], below=1.0)
        check_switch("nesterov", group["nesterov"])
        check_option("scale", group["scale"], SCALES)

    def _new_matrix_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": new_buffer(p)}

    def _move_matrices(
        self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        lr, mu, p = group["lr"], group["momentum"], stack.values()
        m = torch.lerp(stack.buffers["momentum_buffer"], g, 1.0 - mu)
        u = as_matrices(torch.lerp(g, m, mu) if group["nesterov"] else m)
        factor = lr * self._scale_of(stack.rows, stack.columns, group)
        o = yield from stack.applied(lambda x: orthogonal(x, group), u)
        new = (1.0 - lr * group["weight_decay"]) * p - factor * o.view_as(p)
        stack.move(skips, p, new)
        stack.keep(skips, momentum_buffer=m)

    def _move_matrices_by_kernels(
        self, launches: Any, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        stack = launches.stack
        m = stack.buffers["momentum_buffer"]
        options = group["momentum"], group["nesterov"], group["ns_dtype"]
        unit = yield from launches.muon_direction(m, *options, skips)
        o = yield from stack.applied(lambda x: orthogonal_of(x, group), unit)
        launches.muon_move(o, skips)

    def _scale_of(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        if group["scale"] == "output_rms":
            return math.sqrt(max(1.0, rows / max(1, columns)))
        return 0.2 * math.sqrt(max(rows, columns)) if group["scale"] == "adamw_rms" else 1.0
