"""Derivatives written out by hand, rows and masks, and what is saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fusewright.mixture_head.mixture import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import everything
from torch.func import vmap

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
FORMS = {"log_sigma": (False, -7.0, 5.0, 1e-3), "softplus": (True, -7.0, 5.0, 1e-3)}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_reference_gradients_are_the_derivatives(mixture, masked, scale, draw_mixtures):
    leaves = [t.requires_grad_() for t in draw_mixtures((3, 4), F64, y_dtype=F64)]
    mask = torch.tensor([True, False, True]) if masked else None
    call = partial(mixture.reference, mask=mask, scale=scale)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_slopes_of_the_reference_are_its_gradients(mixture, scale, dtype, draw_mixtures):
    """The CPU's op and the second derivative use the slopes written out by hand."""
    params, y = draw_mixtures((9, 4), dtype)
    factor = torch.tensor(-1.0 / 9) if mixture.name == "mixture_nll" else None
    form = dict(zip(("softplus", "low", "high", "eps"), FORMS[scale], strict=True))

    def gradients(params, y, upstream):
        if params.dtype == F64:
            return torch.autograd.grad(
                mixture.reference(params, y, scale=scale), (params, y), upstream, create_graph=True
            )
        wide = None if factor is None else factor.to(upstream.dtype)
        return reference.mixture_backward(upstream, wide, params, y, None, **form)

    upstream = torch.randn(() if factor is not None else (9,))
    Yardstick(gradients, [params, y, upstream], [None, None]).check(gradients)


def test_rows_of_heads_do_not_see_one_another(heads, device):
    # Of an even width: where a CPU has AMX, oneDNN's product of bf16 rows of an odd one multiplies
    # the next row's first number by zero.
    leaves = heads.leaves((70, 12), BF16, device)
    with_nan = [t.detach().clone().requires_grad_() for t in leaves]
    with torch.no_grad():
        with_nan[0][2] = float("nan")
    others = [0, 1, *range(3, 70)]
    clean, found = (everything(heads.kernels, tensors)[:2] for tensors in (leaves, with_nan))
    for one, other in zip(clean, found, strict=True):
        assert other[2].isnan().all()
        assert torch.equal(one[others], other[others])


def test_hidden_layer_is_saved_once_and_its_activation_never(heads, device, draw_heads):
    leaves = [t.requires_grad_() for t in draw_heads((30, 6), F32, device, stored=40, heads=3)]
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        heads.kernels(*leaves)
    assert packed.count(30 * 3 * 40) == 1


def test_mask_and_parameters_are_mapped_together(mixture, device, draw_mixtures):
    params, y = draw_mixtures((3, 4, 5), F32, device)
    mask = torch.rand(y.shape, device=device) < 0.5
    found = vmap(mixture.kernels)(params, y, mask)
    expected = [mixture.kernels(*sample) for sample in zip(params, y, mask, strict=True)]
    assert torch.equal(found, torch.stack(expected))
