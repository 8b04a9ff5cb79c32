r"""M3, multi-scale momentum Muon: a fast momentum, a slow one that learns from f steps at a time,
and Adam's denominator. Algorithm 1 of Nested Learning, for each matrix W of gradient g, with what
each memory retains written out, which is 1 in the paper:

    every step:     M1 <- a1 M1 + beta1 g    V <- a2 V + beta2 g^2    O1 = NewtonSchulz(M1)
                    W <- (1 - lr wd) W - lr (O1 + alpha O2) / (sqrt(V) + eps)
    every f steps:  M2 <- a3 M2 + beta3 (sum of g since the last time)    O2 = NewtonSchulz(M2)

Behrouz, Razaviyayn, Zhong and Mirrokni, Nested Learning, arXiv 2512.24695, section 7.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from .._core.backends import Backend
from .._core.checks import checked_count
from ..common.checks import check_plain_number
from .matrix_optimizer import MatrixOptimizer, orthogonal, orthogonal_of
from .newton_schulz import QUINTIC, Coefficients
from .stack import Stack, as_matrices, check_switch, new_buffer

Tensor = torch.Tensor


class M3(MatrixOptimizer):
    """Algorithm 1 of Nested Learning, with the matrices of one shape in batched products.

    Where the paper leaves something open, or does not train as it stands, this is the choice;
    ``M3(params, lr, **M3.ALGORITHM_1)`` has the sums and the denominator of the paper.

    * Growth. In the paper M1, M2 and V are sums. Newton-Schulz does not depend on the size of M1
      and M2, but a sum changes its sign only after as many gradients of the other sign: steps of a
      fixed length oscillate about the optimum, and shrink by V's growth alone, as AdaGrad's do.
      ``retain`` says how much of each is kept; with what ``betas`` take, the defaults are running
      means.
    * Unit. An orthogonal step over sqrt(V) has the unit of one over the gradient: it grows as
      gradients shrink. ``relative``, the default, divides sqrt(V) by its root mean square over the
      matrix, so that the size of gradients does not matter and eps is relative to 1.
    * eps stands outside of the root, as in Adam.
    * Order. A chunk's gradients reach M2 after the chunk's last step; O2 takes part from the
      next step on, and stays as it is in between. It is zero in the first chunk.
    * Weight decay is decoupled, and 0 by default: the paper has none.
    * Vectors, embeddings and heads belong in groups with matrix=False, which AdamW updates; of the
      paper's two halves, Adam and Muon, they have no use for the second.

    Which step fires is decided on the host by the group's ``steps``, a plain number that counts
    skipped steps too: nothing waits. A captured step does what it did when it was captured, so
    capture as many steps as ``frequency`` in one graph, or one graph of each kind.

    Args:
        params: as ``Muon`` takes them.
        lr, weight_decay: numbers, or 0-d tensors that a captured step reads again.
        betas: beta1, beta2 and beta3, what M1, V and M2 take of what is new; above 0, at most 1.
        retain: a1, a2 and a3, what they keep of what they had; from 0 to 1.
        alpha: the weight of the slow momentum, at least 0.
        frequency: f, the steps of a chunk.
        eps: at least 0; bounds how much longer than others a step of an element becomes.
        relative: divide sqrt(V) by its root mean square over the matrix.
        ns_steps, ns_coefficients, ns_dtype: of ``newton_schulz``; None computes in the working
            dtype.
        matrix, adam_betas, adam_eps, maximize, capturable, skip_nonfinite: as ``Muon`` has them. A
            step that is skipped does not fire; its chunk's gradients wait for the next time.

    The state of a matrix is ``fast_momentum`` (M1), ``second_moment`` (V), ``slow_direction`` (O2)
    and ``slow_momentum``: a3 M2 and beta3 times the gradients since, which is M2 when it fires and
    spares a buffer of their sum. Arithmetic and state are fp32 for narrower parameters.

    Raises:
        TypeError: a parameter is not floating or not strided, or a matrix is sharded otherwise
            than by rows; a gradient is sparse.
        ValueError: an option is out of its range, a matrix has fewer than two axes, a gradient or a
            loaded state has another shape or device than its parameter.
    """

    # The betas of a sum matter little: Newton-Schulz divides M1's and M2's out, and lr scales V's.
    ALGORITHM_1: ClassVar[Mapping[str, Any]] = MappingProxyType(
        dict(betas=(0.9, 0.999, 0.9), retain=(1.0, 1.0, 1.0), relative=False, eps=1e-8)
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float, float] = (0.05, 0.001, 0.1),
        alpha: float = 0.5,
        frequency: int = 10,
        eps: float = 0.1,
        weight_decay: float | Tensor = 0.0,
        *,
        retain: tuple[float, float, float] = (0.95, 0.999, 0.9),
        relative: bool = True,
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
            betas=betas,
            alpha=alpha,
            frequency=frequency,
            eps=eps,
            weight_decay=weight_decay,
            retain=retain,
            relative=relative,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            matrix=matrix,
            adam_betas=adam_betas,
            adam_eps=adam_eps,
            maximize=maximize,
            capturable=capturable,
            steps=0,
        )
        super().__init__(params, defaults, skip_nonfinite, backend)

    def _check_matrices(self, group: dict[str, Any]) -> None:
        ranges = {"betas": (5e-324, "above 0 and at most 1"), "retain": (0.0, "from 0 to 1")}
        for name, (lowest, wanted) in ranges.items():
            numbers = group[name]
            if not isinstance(numbers, (tuple, list)) or len(numbers) != 3:
                raise ValueError(f"{name} must be three numbers, got {numbers!r}")
            for number, x in enumerate(numbers):
                check_plain_number(f"{name}[{number}]", x)
                if not lowest <= x <= 1.0:
                    raise ValueError(f"{name}[{number}] must be {wanted}, got {x!r}")
        check_plain_number("alpha", group["alpha"])
        check_plain_number("eps", group["eps"])
        check_switch("relative", group["relative"])
        checked_count("frequency", group["frequency"])

    def _new_matrix_state(self, p: Tensor) -> dict[str, Tensor]:
        names = "fast_momentum", "second_moment", "slow_momentum", "slow_direction"
        return {name: new_buffer(p) for name in names}

    def _begin(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group["steps"] += 1

    def _move_matrices(
        self, stack: Stack, g: Tensor, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        (beta1, beta2, beta3), (a1, a2, a3) = group["betas"], group["retain"]
        buffers, p, lr = stack.buffers, stack.values(), group["lr"]
        fast = a1 * buffers["fast_momentum"] + beta1 * g
        v = a2 * buffers["second_moment"] + beta2 * g * g
        slow = buffers["slow_momentum"] + beta3 * g
        direction = yield from stack.applied(lambda x: orthogonal(x, group), as_matrices(fast))
        direction = direction.view_as(p) + group["alpha"] * buffers["slow_direction"]
        root = as_matrices(v.sqrt())
        if group["relative"]:
            # In fp64: squares of large elements overflow in fp32.
            total = root.double().square().sum((-2, -1), keepdim=True)
            yield from stack.sum_(total)
            root = relative_to(root, (total / (stack.rows * stack.columns)).sqrt())
        new = (1.0 - lr * group["weight_decay"]) * p
        new = new - lr * direction / (root.view_as(p) + group["eps"])
        stack.move(skips, p, new)
        state = dict(fast_momentum=fast, second_moment=v, slow_momentum=slow)
        if fires(group):
            direction = yield from stack.applied(lambda x: orthogonal(x, group), as_matrices(slow))
            state |= dict(slow_direction=direction.view_as(p), slow_momentum=a3 * slow)
        stack.keep(skips, **state)

    def _move_matrices_by_kernels(
        self, launches: Any, group: dict[str, Any], skips: Tensor | None
    ) -> Iterator[None]:
        stack = launches.stack
        unit, sums = yield from launches.m3_memories(group, skips)
        o = yield from stack.applied(lambda x: orthogonal_of(x, group), unit)
        launches.m3_move(o, sums, group, skips)
        if fires(group):
            slow = stack.buffers["slow_momentum"]
            direction = yield from stack.applied(lambda x: orthogonal(x, group), as_matrices(slow))
            retained = group["retain"][2] * slow
            stack.keep(skips, slow_direction=direction.view_as(slow), slow_momentum=retained)


def fires(group: dict[str, Any]) -> bool:
    """Whether this step is the last of a chunk."""
    return group["steps"] % group["frequency"] == 0


def relative_to(x: Tensor, mean: Tensor) -> Tensor:
    """Each matrix over the root mean square of its elements; zeros stay."""
    mean = mean.to(x.dtype)
    return x / torch.where(mean == 0.0, 1.0, mean)
