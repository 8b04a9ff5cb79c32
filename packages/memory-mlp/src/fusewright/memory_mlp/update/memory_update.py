r"""One step of a memory M(x) = w2 act(w1 x + b1) + b2 on all its rows at once.

With w the row weights, c = 2 ("sum"), 2 / D ("mean_feature") or 2 / (N D) ("mean_all"):

    z = k w1^T + b1    h = act(z)    r = h w2^T + b2 - v    e = c w * r    p = (e w2) * act'(z)
    G = (p^T k, sum p, e^T h, sum e)    loss = c / 2 sum w * r^2    rho = min(1, max / |G|)
    S' = eta S - theta rho G            W' = (1 - alpha) W + S'

N rows, width D, H hidden units; sums go over rows. G is the gradient of the loss at W, |G| its norm
over all four tensors. Where |G| is not finite, W' = W and S' = S. The backward pass, of u_w and u_s
and the gradient of the loss, with A = -theta rho (U - G <U, G> / |G|^2) where the norm was clipped
and -theta U otherwise, U = u_w + u_s:

    dS = eta U    dalpha = -<u_w, W>    deta = <U, S>    dtheta = -rho <U, G>
    p_bar = k A1^T + a1    dh_bar = p_bar * act'(z)    e_bar = h A2^T + a2 + dh_bar w2^T
    q = c w * e_bar + dloss e    z_bar = (e A2 + q w2) * act'(z) + p_bar * (e w2) * act''(z)
    dk = p A1 + z_bar w1    dv = -q    dw = c sum_d e_bar * r + dloss c / 2 sum_d r^2
    dW = (1 - alpha) u_w + (z_bar^T k, sum z_bar, e^T dh_bar + q^T h, sum q)

Saved for it: the inputs, in k's dtype z, h and, without c, e, dh = e w2 and p, and G; r is
recomputed. Operands of products are rounded to k's dtype, weights, A and p_bar too; sums, the loss,
G, W' and S' are fp32. Sums have a fixed order: same inputs, same bits.

Behrouz, Zhong and Mirrokni, Titans: Learning to Memorize at Test Time, arXiv 2501.00663.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import without_autocast
from .._core.registration import Derivative, Op, empty_grad, second_order
from ..common.weights import MemoryWeights, Weights
from . import launch, launch_backward, reference
from .checks import (
    cast_rows,
    check_update,
    checked_gates,
    checked_options,
    checked_row_weights,
)

Tensor = torch.Tensor

# The operands of the forward op, in order.
STATE = "Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor s1, Tensor c1, Tensor s2, Tensor c2"
INPUTS = f"Tensor k, Tensor v, {STATE}, Tensor alpha, Tensor eta, Tensor theta, Tensor? row_weights"
INPUT_COUNT = 14
OPTIONS = "str activation, str reduction, float? max_grad_norm"
# Tensors that the forward op saves: of all rows, then the gradient.
SAVED = (
    "Tensor z, Tensor h, Tensor e, Tensor dh, Tensor p, Tensor g1, Tensor d1, Tensor g2, Tensor d2"
)
UPSTREAM = f"{STATE.replace('Tensor ', 'Tensor? d')}, Tensor? dloss"


class MemoryUpdate(NamedTuple):
    """The result of a step.

    Attributes:
        weights, momentum: W' and S'.
        loss: ``[*lead]``, of the old weights.
        grad_norm: ``[*lead]``, of the gradient before the clip.
        skipped: ``[*lead]``, bool: the norm was not finite, and W' and S' are W and S.
    """

    weights: MemoryWeights
    momentum: MemoryWeights
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


def _forward_triton(*args):
    *inputs, activation, reduction, max_grad_norm = args
    factor = reference.loss_factor(reduction, inputs[0])
    return launch.update_forward(tuple(inputs), factor, activation, max_grad_norm)


def _forward_reference(*args):
    inputs, options = args[:INPUT_COUNT], _named(args[INPUT_COUNT:])
    weights, momentum, *numbers = reference.memory_update(*_grouped(inputs), **options)
    saved = _forward_fake(*args)[len(weights) + len(momentum) + len(numbers) :]
    # The reference's backward pass needs nothing of the forward's.
    return *weights, *momentum, *numbers, *(x.zero_() for x in saved)


def _forward_fake(k, v, *others):
    weights = others[:4]
    w1 = weights[0]
    loss = w1.new_empty(others[8].shape)
    hidden = (*k.shape[:-1], w1.shape[-2])

    def like_weights():
        return [x.new_empty(x.shape) for x in weights]

    return (
        *like_weights(),
        *like_weights(),
        loss,
        loss.new_empty(loss.shape),
        loss.new_empty(loss.shape, dtype=torch.bool),
        *(k.new_empty(hidden) for _ in range(2)),
        k.new_empty(k.shape),
        *(k.new_empty(hidden) for _ in range(2)),
        *like_weights(),
    )


def _backward_triton(*args):
    upstream, inputs, saved, options = _parts(args)
    activation, reduction, *others = options
    factor = reference.loss_factor(reduction, inputs[0])
    grads = launch_backward.update_backward(upstream, inputs, saved, factor, activation, *others)
    return tuple(empty_grad(inputs[2]) if x is None else x for x in grads)


def _backward_reference(*args):
    upstream, inputs, _, options = _parts(args)
    return reference_gradients(upstream, inputs, options)


def reference_gradients(upstream, inputs, options):
    """The gradients of all inputs, empty where not needed, in plain torch."""
    *options, with_rows, with_weights = options

    def step(*tensors):
        weights, momentum, loss, *_ = reference.memory_update(*_grouped(tensors), **_named(options))
        return *weights, *momentum, loss

    grads = second_order(step, inputs, upstream)
    if not with_rows:
        grads[:2] = [None] * 2
    if not with_weights:
        grads[2:6] = [None] * 4
    return tuple(empty_grad(inputs[2]) if x is None else x.contiguous() for x in grads)


def _backward_fake(*args):
    _, inputs, _, (*_, with_rows, with_weights) = _parts(args)
    needed = [with_rows] * 2 + [with_weights] * 4 + [True] * 7 + [inputs[13] is not None]
    return tuple(
        x.new_empty(x.shape) if is_needed else empty_grad(inputs[2])
        for x, is_needed in zip(inputs, needed, strict=True)
    )


def _parts(args):
    """Upstream gradients, inputs, tensors that the forward pass saved, and options of a backward
    op.
    """
    return args[-14:-5], args[:INPUT_COUNT], args[INPUT_COUNT:-14], args[-5:]


def _grouped(inputs):
    """The inputs of an op as the reference takes them."""
    k, v, *state = inputs[:10]
    return k, v, MemoryWeights(*state[:4]), MemoryWeights(*state[4:]), *inputs[10:]


def _named(options):
    activation, reduction, max_grad_norm = options
    return dict(activation=activation, reduction=reduction, max_grad_norm=max_grad_norm)


def _tensors(count):
    """``count`` tensors, as a signature spells them."""
    return ", ".join(["Tensor"] * count)


_forward = Op(
    f"memory_update({INPUTS}, {OPTIONS}) -> ({_tensors(11)}, {SAVED})",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    f"memory_update_backward({INPUTS}, Tensor norm, {SAVED}, {UPSTREAM}, {OPTIONS}, bool with_rows,"
    f" bool with_weights) -> ({_tensors(INPUT_COUNT)})",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _MemoryUpdate(Derivative):
    @staticmethod
    def forward(ctx, run, *args):
        outputs = run(*args)
        (*_, norm, skipped), saved = outputs[:11], outputs[11:]
        ctx.save_for_backward(*args[:INPUT_COUNT], norm, *saved)
        ctx.options = args[INPUT_COUNT:]
        ctx.set_materialize_grads(False)
        # A direct call takes none of them, and autograd would handle each None.
        statistics = [x for x in _forward.statistics(ctx, run, *saved) if x is not None]
        ctx.mark_non_differentiable(norm, skipped, *statistics)
        return *outputs[:11], *statistics

    @staticmethod
    def backward(ctx, *upstream):
        upstream = upstream[:9]
        needed = ctx.needs_input_grad[1 : 1 + INPUT_COUNT]
        if all(x is None for x in upstream):
            return None, *(None,) * (INPUT_COUNT + 3)
        with_rows, with_weights = any(needed[:2]), any(needed[2:6])
        grads = _backward(*ctx.saved_tensors, *upstream, *ctx.options, with_rows, with_weights)
        wanted = (g if is_needed else None for g, is_needed in zip(grads, needed, strict=True))
        return None, *wanted, None, None, None


# What the forward op saves follows from the inputs, through which its gradients pass.
_backward.derivative_of_reference("norm", "z", "h", "e", "dh", "p", "g1", "d1", "g2", "d2")


def memory_update(
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    alpha: Tensor | float,
    eta: Tensor | float,
    theta: Tensor | float,
    row_weights: Tensor | None = None,
    *,
    activation: str = "silu",
    reduction: str = "sum",
    max_grad_norm: float | None = None,
    backend: Backend = "auto",
) -> MemoryUpdate:
    """One step of gradient descent with momentum and forgetting on the rows of k and v.

    Args:
        k: keys ``[*lead, N, D]``, fp32, bf16 or fp16 (the reference takes fp64 too). The kernels
            read any strides with a contiguous last axis and leading axes that two strides reach,
            such as those of a transposed ``[B, T, heads, D]``, and copy a tensor of any other
            layout. Under autocast k and v are cast to its dtype. N may be 0.
        v: values, of k's shape and dtype.
        weights, momentum: one memory for each leading index of k; or without leading axes, and then
            all rows of k are pooled into one step. fp32 (fp64 for fp64 keys), under autocast too;
            copied where not contiguous.
        alpha, eta, theta: forgetting, decay of the momentum and inner learning rate: numbers, or
            tensors with one number for each memory. Any range.
        row_weights: ``[*lead, N]``: the weight of each row in the loss; 1 where left out.
        activation: "silu", "relu" or "gelu" (the exact one).
        reduction: the loss is the sum over rows and features of the squared residual, divided by
            nothing ("sum"), D ("mean_feature") or N D ("mean_all").
        max_grad_norm: the gradient is scaled down to this norm over all four tensors.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        New weights and momentum, which share no memory with the old; loss, norm and skipped in
        fp32 (fp64) and bool. A memory whose gradient is not finite is left as it is and reported as
        skipped; its loss is still computed. Other memories are not affected. Nothing waits for the
        device.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``); each pass reads the switch when it runs.
    Differentiable in every floating tensor through weights, momentum and loss, twice; the second
    derivative runs in plain torch. grad_norm has no gradient. Gradients of W' and S' of a skipped
    memory pass on to W and S unchanged; everything else of it gets zeros.

    Raises:
        TypeError: an argument is of another type, or a tensor not floating point or not strided.
        ValueError: shapes, dtypes or devices are not as above, or an option is none of those.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    options = checked_options(activation, reduction, max_grad_norm)
    gates = alpha, eta, theta
    check_update(k, v, weights, momentum, gates)
    k, v = cast_rows(k, v)
    alpha, eta, theta = checked_gates(weights.w1, alpha=alpha, eta=eta, theta=theta)
    if row_weights is not None:
        row_weights = checked_row_weights(row_weights, k)
    if k.ndim > weights.w1.ndim:
        k, v = k.reshape(-1, k.shape[-1]), v.reshape(-1, v.shape[-1])
        row_weights = None if row_weights is None else row_weights.reshape(-1)
    if uses_triton(k, backend):
        inputs = k, v, *weights, *momentum, alpha, eta, theta, row_weights
        *tensors, loss, norm, skipped = _forward(*inputs, *options)[:11]
        return MemoryUpdate(
            MemoryWeights(*tensors[:4]), MemoryWeights(*tensors[4:]), loss, norm, skipped
        )
    return deep_memory_update(
        k, v, weights, momentum, alpha, eta, theta, row_weights, **_named(options)
    )


def deep_memory_update(
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    row_weights: Tensor | None = None,
    **options: Any,
) -> MemoryUpdate:
    """:func:`memory_update` of a memory of any number of layers, (w1, b1, .., wn, bn), in plain
    torch; the gates are tensors, and nothing is checked.
    """
    with without_autocast(k.device):
        new_weights, new_momentum, loss, norm, skipped = reference.memory_update(
            k, v, weights, momentum, alpha, eta, theta, row_weights, **options
        )
    return MemoryUpdate(new_weights, new_momentum, loss, norm.detach(), skipped)  # type: ignore[arg-type]
