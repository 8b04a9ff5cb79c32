"""grad_norm and clip_grad_norm_: values, sizes, what is not finite."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import clip_grad_norm_, grad_norm

from .compared import assert_near

EPS = torch.finfo(torch.float32).eps


def whole(tensors) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors]).norm()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norm_is_that_of_fp64(training, backend, device, scale):
    tensors = [x.detach() * scale for x in training.parameters(device=device)]
    found = grad_norm(tensors, backend=backend)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert abs(found.double() - whole(tensors)) <= EPS * whole(tensors)


def test_norm_over_many_programs_is_that_of_fp64(training, device, many_programs):
    tensors = [x.detach() for x in training.parameters(device=device)]
    found = grad_norm(tensors, backend="triton")
    assert abs(found.double() - whole(tensors)) <= EPS * whole(tensors)


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e6, float("inf")])
def test_clipping_is_torchs(training, backend, device, max_norm):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    for some in (ps, twin):
        training.give_gradients(some, 0)
    before = [p.grad.clone() for p in ps]
    found = clip_grad_norm_(ps, max_norm, backend=backend)
    expected = torch.nn.utils.clip_grad_norm_(twin, max_norm)
    assert abs(found - expected) <= 4 * EPS * expected
    for p, q, g in zip(ps, twin, before, strict=True):
        assert ((p.grad - q.grad).abs() <= 4 * EPS * q.grad.abs()).all()
        assert max_norm < 1e3 or torch.equal(p.grad, g)


def test_clipping_over_many_programs_is_torchs(training, device, many_programs):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    for some in (ps, twin):
        training.give_gradients(some, 0)
    clip_grad_norm_(ps, 0.3, backend="triton")
    torch.nn.utils.clip_grad_norm_(twin, 0.3)
    for p, q in zip(ps, twin, strict=True):
        assert ((p.grad - q.grad).abs() <= 4 * EPS * q.grad.abs()).all()


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_not_finite_does_what_torch_does(training, backend, device, strange):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    for some in (ps, twin):
        training.give_gradients(some, 0)
        some[1].grad[2, 3] = strange
    found = clip_grad_norm_(ps, 1.0, backend=backend)
    expected = torch.nn.utils.clip_grad_norm_(twin, 1.0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for p, q in zip(ps, twin, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_dtypes_may_differ(backend, device):
    dtypes = torch.float32, torch.float16, torch.float64
    tensors = [torch.randn(40, 7, device=device).to(dtype) for dtype in dtypes]
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"not torch\.float64"):
            grad_norm(tensors, backend=backend)
        tensors.pop()
    found = grad_norm(tensors, backend=backend)
    assert abs(found.double() - whole(tensors)) <= EPS * whole(tensors)


def test_strided_and_complex_tensors_count_every_element_once(backend, device):
    x = torch.randn(12, 10, device=device)
    tensors = [x.T, torch.view_as_complex(torch.randn(5, 2, device=device))]
    sliced = x[::2, 1::3]
    found = grad_norm(tensors, backend=backend)
    expected = torch.stack([x.norm(), tensors[1].norm()]).norm()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad_norm(sliced), sliced.norm())


def test_nothing_has_a_norm_of_zero(backend, device):
    assert grad_norm([], backend=backend).item() == 0.0
    assert grad_norm(torch.empty(0, 3, device=device), backend=backend).item() == 0.0
    without = torch.nn.Parameter(torch.ones(3, device=device))
    assert clip_grad_norm_([without], 1.0, backend=backend).item() == 0.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grad_norm([torch.ones(2, dtype=torch.int64)]), TypeError, "floating or complex"),
        (lambda: grad_norm([torch.ones(2).to_sparse()]), TypeError, "strided .* torch.sparse_coo"),
        (lambda: clip_grad_norm_([], -1.0), ValueError, "at least 0, got -1.0"),
        (lambda: clip_grad_norm_([], float("nan")), ValueError, "at least 0, got nan"),
        (lambda: grad_norm([], backend="cuda"), ValueError, "backend must be"),
    ],
    ids=["integers", "sparse", "negative", "nan", "backend"],
)
def test_bad_input_is_refused_by_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def with_gradients(dtype, device):
    ps = [torch.nn.Parameter(torch.zeros(n, 3, dtype=dtype, device=device)) for n in (4, 1, 7)]
    for number, p in enumerate(ps):
        p.grad = torch.sin(torch.arange(p.numel(), device=device) + number).view_as(p).to(dtype)
    return ps


@pytest.mark.parametrize("max_norm", [0.25, torch.tensor(0.25), torch.tensor([0.25])])
@pytest.mark.parametrize("norm_type", [1, 3.0, float("inf"), 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_norms_have_the_bits_of_torch(dtype, norm_type, max_norm, device):
    ps, twins = with_gradients(dtype, device), with_gradients(dtype, device)
    found = clip_grad_norm_(ps, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.25, norm_type)
    assert torch.equal(found, expected.float())
    assert all(torch.equal(p.grad, twin.grad) for p, twin in zip(ps, twins, strict=True))
    assert not torch.equal(ps[0].grad, with_gradients(dtype, device)[0].grad)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "one"])
def test_tensor_of_a_norm_scales_as_its_number(shape, backend, device):
    ps, twins = with_gradients(torch.float32, device), with_gradients(torch.float32, device)
    found = clip_grad_norm_(ps, torch.full(shape, 0.25), backend=backend)
    assert torch.equal(found, clip_grad_norm_(twins, 0.25, backend=backend))
    rtol = 4 * torch.finfo(torch.float32).eps
    for p, twin in zip(ps, twins, strict=True):
        torch.testing.assert_close(p.grad, twin.grad, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("max_norm", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("scale", [1.0, 1e60])
@pytest.mark.parametrize("checked", [False, True])
def test_gradients_in_fp64_are_scaled_in_fp64(checked, scale, max_norm, device):
    """Whatever fp32 holds: the norm that is returned alone is fp32."""
    ps, twins = with_gradients(torch.float64, device), with_gradients(torch.float64, device)
    for p in (*ps, *twins):
        p.grad *= scale
    found = clip_grad_norm_(ps, max_norm, error_if_nonfinite=checked)
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.25)
    assert torch.equal(found, expected.float())
    assert_near([p.grad for p in ps], [p.grad for p in twins])


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_norm_that_is_not_finite_may_be_an_error(strange, norm_type, device):
    ps = with_gradients(torch.float32, device)
    ps[1].grad[0, 1] = strange
    before = [p.grad.clone() for p in ps]
    with pytest.raises(RuntimeError, match="wanted gradients with a finite norm"):
        clip_grad_norm_(ps, 0.25, norm_type, error_if_nonfinite=True)
    for p, grad in zip(ps, before, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0.0, atol=0.0, equal_nan=True)
    assert not clip_grad_norm_(ps, 0.25, norm_type).isfinite()


def test_norms_that_are_none_are_refused():
    ps = with_gradients(torch.float32, "cpu")
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type must be a number above 0"):
            clip_grad_norm_(ps, 1.0, norm_type)
    with pytest.raises(ValueError, match=r"max_norm must be one number, got shape \[2\]"):
        clip_grad_norm_(ps, torch.ones(2))
    with pytest.raises(RuntimeError, match="p = 1"):
        clip_grad_norm_(ps, 1.0, 1, backend="triton")
