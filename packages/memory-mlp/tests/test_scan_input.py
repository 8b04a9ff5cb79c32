"""Bad input of memory_scan gets an error that says what was wanted and what came."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_scan
from fusewright.memory_mlp.common.operands import WIDEST, WIDEST_HIDDEN
from fusewright.memory_mlp.scan.memory_scan import LONGEST_CHUNK

q, k, v = torch.randn(3, 2, 5, 3, 4)
weights = MemoryWeights(
    torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6), torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4)
)
momentum = weights.map(torch.zeros_like)
gate = torch.rand(2, 5, 3)
mask = gate < 0.5

# What is given otherwise than in a good call, the error, and what it says.
BAD = {
    "three axes": (dict(q=q[0]), ValueError, r"q must be \[B, T, heads, D\] with D at least 1"),
    "no width": (dict(q=q[..., :0]), ValueError, "with D at least 1, got"),
    "fewer keys": (
        *(dict(k=k[:, :4]), ValueError),
        r"k must have q's shape \(2, 5, 3, 4\), got \(2, 4, 3, 4\)",
    ),
    "dtypes": (dict(v=v.half()), ValueError, "v must have q's dtype torch.float32, got"),
    "devices": (dict(k=k.to("meta")), ValueError, "k must be on q's device cpu, got meta"),
    "tuple as weights": (
        *(dict(weights=tuple(weights)), TypeError),
        "weights must be MemoryWeights, got tuple",
    ),
    "tuple as momentum": (
        *(dict(momentum=tuple(momentum)), TypeError),
        "momentum must be MemoryWeights, got tuple",
    ),
    "memory of one row": (
        *(dict(weights=weights.map(lambda x: x[:1])), ValueError),
        r"weights.w1 must be \(2, 3, 6, 4\), got \(1, 3, 6, 4\)",
    ),
    "memory without rows": (
        *(dict(weights=weights.map(lambda x: x[0])), ValueError),
        r"weights.w1 must be \(2, 3, 'hidden', 4\), got \(3, 6, 4\)",
    ),
    "no hidden units": (
        *(dict(weights=weights._replace(w1=torch.zeros(2, 3, 0, 4))), ValueError),
        r"weights.w1 must be \(2, 3, 'hidden', 4\), got \(2, 3, 0, 4\)",
    ),
    "turned w2": (
        *(dict(weights=weights._replace(w2=weights.w1)), ValueError),
        r"weights.w2 must be \(2, 3, 4, 6\), got \(2, 3, 6, 4\)",
    ),
    "narrow momentum": (
        *(dict(momentum=momentum._replace(b1=momentum.b1[..., :5])), ValueError),
        r"momentum.b1 must be \(2, 3, 6\), got \(2, 3, 5\)",
    ),
    "half a state": (
        *(dict(weights=weights.map(torch.Tensor.half)), ValueError),
        "weights.w1 must be torch.float32 on cpu, got torch.float16",
    ),
    "fp64 rows": (
        *(dict(q=q.double(), k=k.double(), v=v.double()), ValueError),
        "weights.w1 must be torch.float64 on cpu, got torch.float32",
    ),
    "state elsewhere": (
        *(dict(momentum=momentum._replace(b2=momentum.b2.to("meta"))), ValueError),
        "momentum.b2 must be torch.float32 on cpu, got torch.float32 on meta",
    ),
    "number as gate": (dict(alpha=0.1), TypeError, "alpha must be a tensor, got float"),
    "integer gates": (dict(eta=gate.int()), TypeError, "eta must be float32"),
    "gate for rows": (
        *(dict(theta=gate[..., 0]), ValueError),
        r"theta must be \[B, T, heads\] = \(2, 5, 3\), got \(2, 5\)",
    ),
    "gates elsewhere": (dict(eta=gate.to("meta")), ValueError, "eta must be on q's device cpu"),
    "numbers as mask": (dict(write_mask=gate), TypeError, "must be a bool tensor, got torch.float"),
    "list as mask": (dict(write_mask=[True]), TypeError, "must be a bool tensor, got list"),
    "mask by heads": (
        *(dict(write_mask=mask.mT), ValueError),
        r"write_mask must be \[B, T, heads\] = \(2, 5, 3\), got \(2, 3, 5\)",
    ),
    "mask of one axis": (dict(write_mask=mask[0, :, 0]), ValueError, "write_mask must be"),
    "mask of tokens": (
        *(dict(write_mask=mask[:, :4, 0]), ValueError),
        r"write_mask must be \[B, T\] = \(2, 5\), got \(2, 4\)",
    ),
    "no chunk": (dict(chunk=0), ValueError, "chunk must be at least 1, got 0"),
    "half a chunk": (dict(chunk=2.0), TypeError, "chunk must be a whole number, got float"),
    "true as chunk": (dict(chunk=True), TypeError, "chunk must be a whole number, got bool"),
    "activation": (dict(activation="tanh"), ValueError, 'activation must be "silu" or "relu"'),
    "no norm": (
        *(dict(max_grad_norm=0.0), ValueError),
        "max_grad_norm must be a finite number above 0, got 0",
    ),
    "endless norm": (
        *(dict(max_grad_norm=float("inf")), ValueError),
        "max_grad_norm must be a finite number, got inf",
    ),
    "text as norm": (dict(max_grad_norm="1"), TypeError, "max_grad_norm must be a number, got str"),
    "read": (dict(read="never"), ValueError, 'read must be "after" or "before", got \'never\''),
}


def scan(**changed):
    good = dict(q=q, k=k, v=v, weights=weights, momentum=momentum)
    return memory_scan(**good | dict(alpha=gate, eta=gate, theta=gate) | changed)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    with pytest.raises(error, match=message):
        scan(**changed)


@pytest.mark.parametrize(
    ("width", "hidden", "chunk"),
    [(WIDEST + 1, 4, 1), (4, WIDEST_HIDDEN + 1, 1), (4, 4, LONGEST_CHUNK + 1)],
)
def test_triton_says_which_memories_and_chunks_it_serves(scan_op, width, hidden, chunk, device):
    tensors = scan_op.draw(1, 1, 1, width, hidden, device=device)
    with pytest.raises(RuntimeError, match=f"tokens, not {width}, {hidden} and {chunk}"):
        scan_op.public(*tensors, chunk=chunk, backend="triton")


def test_chunks_longer_than_the_kernels_serve_are_the_references(scan_op):
    tensors = scan_op.draw(1, 3, 1, 2, 3)
    y, *_ = scan_op.public(*tensors, chunk=1000)
    assert torch.equal(y, scan_op.public(*tensors, chunk=3)[0])
