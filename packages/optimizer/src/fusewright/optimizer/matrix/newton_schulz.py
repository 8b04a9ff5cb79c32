r"""The orthogonal factor of many matrices at once, by matrix products alone. With the matrix
G = U S V^T and X0 = G / |G|_F, each step is

    A = X X^T    X <- a X + (b A + c A^2) X

which leaves U and V as they are and moves every singular value s to a s + b s^3 + c s^5; after some
steps all are about 1 and X is about U V^T. A tall matrix is taken by its transpose, so that A has
the shorter side. Steps with c = 0 save a product.

Higham, Functions of Matrices, SIAM 2008, chapter 8; the coefficients ``QUINTIC`` are of Jordan et
al., Muon: An optimizer for hidden layers in neural networks, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core.checks import checked_count
from .._core.precision import without_autocast

Tensor = torch.Tensor
Coefficients = tuple[float, float, float]
# Steep at zero, so that small singular values grow fast; five steps leave them at about 0.7 to 1.2.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
# Newton's own: converges to 1 in full, from small singular values slowly.
CUBIC: Coefficients = (1.5, -0.5, 0.0)
PRECISIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def newton_schulz(
    matrices: Tensor,
    steps: int = 5,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """About the orthogonal factor U V^T of each matrix U S V^T.

    The chain is batched products of the vendor's library, which autograd differentiates; steps of
    ``Muon`` and ``M3``, which nothing differentiates, have a kernel for it on Hopper.

    Args:
        matrices: ``[..., rows, columns]``, floating.
        steps: how many, at least 1.
        coefficients: (a, b, c) of every step, or one such triple for each step.
        dtype: of the products; those of fp32 follow torch's TF32 switch. The matrices' own where
            left out. Norms are taken in at least fp32.

    Returns:
        As ``matrices``. A matrix of zeros gives zeros; one with a NaN or an infinity gives NaN and
        leaves the others alone. The size of a matrix does not matter. Differentiable by autograd.

    Raises:
        TypeError: matrices or dtype are not floating, steps is no whole number.
        ValueError: matrices have fewer than two axes, steps is below 1, coefficients are no three
            numbers or not as many triples as steps.
    """
    if not matrices.is_floating_point():
        raise TypeError(f"matrices must be floating, got {matrices.dtype}")
    if matrices.dim() < 2:
        raise ValueError(f"matrices must be [..., rows, columns], got {list(matrices.shape)}")
    triples = check_chain(steps, coefficients, dtype)
    if matrices.numel() == 0:
        return matrices.clone()
    with without_autocast(matrices.device):
        x, _ = unit(matrices.flatten(0, -3) if matrices.dim() > 2 else matrices.unsqueeze(0))
        x = chain(x.to(matrices.dtype if dtype is None else dtype), triples)
        return x.to(matrices.dtype).reshape(matrices.shape)


def chain(x: Tensor, triples: Sequence[Coefficients]) -> Tensor:
    """a X + (b X X^T + c (X X^T)^2) X for each triple, X ``[stack, rows, columns]`` of norm 1; with
    X^T X on the other side where that is smaller.
    """
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in triples:
        gram = x.mT @ x if tall else x @ x.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        factors = (x, inner) if tall else (inner, x)
        x = torch.baddbmm(x, *factors, beta=a)
    return x


def unit(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix over its Frobenius norm, and the norms, ``[..., 1, 1]``, in at least fp32; zeros
    stay zeros.
    """
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    # First by the largest element: squares of small or large ones vanish or overflow in fp32.
    most = x.detach().abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(most == 0.0, 1.0, most)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / torch.where(most == 0.0, 1.0, norm), most * norm


def check_chain(steps: Any, coefficients: Any, dtype: Any) -> list[Coefficients]:
    """The arguments of ``newton_schulz`` as one triple for each step."""
    steps = checked_count("steps", steps)
    if dtype is not None and dtype not in PRECISIONS:
        raise TypeError(f"dtype must be floating, of 16 to 64 bits, got {dtype}")
    triples = list(coefficients)
    if all(isinstance(x, (int, float)) for x in triples):
        triples = [tuple(triples)] * steps
    if len(triples) != steps or any(len(triple) != 3 for triple in triples):
        raise ValueError(
            f"coefficients must be three numbers, or three for each of {steps} steps, got "
            f"{coefficients!r}"
        )
    return triples
