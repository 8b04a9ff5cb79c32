"""Scans of rows that hold several documents, each from the row's first weights on."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_scan
from fusewright_testkit.conformance import same_bits

from .compared import assert_same_but_for_rounding
from .operations_scan import DeepOp, RestOp, ShortChunksOp
from .test_scan_clip import amid

F32, F16, F64 = torch.float32, torch.float16, torch.float64

# The op; rows, tokens, heads, D, hidden units, dtype.
CASES = {
    "plain": (ShortChunksOp(packed=True), (2, 7, 2, 3, 5), F32),
    "several-blocks-masked": (
        ShortChunksOp(dict(chunk=16, activation="gelu"), masked=True, packed=True),
        (2, 40, 1, 20, 70),
        F16,
    ),
    "rest-norm-before": (
        RestOp(dict(residual_norm=True, read="before"), packed=True),
        (2, 8, 2, 6, 5),
        F32,
    ),
    "3-layers": (DeepOp(packed=True), (2, 7, 2, 3, 5), F32),
    "4-layers-rest-norm": (
        DeepOp(dict(residual_norm=True), layers=4, rests=True, masked=True, packed=True),
        (2, 5, 1, 3, 5),
        F32,
    ),
}
# Chunks of 4 tokens of which each document has so many, the last of them one token less.
DOCUMENTS = 2, 1, 3
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param(dict(residual_norm=True, read="before"), id="norm-before"),
    pytest.param(dict(max_grad_norm=0.3), id="clipped"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(name, device):
    op, sizes, dtype = CASES[name]
    op.check(op.draw(*sizes, dtype, device))


def test_clipped_outputs_and_gradients_are_as_near_to_fp64_as_torch(device):
    op = ShortChunksOp(dict(chunk=4), packed=True)
    tensors = op.draw(2, 9, 2, 3, 5, F32, device)
    op.having(max_grad_norm=amid(op, tensors)).check(tensors)


def test_parts_of_the_backward_pass_make_one(scan_op, parts_of_a_chunk, device):
    options = dict(chunk=2, backend="triton")
    options["resets"] = torch.tensor([[False, True, True, False, True]], device=device)
    leaves = [x.requires_grad_() for x in scan_op.draw(1, 9, 2, 3, 5, F32, device)]

    def everything():
        outputs = scan_op.public(*leaves, **options)
        total = sum(y.sin().sum() for y in outputs)
        return [*outputs, *torch.autograd.grad(total, leaves)]

    expected = everything()
    parts_of_a_chunk()
    assert same_bits(everything(), expected)


def documents_of(tensors, device):
    """The tokens of the row in parts, the mask of their last chunks, and the resets."""
    chunks = sum(DOCUMENTS)
    mask = torch.arange(4 * chunks, device=device) % (4 * chunks) >= 0
    resets = torch.zeros(1, chunks, dtype=torch.bool, device=device)
    parts, start = [], 0
    for count in DOCUMENTS:
        stop = start + count
        mask[4 * stop - 1], resets[0, start] = False, True
        parts.append(slice(4 * start, 4 * stop))
        start = stop
    return parts, mask.unsqueeze(0), resets


def scanned(tensors, leaves, part, mask, resets, backend, options):
    """Outputs, state and gradients of the tokens of a part by all leaves."""
    q, k, v, *others, alpha, eta, theta, w1, b1, w2, b2 = leaves
    halves = MemoryWeights(*others[:4]), MemoryWeights(*others[4:])
    tokens = [x[:, part] for x in (q, k, v)], [x[:, part] for x in (alpha, eta, theta)]
    done = memory_scan(
        *tokens[0],
        *halves,
        *tokens[1],
        mask[:, part],
        MemoryWeights(w1, b1, w2, b2),
        resets,
        **dict(chunk=4, backend=backend) | options,
    )
    total = done.y.sin().sum()
    return done, torch.autograd.grad(total, leaves)


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS)
def test_documents_of_a_row_are_each_alone(options, backend, device):
    """By the kernels to the bit, but for the sums of what all documents give the first weights."""
    dtype = F64 if backend == "reference" else F32
    leaves = [x.requires_grad_() for x in RestOp().draw(1, 24, 2, 3, 5, dtype, device, rate=0.1)]
    parts, mask, resets = documents_of(leaves, device)
    row, row_grads = scanned(leaves, leaves, slice(None), mask, resets, backend, options)
    alone = [scanned(leaves, leaves, part, mask, None, backend, options) for part in parts]
    y = torch.cat([done.y for done, _ in alone], 1)
    losses = torch.cat([done.loss for done, _ in alone], 1)
    grads = [sum(x) for x in zip(*(own for _, own in alone), strict=True)]
    tokens = [row.y, row.loss, *row.weights, *row.momentum, *row_grads[:3], *row_grads[11:14]]
    last = alone[-1][0]
    truth = [y, losses, *last.weights, *last.momentum, *grads[:3], *grads[11:14]]
    if "max_grad_norm" in options:
        assert torch.equal(row.skipped, sum(done.skipped for done, _ in alone))
    if backend == "triton":
        assert same_bits(tokens, truth)
        torch.testing.assert_close(list(row_grads), grads)
    else:
        assert_same_but_for_rounding([*tokens, *row_grads], [*truth, *grads])


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS)
def test_document_that_is_not_finite_reaches_no_other(options, backend, device):
    leaves = [x.requires_grad_() for x in RestOp().draw(1, 24, 2, 3, 5, F32, device)]
    parts, mask, resets = documents_of(leaves, device)
    found = []
    for value in (0.5, math.nan, math.inf):
        with torch.no_grad():
            leaves[2][:, parts[1]] = value
        done, grads = scanned(leaves, leaves, slice(None), mask, resets, backend, options)
        tokens = [done.y, done.loss, *grads[:3], *grads[11:14]]
        others = [torch.cat([x[:, parts[0]], x[:, parts[2]]], 1) for x in tokens]
        found.append([*others, *done.weights, *done.momentum])
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_resets_that_do_not_fit_are_refused(scan_op, wrong):
    tensors = scan_op.draw(2, 9, 1, 3, 5, F32)
    resets = {"shape": torch.zeros(2, 9, dtype=torch.bool), "dtype": torch.zeros(2, 3)}[wrong]
    error, message = {
        "shape": (ValueError, r"resets must be \[B, chunks\] = \(2, 3\), got \(2, 9\)"),
        "dtype": (TypeError, "resets must be a bool tensor, got torch.float32"),
    }[wrong]
    with pytest.raises(error, match=message):
        scan_op.public(*tensors, chunk=4, resets=resets)
