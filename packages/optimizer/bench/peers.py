"""Other libraries' optimizers, where they are installed, with the options that make their step the
one of the case. Of these, pip finds torchao and gram-newton-schulz by name; apex, dion and PyLO are
built from their repositories (``pylo`` on the index is a program for microscopes).
"""

from __future__ import annotations

import functools
import math
import tempfile
from typing import Any

import torch
from fusewright.optimizer.matrix.newton_schulz import QUINTIC
from fusewright_testkit.cases import installed

from .adamw import ADAMW, CLIPPING, MOVED
from .learned import LEARNED, RATE, network
from .matrices import MUON, NEWTON_SCHULZ_STEPS
from .steps import LR, Stepped, Tensor

# Those of torch's optimizers of the same names.
ADAMW_DECAY, MUON_DECAY = 1e-2, 0.1
COEFFICIENTS = [QUINTIC] * NEWTON_SCHULZ_STEPS


def providers() -> dict[str, dict[str, Stepped]]:
    return installed(
        ("torchao-8bit", "torchao", torchao),
        ("apex", "apex", apex),
        ("gram-newton-schulz", "gram-newton-schulz", gram_newton_schulz),
        ("dion", "dion", dion),
        ("pylo", "pylo", pylo),
    )


def torchao() -> dict[str, Stepped]:
    """States of 8 bits, of tensors with 4096 elements or more in whole blocks of 256: another
    step, which keeps less. Its count of steps and its rate are on the host.
    """
    from torchao.optim import AdamW8bit

    make = functools.partial(AdamW8bit, lr=LR, weight_decay=ADAMW_DECAY)
    return {
        ADAMW: Stepped(make, captures=False),
        CLIPPING: Stepped(make, clips=True, captures=False),
    }


def apex() -> dict[str, Stepped]:
    """NVIDIA's multi-tensor AdamW; its states are fp32 beside bf16 parameters too."""
    import amp_C  # noqa: F401
    from apex.optimizers import FusedAdam

    make = functools.partial(FusedAdam, lr=LR, weight_decay=ADAMW_DECAY, capturable=True)
    return {
        ADAMW: Stepped(make),
        CLIPPING: Stepped(make, clips=True),
        MOVED: Stepped(make, captures=False, alternates=True),
    }


def gram_newton_schulz() -> dict[str, Stepped]:
    """Products of X X^T in place of X where the sides differ, by QuACK's symmetric products; it
    captures CUDA graphs of its own.
    """
    from gram_newton_schulz import Muon

    make = functools.partial(
        Muon, lr=LR, weight_decay=MUON_DECAY, adjust_lr=rate_of, ns_coefficients=COEFFICIENTS
    )
    return {MUON: Stepped(make, captures=False)}


def dion() -> dict[str, Stepped]:
    """Dion's Muon by its Triton products, which compute half of each symmetric one. It wraps
    numbers of the host in tensors of the host.
    """
    from dion import Muon

    def make(parameters: list) -> Any:
        # One rate for each shape, which its own scale of wide matrices is not.
        shapes = dict.fromkeys(p.shape for p in parameters)
        groups = []
        for shape in shapes:
            scale = rate_of(1.0, shape)
            some = [p for p in parameters if p.shape == shape]
            groups.append(dict(params=some, lr=LR * scale, weight_decay=MUON_DECAY / scale))
        options: dict[str, Any] = dict(nesterov=True, adjust_lr=None)
        return Muon(groups, newton_schulz_func=by_dions_products, **options)

    return {MUON: Stepped(make, captures=False)}


def by_dions_products(x: Tensor, epsilon: Tensor) -> Tensor:
    """Newton-Schulz by dion's products with the coefficients of all others here; those in dion's
    own functions are written into them.
    """
    from dion.newton_schulz_triton import ns_line_1, ns_line_2

    tall = x.shape[-2] > x.shape[-1]
    matrices = (x.mT if tall else x).reshape(-1, *sorted(x.shape[-2:]))
    norm = matrices.norm(dim=(-2, -1), keepdim=True)
    unit = (matrices / (norm + epsilon)).bfloat16().contiguous()
    for a, b, c in COEFFICIENTS:
        inner = ns_line_2(ns_line_1(unit), alpha=c, beta=b)
        unit = torch.baddbmm(unit, inner, unit, beta=a)
    return (unit.mT if tall else unit).reshape(x.shape)


def rate_of(lr: float, shape: tuple[int, ...]) -> float:
    """The rate of a matrix of this shape, as torch.optim.Muon and ours have it."""
    return lr * math.sqrt(max(1.0, shape[-2] / shape[-1]))


def pylo() -> dict[str, Stepped]:
    """PyLO's CUDA kernels for fp32 parameters, with the network of ours."""
    from pylo.models.Meta_MLP import MetaMLP
    from pylo.optim.AdafacLO_cuda import AdafacLO_CUDA

    def make(parameters: list) -> Any:
        mlp = network(parameters[0].device)
        theirs = MetaMLP(mlp.first.in_features, mlp.second.in_features, 1)
        with torch.no_grad():
            for x, weight in zip(theirs.parameters(), mlp.weights(), strict=True):
                x.copy_(weight)
        options: dict[str, Any] = dict(step_mult=mlp.step_mult, exp_mult=mlp.exp_mult)
        for name, offsets in zip(("momentum", "rms", "adafactor"), mlp.offsets(), strict=True):
            options[f"{name}_decays"] = offsets.tolist()
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return AdafacLO_CUDA(parameters, lr=RATE, hf_key=folder, **options)

    return {LEARNED: Stepped(make, captures=False)}
