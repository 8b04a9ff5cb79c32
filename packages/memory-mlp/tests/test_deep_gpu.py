"""What only a GPU can show of the scan of three layers and more: full sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit.conformance import everything, same_bits

from .operations_scan import DeepOp

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# As in test_scan_gpu.py.
ROWS = 2, 300, 3
RATE = 0.002


def drawn(op, width, hidden, dtype):
    return op.draw(*ROWS, width, hidden, dtype, "cuda", rate=RATE)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("residual_norm", [False, True])
def test_full_size_is_as_near_to_fp64_as_torch(residual_norm, layers, hidden, dtype):
    op = DeepOp().having(layers=layers, residual_norm=residual_norm)
    op.check(drawn(op, 64, hidden, dtype))


@pytest.mark.sampled
@pytest.mark.parametrize("width", [8, 40, 64])
@pytest.mark.parametrize("chunk", [16, 48, 64])
@pytest.mark.parametrize("read", ["after", "before"])
def test_rest_mask_and_resets_at_every_width_are_as_near_to_fp64_as_torch(read, chunk, width):
    options = dict(rests=True, masked=True, packed=True, residual_norm=True)
    op = DeepOp().having(read=read, chunk=chunk, **options)
    op.check(drawn(op, width, 200, BF16))


@pytest.mark.parametrize("precision", ["tf32", "exact"])
def test_fp32_is_as_near_to_fp64_as_torch(precision, request):
    if precision == "tf32":
        request.getfixturevalue("in_tf32")
    op = DeepOp()
    op.check(op.draw(1, 130, 2, 64, 128, F32, "cuda", rate=RATE))


@pytest.mark.parametrize("residual_norm", [False, True])
def test_repeated_calls_give_the_same_bits(residual_norm):
    op = DeepOp().having(rests=True, residual_norm=residual_norm)
    leaves = [x.requires_grad_() for x in drawn(op, 64, 128, BF16)]
    first = everything(op.kernels, leaves)
    for _ in range(3):
        assert same_bits(everything(op.kernels, leaves), first)
