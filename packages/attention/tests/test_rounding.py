"""What rounding took from o, as the forward pass keeps it for the backward pass."""

from __future__ import annotations

import pytest
import torch
from fusewright.attention import rectangular_attention
from fusewright.attention.common.outputs import WORD

# Of a unit of o's dtype, as a difference of words of fp32.
UNITS = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13}
every_dtype = pytest.mark.parametrize("dtype", UNITS, ids=str)


def forward(q, k, v):
    """o and the words, of keys that are more than one tile."""
    op = torch.ops.fusewright_attention.rectangular_attention
    o, _, _, words = op(q, k, v, None, None, q.shape[-1] ** -0.5, False)
    return o, words


def unrounded(o, words):
    at = 4 * torch.arange(WORD, device=o.device, dtype=torch.int32)
    code = (words.unsqueeze(-1) >> at & 15).flatten(-2)
    step = UNITS[o.dtype] // 15
    return (o.float().view(torch.int32) + (code - 8) * step).view(torch.float32)


def draw(dtype, device, rows=40, keys=300, width=40):
    shapes = ((2, n, 3, width) for n in (rows, keys, keys))
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


@every_dtype
def test_what_is_left_is_a_thirtieth_of_a_unit(dtype, device):
    """Of means, whose probabilities are exact."""
    q, k, v = draw(dtype, device, keys=256)
    o, words = forward(torch.zeros_like(q), k, v)
    assert words.dtype == torch.int32
    assert words.shape == (*o.shape[:-1], 40 // WORD)
    truth = v.double().mean(1, keepdim=True)
    unit = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(truth.abs())))
    left, taken = ((x.double() - truth).abs() / unit for x in (unrounded(o, words), o))
    assert left.max() < 1 / 30 + 1e-3
    assert taken.max() > 0.4


@every_dtype
def test_nothing_is_taken_where_one_key_has_all_the_weight(dtype, device):
    q, k, v = draw(dtype, device)
    k[:, 1:] = 0
    k[:, 0] = 64 * q[:, :1].mean(1).sign()
    q = k[:, :1].expand_as(q).contiguous()
    o, words = forward(q, k, v)
    assert torch.equal(o, v[:, :1].expand_as(o))
    assert torch.equal(unrounded(o, words), o.float())


def test_what_is_kept_beside_the_inputs_is_a_quarter_of_o_and_eight_bytes_a_row(device):
    q, k, v = draw(torch.bfloat16, device, width=64)
    q.requires_grad_()
    kept = []

    def pack(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rectangular_attention(q, k, v, backend="triton")
    inputs = {x.data_ptr() for x in (q, k, v)}
    beside = [x for x in kept if x is not None and x.data_ptr() not in inputs]
    rows = q.numel() // 64
    assert sum(x.nbytes for x in beside) == q.nbytes + q.nbytes // 4 + 8 * rows
