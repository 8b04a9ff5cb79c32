"""Tasks as TransformerNP has them, all rows and all gradients: a grid of context and target sizes,
and one of 200,000 context points, whose truth is computed some queries at a time.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.attention.rectangular import reference
from fusewright_testkit.yardstick import Allowance, RoundedProducts, assert_within

from .operations import SCALE

BF16 = torch.bfloat16
CONTEXTS = (1, 3, 16, 47, 63, 64, 65, 127, 128, 129, 500, 1000)
NAMES = ("o", "lse", "dq", "dk", "dv")
QUERIES_AT_ONCE = 512

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("targets", [0, 1, 500, 1000])
@pytest.mark.parametrize("keys", [*CONTEXTS, pytest.param(10_000, marks=pytest.mark.large)])
def test_context_beside_targets_is_as_near_to_fp64_as_torch(lse_op, keys, targets):
    tasks = 1 if keys == 10_000 else 3
    lse_op.check(lse_op.draw((tasks, keys + targets, keys, 2, 64), BF16, "cuda"))


@pytest.mark.large
def test_task_of_200_000_keys_is_as_near_to_fp64_as_torch(lse_op):
    q, k, v = lse_op.draw((1, 205_000, 200_000, 1, 64), BF16, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = lse_op.kernels(*leaves)
    grads = torch.randn_like(o), torch.randn_like(lse)
    found = [o, lse, *torch.autograd.grad((o, lse), leaves, grads)]
    tensors = [x.detach() for x in (q, k, v, *grads)]
    truth = some_queries_at_a_time([x.double() for x in tensors])
    with RoundedProducts(BF16):
        eager = some_queries_at_a_time([x.float() for x in tensors])
    for name, value, true, other in zip(NAMES, found, truth, eager, strict=True):
        assert_within(value.detach(), true, Allowance.of(true, other.to(value.dtype)), name)


def some_queries_at_a_time(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """o, lse, dq, dk and dv of q, k, v, do and dlse, in their dtype."""
    q, k, v, do, dlse = tensors
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    of_o, of_lse, of_dq = [], [], []
    for q_part, do_part, dlse_part in zip(
        q.split(QUERIES_AT_ONCE, 1),
        do.split(QUERIES_AT_ONCE, 1),
        dlse.split(QUERIES_AT_ONCE, 2),
        strict=True,
    ):
        o, lse = reference.rectangular_attention_with_lse(q_part, k, v, scale=SCALE)
        dq, dk_part, dv_part, _ = reference.rectangular_attention_backward(
            do_part, dlse_part, q_part, k, v, scale=SCALE
        )
        of_o.append(o)
        of_lse.append(lse)
        of_dq.append(dq)
        dk += dk_part
        dv += dv_part
    return [torch.cat(of_o, 1), torch.cat(of_lse, 2), torch.cat(of_dq, 1), dk, dv]
