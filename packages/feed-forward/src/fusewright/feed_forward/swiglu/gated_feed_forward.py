r"""A feed-forward layer gated by SiLU, along the last axis.

    gate, up = x A^T, x B^T        h = SiLU(gate) * up        y = h C^T

and, with s = sigmoid(gate), the backward pass:

    dh = dy C        dgate = dh * up * s * (1 + gate * (1 - s))        dup = dh * gate * s
    dx = dgate A + dup B        dA = dgate^T x        dB = dup^T x        dC = dy^T h

sums of the weights' gradients over all rows. A lies above B in one matrix, so x A^T and x B^T are
the halves of one product, and so are their gradients. Saved for the backward pass: x, the weights,
that product for the gradients of x, A and B, h for that of C. What is between the products is
computed in fp32 and rounded once; the halves, h and their gradients are in the inputs' dtype. The
products are torch's.

Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import run_cast
from ..common.layer_op import Launches, Reference, check_operands, layer_op
from ..gating import reference as gating
from . import launch, reference

Tensor = torch.Tensor

_forward = layer_op(
    "gated_feed_forward",
    "joint_weight",
    ("joint", "gated"),
    Launches(
        launch.gated_feed_forward,
        launch.gated_feed_forward_inference,
        launch.gated_feed_forward_backward,
    ),
    Reference(reference.swiglu, reference.swiglu_backward, gating.silu_mul_halves),
)


def _kernels(x: Tensor, joint_weight: Tensor, output_weight: Tensor) -> Tensor:
    return _forward(x, joint_weight, output_weight)[0]


def gated_feed_forward(
    x: Tensor, joint_weight: Tensor, output_weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``F.linear(silu_mul(gate, up), output_weight)`` as one op, gate and up the halves of
    ``F.linear(x, joint_weight)``.

    Args:
        x, output_weight, backend: as in :func:`feed_forward`.
        joint_weight: ``[2 * F, d]``, A above B. :class:`SwiGLU` stores any width F so that products
            are fast.

    Results, derivatives and errors are as of :func:`feed_forward`, ``joint_weight`` in place of
    ``hidden_weight``.
    """
    check_operands(x, joint_weight, output_weight, "joint_weight", 2)
    run = _kernels if uses_triton(x, backend) else reference.swiglu
    return run_cast(run, x, joint_weight, output_weight)
