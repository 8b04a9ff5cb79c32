"""What autograd and its users may do with the ops: shared operands, changes in place, export."""

from __future__ import annotations

import pytest
import torch
from fusewright import norm
from fusewright.norm.row_norm import reference
from fusewright_testkit import Yardstick

F32 = torch.float32
SHAPE = (5, 24)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_one_tensor_may_be_both_operands(name, device):
    x, weight = torch.randn(SHAPE, device=device), torch.randn(SHAPE[-1], device=device)

    def doubled(call):
        return lambda x, weight: call(x, x, weight, eps=1e-6)

    yardstick = Yardstick(doubled(getattr(reference, name)), [x, weight])
    adding = getattr(norm, name)
    yardstick.check(lambda x, w: adding(x, x, w, eps=1e-6, backend="triton"))


@pytest.mark.parametrize("adding", [norm.add_rms_norm, norm.add_layer_norm])
def test_sum_changed_after_the_forward_pass_is_noticed(adding, device):
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    y, total = adding(x, x.detach(), backend="triton")
    total.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@pytest.mark.parametrize("module", [norm.RMSNorm, norm.LayerNorm])
def test_exported_module_serves_any_number_of_rows(module, strict, device):
    layer = module(24, backend="triton", device=device)
    rows = torch.export.Dim("rows")
    x = torch.randn(SHAPE, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict)
    more = torch.randn(9, 24, device=device)
    assert torch.equal(program.module()(more), layer(more))


@pytest.mark.parametrize("module", [norm.RMSNorm, norm.LayerNorm])
def test_module_made_on_meta_is_filled_elsewhere(module, device):
    layer = module((4, 6), device="meta").to_empty(device=device)
    layer.reset_parameters()
    x = torch.randn(3, 4, 6, device=device)
    assert torch.equal(layer(x), module((4, 6), device=device)(x))


def test_rows_do_not_see_one_another(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, F32, device)]
    poisoned = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        poisoned[0][2] = float("nan")

    def rows(leaves):
        y = op.first(op.kernels(*leaves))
        return y, torch.autograd.grad(y.square().sum(), leaves[0])[0]

    for found, truth in zip(rows(poisoned), rows(tensors), strict=True):
        assert found[2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(found[others], truth[others])
