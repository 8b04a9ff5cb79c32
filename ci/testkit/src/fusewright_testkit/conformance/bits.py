"""Same inputs, same bits: twice, and in every mode of autograd."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ..yardstick import as_tuple
from .records import everything, same_bits


def test_same_inputs_same_bits(op, device):
    leaves = op.leaves(op.several, op.low, device)
    assert same_bits(everything(op.kernels, leaves), everything(op.kernels, leaves))


def test_modes_change_no_bit_of_the_outputs(op, device):
    leaves = op.leaves(op.small, op.low, device)
    expected = as_tuple(op.kernels(*leaves))
    with torch.no_grad():
        assert same_bits(as_tuple(op.kernels(*leaves)), expected)
    with torch.inference_mode():
        found = as_tuple(op.kernels(*leaves))
    assert all(y.is_inference() for y in found)
    assert same_bits(found, expected)


def test_checkpointing_changes_no_bit(op, device):
    leaves = op.leaves(op.small, op.low, device)
    checkpointed = partial(checkpoint, op.kernels, use_reentrant=False)
    assert same_bits(everything(checkpointed, leaves), everything(op.kernels, leaves))
