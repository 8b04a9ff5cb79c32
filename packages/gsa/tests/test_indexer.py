"""gated_indexer: sizes, layouts, causality and parts of a sequence, with all gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.gsa import gated_indexer
from fusewright_testkit import Yardstick

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 20, 33, 3, 20), (1, 17, 16, 4, 64), (1, 3, 40, 2, 100)]
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_scores_and_gradients_are_as_near_to_fp64_as_torch(indexer, shape, causal, device):
    indexer.check(indexer.draw(shape, F32, device), causal=causal)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_is_as_near_to_fp64_as_torch(indexer, dtype, device):
    tensors = indexer.draw((2, 20, 33, 3, 20), dtype, device)
    indexer.check(tensors, causal=True, q_offset=13)
    assert indexer.kernels(*tensors).dtype == F32


def test_any_strides_are_read_as_they_are(indexer, device):
    q = torch.randn(2, 3, 9, 5, device=device).transpose(1, 2)
    k = torch.randn(2, 5, 11, device=device).mT
    w = torch.randn(3, 2, 9, device=device).permute(1, 2, 0)
    bias = torch.randn(6, device=device)[::2]
    indexer.check([q, k, w, bias])
    expanded = k[:1].expand(2, 11, 5)
    indexer.check([q, expanded, w, bias])


def test_one_head_with_an_open_gate_is_a_sigmoid(device, backend):
    q, k = torch.randn(1, 4, 1, 8, device=device), torch.randn(1, 6, 8, device=device)
    w, bias = torch.full((1, 4, 1), 50.0, device=device), torch.zeros(1, device=device)

    def sigmoid(q, k):
        return (q[:, :, 0] @ k.mT / math.sqrt(8)).sigmoid()

    Yardstick(sigmoid, [q, k]).check(
        lambda q, k: gated_indexer(q, k, w, bias, causal=False, backend=backend)
    )


def test_gates_are_given_before_their_sigmoid(indexer, backend, device):
    q, k, w, bias = indexer.draw(device=device)
    closed = indexer.public(q, k, torch.full_like(w, -100.0), bias, backend=backend)
    half = indexer.public(q, k, torch.zeros_like(w), bias, backend=backend)
    opened = indexer.public(q, k, torch.full_like(w, 100.0), bias, backend=backend)
    assert not closed.any()
    assert torch.equal(2 * half, opened)


def test_relu_form_is_that_of_its_paper(device, backend):
    """Equation 1 with the public code's scales: H^(-1/2) for the weights, d^(-1/2) for products."""
    q, k = torch.randn(1, 9, 4, 8, device=device), torch.randn(1, 11, 8, device=device)
    w, bias = torch.randn(1, 9, 4, device=device), torch.zeros(4, device=device)

    def by_hand(q, k, w):
        weights = w * 4**-0.5 * 8**-0.5
        return (weights.mT.unsqueeze(-1) * (q.transpose(1, 2) @ k[:, None].mT).relu()).sum(1)

    def found(q, k, w):
        options = dict(causal=False, form="relu", backend=backend)
        return gated_indexer(q, k, w, bias.to(w.dtype), **options)

    Yardstick(by_hand, [q, k, w]).check(found)
    assert (found(q, k, w) < 0).any()


def test_unseen_keys_change_no_bit(indexer, backend, device):
    tensors = indexer.draw((1, 20, 20, 2, 5), F32, device)
    before = indexer.public(*tensors, causal=True, backend=backend)
    tensors[1] = tensors[1].clone()
    tensors[1][:, 13:] = math.nan
    after = indexer.public(*tensors, causal=True, backend=backend)
    assert torch.equal(before[:, :13], after[:, :13])
    assert torch.equal(before.isinf(), torch.ones_like(before).triu(1).bool())


def test_parts_of_a_sequence_are_the_whole(indexer, device):
    def whole(*tensors):
        return indexer.reference(*tensors, causal=True)

    def parts(q, k, w, bias):
        found = []
        for first, last in ((0, 16), (16, 17), (17, 40)):
            rows = q[:, first:last], k[:, :last], w[:, first:last], bias
            part = indexer.kernels(*rows, causal=True, q_offset=first)
            found.append(F.pad(part, (0, 40 - last), value=-math.inf))
        return torch.cat(found, 1)

    Yardstick(whole, indexer.draw((1, 40, 40, 2, 5), F32, device)).check(parts)


@pytest.mark.parametrize("q_offset", [6, 2**31 - 2, 2**40, 2**63 - 1, 2**63, 2**70])
def test_rows_beyond_all_keys_see_all_of_them(indexer, backend, q_offset, device):
    leaves = [x.requires_grad_() for x in indexer.draw((1, 5, 6, 2, 5), F32, device)]

    def of(**options):
        scores = indexer.public(*leaves, backend=backend, **options)
        return [scores, *torch.autograd.grad(scores.square().sum(), leaves)]

    assert all(map(torch.equal, of(causal=True, q_offset=q_offset), of()))


def test_gates_of_fp64_do_not_widen_the_scores(indexer, backend, device):
    q, k, w, bias = indexer.draw((1, 5, 6, 2, 5), F32, device)
    leaves = [x.double().requires_grad_() for x in (w, bias)]
    scores = indexer.public(q, k, *leaves, backend=backend)
    assert scores.dtype == F32
    assert all(g.dtype == F64 for g in torch.autograd.grad(scores.sum(), leaves))


def test_gradient_of_a_score_that_no_query_sees_counts_for_nothing(indexer, backend, device):
    leaves = [x.requires_grad_() for x in indexer.draw((1, 9, 9, 2, 5), F32, device)]
    g = torch.randn(1, 9, 9, device=device)

    def gradients(g):
        scores = indexer.public(*leaves, causal=True, backend=backend)
        return torch.autograd.grad(scores, leaves, g)

    poisoned = torch.where(torch.ones(9, 9, device=device).triu(1) > 0, math.nan, g)
    for found, expected in zip(gradients(poisoned), gradients(g), strict=True):
        assert torch.equal(found, expected)


def test_scores_stay_fp32_where_keys_are_many(indexer, device):
    tensors = indexer.draw((1, 1, 300, 4, 16), BF16, device)
    assert indexer.kernels(*tensors).unique().numel() > 290
