r"""A feed-forward layer of two matrices with SiLU between them, along the last axis.

    u = x A^T        h = SiLU(u)        y = h C^T        SiLU(x) = x * sigmoid(x)

The backward pass, with s = sigmoid(u):

    dh = dy C        du = dh * s * (1 + u * (1 - s))
    dx = du A        dA = du^T x        dC = dy^T h        summed over all rows

Saved for it: x, the weights, u for the gradients of x and A, h for that of C. What is between the
products is computed in fp32 and rounded once; u, h, dh and du are in the inputs' dtype. The
products are torch's, du takes the memory of dh and, without gradients, h that of u; but on Hopper,
where rows are many, SiLU and its derivative are epilogues of products of our own
(launch_hopper.py), which neither round nor write dh, nor, without gradients, write u.

Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, arXiv 1702.03118.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import run_cast
from ..common.layer_op import Launches, Reference, check_operands, layer_op
from . import launch, reference

Tensor = torch.Tensor

_forward = layer_op(
    "feed_forward",
    "hidden_weight",
    ("u", "h"),
    Launches(
        launch.feed_forward,
        launch.feed_forward_inference,
        launch.feed_forward_backward,
    ),
    Reference(reference.feed_forward, reference.feed_forward_backward, reference.silu),
)


def _kernels(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    return _forward(x, hidden_weight, output_weight)[0]


def feed_forward(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``F.linear(F.silu(F.linear(x, hidden_weight)), output_weight)`` as one op.

    Args:
        x: ``[..., d]``, fp32, bf16 or fp16 (the reference takes fp64 too).
        hidden_weight: ``[F, d]``, A, as ``nn.Linear`` has it.
        output_weight: ``[M, F]``, C.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Rows of bf16 or fp16 weights that do not start at multiples of 16 bytes cost torch's products a
    multiple of their time: :class:`FeedForward` stores any width F so that they do.

    Returns:
        ``[..., M]``, contiguous, in x's dtype; in autocast's under autocast, to which all three are
        cast. NaN and infinity pass as in torch's functions.

    Differentiable in all three, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: the shapes do not fit one another, or devices or, outside autocast, dtypes
            differ.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_operands(x, hidden_weight, output_weight, "hidden_weight", 1)
    run = _kernels if uses_triton(x, backend) else reference.feed_forward
    return run_cast(run, x, hidden_weight, output_weight)
