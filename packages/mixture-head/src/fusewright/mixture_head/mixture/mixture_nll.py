r"""Log-likelihood of Gaussian mixtures, and minus its mean, with gradients from the forward pass.

    log pi   = log_softmax(w)
    log p(y) = logsumexp_k [ log pi_k - ((y - mu_k) / sigma_k)^2 / 2 - log sigma_k - log(2 pi) / 2 ]
    loss     = -sum(log p) / number of targets that count

``params [..., K, 3]`` holds (w, mu, s) along its last axis, one mixture of K components for each
leading index; several outputs are one more leading axis. log sigma is s clamped to a range
("log_sigma"), or sigma = softplus(s) + eps ("softplus"). The gradients, with the responsibilities
r_k = pi_k N(y; mu_k, sigma_k) / p(y) and z_k = (y - mu_k) / sigma_k:

    d log p / dw_k = r_k - pi_k          d log p / d log sigma_k = r_k (z_k^2 - 1)
    d log p / dmu_k = r_k z_k / sigma_k  d log p / dy = -sum_k r_k z_k / sigma_k

The loss is linear in log p, so one kernel writes log p and these slopes in the forward pass, and
the backward pass multiplies them by the upstream gradient. Saved for it: the slopes, ``[K, 3,
...]`` in params' dtype (fp32 for fp16), and mask; params and y for second derivatives. Everything
is computed in fp32; the mean adds partial sums in a fixed order, the last ones in fp64.

Bishop, Mixture Density Networks, Aston University NCRG/94/004.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import wide_dtype
from .._core.registration import Derivative, Op, empty_grad
from ..common.scale import EPS, LOG_SIGMA_RANGE, Scale, checked_scale
from . import launch, reference
from .checks import check_params, check_targets, checked_mask

Tensor = torch.Tensor
SCALE = "bool softplus, float low, float high, float eps"


def _scale(softplus, low, high, eps):
    return dict(softplus=softplus, low=low, high=high, eps=eps)


def _triton(mean, params, y, mask, softplus, low, high, eps, slopes=True):
    outputs = launch.mixture_forward(params, y, mask, softplus, low, high, eps, mean, slopes)
    return outputs if mean else outputs[:3]


def _reference(mean, params, y, mask, *scale):
    log_p = reference.mixture_log_likelihood(params, y, mask, **_scale(*scale))
    slope, y_slope = reference.mixture_slopes(params, y, mask, **_scale(*scale))
    # The kernels' layout: [K, 3, ...].
    slope = slope.to(launch.slope_dtype(params.dtype)).movedim((-2, -1), (0, 1))
    slopes = slope.contiguous(), y_slope.contiguous()
    if not mean:
        return log_p.contiguous(), *slopes
    factor = reference.mean_factor(log_p, mask)
    return log_p.sum() * factor, *slopes, factor


def _fake(mean, params, y, mask, *scale):
    empty = functools.partial(params.new_empty, dtype=wide_dtype(params))
    slope_dtype = launch.slope_dtype(params.dtype)
    slope = params.new_empty((*params.shape[-2:], *y.shape), dtype=slope_dtype)
    if mean:
        return empty(()), slope, empty(y.shape), empty(())
    return empty(y.shape), slope, empty(y.shape)


def _backward_triton(upstream, factor, params, y, mask, params_slope, y_slope, *options):
    *_, y_grad = options
    dparams, dy = launch.mixture_backward(
        upstream, factor, mask, params_slope, y_slope, params.dtype, y.dtype, y_grad
    )
    return dparams, empty_grad(y) if dy is None else dy


def _backward_reference(upstream, factor, params, y, mask, params_slope, y_slope, *options):
    *scale, y_grad = options
    dparams, dy = reference.mixture_backward(upstream, factor, params, y, mask, **_scale(*scale))
    return dparams.contiguous(), dy.contiguous() if y_grad else empty_grad(y)


def _backward_fake(upstream, factor, params, y, mask, params_slope, y_slope, *options):
    *_, y_grad = options
    return params.new_empty(params.shape), y.new_empty(y.shape) if y_grad else empty_grad(y)


_backward = Op(
    "mixture_backward(Tensor upstream, Tensor? factor, Tensor params, Tensor y, Tensor? mask,"
    f" Tensor params_slope, Tensor y_slope, {SCALE}, bool y_grad) -> (Tensor dparams, Tensor dy)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("params_slope", "y_slope")


def _forward(signature, mean):
    """The op that returns every log p, or minus their mean, with its derivative."""
    op = Op(
        signature,
        triton=functools.partial(_triton, mean),
        reference=functools.partial(_reference, mean),
        fake=functools.partial(_fake, mean),
        inference=functools.partial(_triton, mean, slopes=False),
    )

    @op.derivative
    class MixtureDerivative(Derivative):
        @staticmethod
        def forward(ctx, run, params, y, mask, *scale):
            value, *saved = run(params, y, mask, *scale)
            ctx.save_for_backward(params, y, mask, *saved)
            ctx.scale = scale
            ctx.set_materialize_grads(False)
            return value, *op.statistics(ctx, run, *saved)

        @staticmethod
        def backward(ctx, upstream, *_):
            if upstream is None:
                return (None,) * 8
            *saved, factor = ctx.saved_tensors if mean else (*ctx.saved_tensors, None)
            y_grad = ctx.needs_input_grad[2]
            dparams, dy = _backward(upstream, factor, *saved, *ctx.scale, y_grad)
            return None, dparams, dy if y_grad else None, None, None, None, None, None

    return op


_rows = _forward(
    f"mixture_log_likelihood(Tensor params, Tensor y, Tensor? mask, {SCALE})"
    " -> (Tensor log_p, Tensor params_slope, Tensor y_slope)",
    mean=False,
)
_mean = _forward(
    f"mixture_nll(Tensor params, Tensor y, Tensor? mask, {SCALE})"
    " -> (Tensor loss, Tensor params_slope, Tensor y_slope, Tensor factor)",
    mean=True,
)


def mixture_nll(
    params: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
    backend: Backend = "auto",
) -> Tensor:
    """Minus the mean of :func:`mixture_log_likelihood` over the targets that count.

    Args:
        params, y, scale, log_sigma_range, eps, backend: as in :func:`mixture_log_likelihood`.
        mask: boolean, broadcast to y's shape; True where a target counts. Whatever y and params
            hold elsewhere, NaN included, adds nothing and gets gradients of zero.

    Returns:
        One number in nats, in fp32 (fp64 for fp64 params), under autocast too; 0, with gradients of
        zero, where no target counts.

    Differentiable in params and y, twice; the second derivative runs in plain torch.

    Raises:
        TypeError, ValueError, RuntimeError: as of :func:`mixture_log_likelihood`.
    """
    check_params(params)
    check_targets(params, y)
    mask = checked_mask(mask, y)
    form = checked_scale(scale, log_sigma_range, eps)
    if not uses_triton(params, backend):
        return reference.mixture_nll(params, y, mask, **form._asdict())
    return _mean(params, y, mask, *form)[0]


def mixture_log_likelihood(
    params: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
    backend: Backend = "auto",
) -> Tensor:
    """log p(y) of every mixture.

    Args:
        params: ``[..., K, 3]``, raw parameters (w, mu, s) of K components along the last axis, in
            fp32, bf16 or fp16 (the reference takes fp64 too). Any strides; the kernels copy only a
            tensor whose last two axes are not contiguous, or whose leading axes need two strides.
        y: ``[...]``, one observation for each mixture, of any of these dtypes; it is read in fp32
            beside params of a lower precision.
        mask: boolean, broadcast to y's shape; log p is 0, and its gradients are, where it is False,
            whatever params, y and the upstream gradient hold there.
        scale: what s means. "log_sigma": log sigma, clamped to ``log_sigma_range``; "softplus":
            sigma = softplus(s) + eps.
        log_sigma_range: lowest and highest log sigma, within [-20, 20].
        eps: what "softplus" adds to sigma, in units of y; at least 1e-6.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[...]``, contiguous, in nats, in fp32 (fp64 for fp64 params), under autocast too. Finite
        params and y give finite values, and gradients but for those that pass fp16's range: a
        target more than 2^50 standard deviations away counts as just so far. An infinite target,
        as y is read, has log p = -inf and gradients of NaN. NaN in a row of params or in its target
        makes that row's value and gradients NaN.

    Differentiable in params and y, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point (mask: not boolean) or not strided, or an option
            is no number.
        ValueError: params is not ``[..., K, 3]`` with K >= 1, the shapes or devices of y or mask do
            not fit, or an option is out of its range.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_params(params)
    check_targets(params, y)
    mask = checked_mask(mask, y)
    form = checked_scale(scale, log_sigma_range, eps)
    if not uses_triton(params, backend):
        return reference.mixture_log_likelihood(params, y, mask, **form._asdict())
    return _rows(params, y, mask, *form)[0]
