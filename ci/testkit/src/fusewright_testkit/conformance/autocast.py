"""Operations under autocast."""

from __future__ import annotations

import pytest
import torch

from ..yardstick import as_tuple
from .records import everything, is_float, same_bits

BF16 = torch.bfloat16


@pytest.mark.sampled
@pytest.mark.parametrize("run", ["triton", "compiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_autocast_gives_the_bits_of_cast_operands_and_gradients_in_the_dtypes_of_the_inputs(
    op, dtype, run, device
):
    torch._dynamo.reset()
    leaves = op.leaves(op.small, dtype, device)
    call = op.reference if run == "reference" else op.kernels
    chosen = torch.compile(call, fullgraph=True, backend="aot_eager") if run == "compiled" else call

    def under_autocast(*tensors, call=chosen):
        with torch.autocast(device, BF16):
            return call(*tensors)

    found = everything(under_autocast, leaves)
    expected = as_tuple(call(*op.autocast(leaves)))
    if op.twin is not None:
        assert found[0].dtype == op.first(under_autocast(*leaves, call=op.twin)).dtype
    assert [y.dtype for y in found[: len(expected)]] == [y.dtype for y in expected]
    assert same_bits(found[: len(expected)], expected)
    grads = found[len(expected) :]
    assert [g.dtype for g in grads] == [x.dtype for x in leaves if is_float(x)]
    assert all(bool(g.any()) for g in grads)
