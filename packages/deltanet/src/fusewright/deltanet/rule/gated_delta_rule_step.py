"""One token of the gated delta rule, for decoding.

    S' = exp(g) S;  u = beta (v - S'^T k);  S = S' + k u^T;  o = scale S^T q

One program reads and writes a tile of a head's state once; everything is fp32. The backward pass
runs in plain torch.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, check_backend, decline, uses_triton
from .._core.precision import autocast, wide_dtype, without_autocast
from .._core.registration import Op
from . import launch, launch_step, reference
from .checks import check_step, checked_scale
from .gated_delta_rule import GatedDeltaRule

Tensor = torch.Tensor


def _step_fake(q, k, v, g, beta, state, scale):
    return q.new_empty(v.shape), state.new_empty(state.shape)


_step = Op(
    "gated_delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state,"
    " float scale) -> (Tensor o, Tensor end)",
    triton=launch_step.step_forward,
    reference=reference.gated_delta_rule_step,
    fake=_step_fake,
)


# A token takes so little that its backward pass has no kernel.
_step.derivative_of_reference()


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> GatedDeltaRule:
    """Read and write a state for one token of each row, by the gated delta rule.

    Args:
        q, k: ``[B, H, K]``, of one dtype with v, fp32, bf16 or fp16 (the reference takes fp64
            too). Under autocast they are cast to its dtype.
        v: ``[B, HV, V]``, HV a multiple of H.
        g, beta: ``[B, HV]``, as in :func:`gated_delta_rule`.
        state: ``[B, HV, K, V]``, fp32 (fp64 for fp64 q).
        scale: a number for o; K ** -0.5 where left out.
        backend: "auto" takes the kernel for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernel cannot serve.

    Returns:
        A :class:`GatedDeltaRule`: o ``[B, HV, V]`` in q's dtype and the state after the token, in
        memory of its own.

    Differentiable in every tensor, twice, in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: the shapes, dtypes or devices are not as above.
        RuntimeError: backend is "triton" and the kernel cannot serve this call.
    """
    check_backend(backend)
    check_step(q, k, v, g, beta, state)
    scale = checked_scale(scale, q)
    q, k, v = autocast(q, k, v)
    gate_dtype = wide_dtype(q)
    g, beta = g.to(gate_dtype), beta.to(gate_dtype)
    if uses_triton(q, backend):
        if q.shape[-1] <= launch.WIDEST:
            return GatedDeltaRule(*_step(q, k, v, g, beta, state, scale))
        decline_width(q, backend)
    with without_autocast(q.device):
        return GatedDeltaRule(*reference.gated_delta_rule_step(q, k, v, g, beta, state, scale))


def decline_width(q: Tensor, backend: Backend) -> None:
    """Say that keys of this width are too wide: raise for "triton", warn for "auto"."""
    obstacle = f"the kernel serves keys of up to {launch.WIDEST} columns, not {q.shape[-1]}"
    decline(obstacle, backend)
