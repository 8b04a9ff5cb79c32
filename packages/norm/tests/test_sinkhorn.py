"""sinkhorn_knopp: what it computes, at any size, layout and size of the logits."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from fusewright.norm import sinkhorn_knopp
from fusewright.norm.sinkhorn import reference
from fusewright_testkit import Yardstick, transforms

from .operations import SINKHORN

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan
ITERATIONS, EPS = 4, 1e-6
DOMAINS = pytest.mark.parametrize("domain", ["linear", "log"])
BOTH_DOMAINS = pytest.mark.parametrize("op", SINKHORN, ids=lambda op: op.domain)
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])


def kernels(x, **options):
    return sinkhorn_knopp(x, **{"iterations": ITERATIONS, "backend": "triton"} | options)


def check(x, grads=None, **options):
    """Hold the kernels' output and gradient against the yardstick."""
    options = {"iterations": ITERATIONS, "eps": EPS} | options
    yardstick = Yardstick(partial(reference.sinkhorn_knopp, **options), [x], grads)
    yardstick.check(partial(kernels, **options))


def value_and_slope(x, **options):
    leaf = x.detach().requires_grad_()
    y = kernels(leaf, **options)
    return y.detach(), torch.autograd.grad(y, leaf, torch.cos(torch.arange(y.numel())).view_as(y))[
        0
    ]


def as_the_papers_write_it(x, iterations, eps):
    matrix = torch.exp(x - x.amax(-1, keepdim=True))
    for iteration in range(iterations):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + (eps if iteration else 0.0))
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_reference_is_the_iteration_of_the_papers(eps, scale):
    leaf = (scale * torch.randn(5, 4, 4, dtype=F64)).requires_grad_()
    dy = torch.randn_like(leaf)
    truth = as_the_papers_write_it(leaf, 20, eps)
    for domain in ("linear", "log") if eps == 0 else ("linear",):
        y = sinkhorn_knopp(leaf, eps=eps, domain=domain, backend="reference")
        torch.testing.assert_close(y, truth)
        found, expected = (torch.autograd.grad(t, leaf, dy, retain_graph=True) for t in (y, truth))
        torch.testing.assert_close(found, expected)


@DOMAINS
def test_reference_gradients_are_the_derivatives(domain):
    leaf = torch.randn(2, 3, 3, dtype=F64, requires_grad=True)
    options = dict(iterations=3, eps=1e-2, domain=domain)
    assert torch.autograd.gradcheck(partial(reference.sinkhorn_knopp, **options), leaf)
    assert torch.autograd.gradgradcheck(partial(reference.sinkhorn_knopp, **options), leaf)
    dy = torch.randn_like(leaf)
    y = reference.sinkhorn_knopp(leaf, **options)
    backward = partial(reference.sinkhorn_knopp_backward, **options)
    torch.testing.assert_close(backward(dy, leaf), torch.autograd.grad(y, leaf, dy)[0])
    assert torch.autograd.gradcheck(backward, (dy.requires_grad_(), leaf))


@DOMAINS
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, F32), (2, BF16), (4, F32), (4, F16), (7, BF16), (64, F32)],
)
def test_matrices_and_gradients_are_as_near_to_fp64_as_torch(n, dtype, domain, device):
    check(torch.randn(3, n, n, device=device).to(dtype), domain=domain)


@pytest.mark.sampled
@DOMAINS
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("n", [4, 20])
def test_twenty_iterations_at_any_size_of_the_logits(n, scale, domain, device):
    check(scale * torch.randn(4, n, n, device=device), domain=domain, iterations=20)


@DOMAINS
@BACKENDS
def test_logits_of_great_size_overflow_nowhere(domain, backend, device):
    signs = torch.tensor(list(itertools.product([-1e4, 1e4], repeat=4)), device=device)
    # Every pattern of two rows, beside a third row and column of zeros.
    leaf = torch.nn.functional.pad(signs.view(-1, 2, 2), (0, 1, 0, 1)).requires_grad_()
    y = sinkhorn_knopp(leaf, domain=domain, backend=backend)
    (dx,) = torch.autograd.grad(y, leaf, torch.randn_like(y))
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert ((y >= 0) & (y <= 1)).all()


@DOMAINS
@BACKENDS
@pytest.mark.parametrize("n", [4, 17])
def test_columns_sum_to_one_and_rows_as_they_converge(n, domain, backend, device):
    x = torch.randn(3, n, n, device=device)
    few = sinkhorn_knopp(x, iterations=1, eps=0.0, domain=domain, backend=backend)
    many = sinkhorn_knopp(x, iterations=100, eps=0.0, domain=domain, backend=backend)
    rounding = 16 * torch.finfo(F32).eps
    for y in (few, many):
        assert (y.sum(-2) - 1).abs().max() <= rounding
    assert (many.sum(-1) - 1).abs().max() <= rounding
    assert (few.sum(-1) - 1).abs().max() > 0.01


@pytest.mark.parametrize(("spread", "deviation"), [(1.0, 2e-6), (3.0, 0.03), (8.0, 0.08)])
def test_rows_are_as_near_to_one_as_documented(spread, deviation):
    y = sinkhorn_knopp(spread * torch.randn(4096, 4, 4), backend="reference")
    found = (y.sum(-1) - 1).abs().amax(-1).quantile(0.99)
    assert deviation / 2 < found < 2 * deviation


@pytest.mark.parametrize(
    ("spread", "half", "nine_tenths", "lost"), [(30.0, 0.04, 0.3, 8e-4), (100.0, 0.05, 1.0, 0.3)]
)
def test_great_logits_leave_what_is_documented(spread, half, nine_tenths, lost):
    """In the log domain columns that sum to one, and rows that are on their way; in the linear
    domain columns of zeros, too.
    """
    leaf = (spread * torch.randn(8192, 4, 4)).requires_grad_()
    y = sinkhorn_knopp(leaf, domain="log", backend="reference")
    (dx,) = torch.autograd.grad(y, leaf, torch.randn_like(y))
    assert dx.isfinite().all()
    y = y.detach()
    assert (y.sum(-2) - 1).abs().max() <= 16 * torch.finfo(F32).eps
    found = (y.sum(-1) - 1).abs().amax(-1)
    assert half / 2 < found.quantile(0.5) < 2 * half
    assert nine_tenths / 2 < found.quantile(0.9) < 2 * nine_tenths
    # So many that they have a few.
    linear = sinkhorn_knopp(spread * torch.randn(1 << 17, 4, 4), backend="reference")
    without = (linear.sum(-2) == 0).any(-1).float().mean()
    assert lost / 2 < without < 2 * lost


@BACKENDS
def test_eps_takes_its_part_of_the_columns(backend, device):
    """Of equal logits the first row step leaves 1/n everywhere and columns of sum 1."""
    y = sinkhorn_knopp(torch.zeros(4, 4, device=device), iterations=1, eps=0.25, backend=backend)
    torch.testing.assert_close(y, torch.full((4, 4), 0.2, device=device))


@DOMAINS
@BACKENDS
def test_what_is_added_to_a_row_changes_no_bit(domain, backend, device):
    # These numbers and their sums are exact.
    x = torch.randint(-512, 512, (3, 5, 5), device=device) / 64
    moved = x + torch.randint(-8, 8, (3, 5, 1), device=device)
    first, second = (sinkhorn_knopp(t, domain=domain, backend=backend) for t in (x, moved))
    assert torch.equal(first, second)


@BACKENDS
def test_a_column_far_below_its_rows_is_lost_in_the_linear_domain_only(backend, device):
    x = torch.randn(3, 3, device=device)
    x[:, 1] -= 500
    linear, log = (sinkhorn_knopp(x, domain=d, backend=backend) for d in ("linear", "log"))
    assert not linear[:, 1].any()
    torch.testing.assert_close(log.sum(0), torch.ones(3, device=device))


@DOMAINS
@BACKENDS
def test_an_element_of_minus_infinity_is_zero_and_passes_no_gradient(domain, backend, device):
    x = torch.randn(2, 4, 4, device=device)
    x[0, 1, 2] = -INF
    leaf = x.requires_grad_()
    y = sinkhorn_knopp(leaf, domain=domain, backend=backend)
    (dx,) = torch.autograd.grad(y, leaf, torch.randn_like(y))
    assert y.isfinite().all()
    assert y[0, 1, 2] == 0
    assert dx.isfinite().all()
    assert dx[0, 1, 2] == 0


@DOMAINS
@BACKENDS
@pytest.mark.parametrize("place", [NAN, INF, "row of -inf"], ids=str)
def test_nan_and_infinity_spoil_their_own_matrix_alone(place, domain, backend, device):
    x = torch.randn(5, 3, 3, device=device)
    x[2, 1, slice(None) if place == "row of -inf" else 2] = (
        -INF if place == "row of -inf" else place
    )
    y = sinkhorn_knopp(x, domain=domain, backend=backend)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(("domain", "eps"), [("log", EPS), ("linear", 0.0)])
@BACKENDS
def test_a_column_of_minus_infinity_without_eps_spoils_its_matrix(domain, eps, backend, device):
    x = torch.randn(2, 3, 3, device=device)
    x[0, :, 1] = -INF
    y = sinkhorn_knopp(x, eps=eps, domain=domain, backend=backend)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("shape", [(4, 4), (2, 1, 3, 5, 5), (20, 2, 2)], ids=str)
def test_every_leading_axis_counts_matrices(shape, device):
    x = torch.randn(shape, device=device)
    check(x)
    single = [kernels(matrix) for matrix in x.reshape(-1, *shape[-2:])]
    assert torch.equal(kernels(x), torch.stack(single).view(shape))


def of_a_projection(dtype, device):
    """The last columns of a wider row, read as a matrix: what a model's logits are."""
    return torch.randn(2, 3, 24, device=device).to(dtype)[..., 8:].view(2, 3, 4, 4)


def transposed(dtype, device):
    return torch.randn(3, 4, 4, device=device).to(dtype).mT


def one_matrix_for_all(dtype, device):
    return torch.randn(4, 4, device=device).to(dtype).expand(5, 4, 4)


def three_strides(dtype, device):
    return torch.randn(2, 6, 8, 4, device=device).to(dtype)[:, ::2, ::2]


LAYOUTS = [of_a_projection, transposed, one_matrix_for_all, three_strides]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides_are_read_as_they_are(layout, device):
    x = layout(BF16, device)
    check(x, [layout(BF16, device)])
    assert torch.equal(kernels(x), kernels(x.contiguous()))
    assert kernels(x).is_contiguous()


def test_logits_within_a_projection_are_not_copied():
    pytest.importorskip("triton", reason="plans are made for Triton's kernels")
    from fusewright.norm._core.launches import layouts
    from fusewright.norm.sinkhorn.launch import sinkhorn_plan

    x = of_a_projection(BF16, "cpu")
    assert sinkhorn_plan(x.shape, layouts(x, x), 20, "linear", x.device).copies == ()


@DOMAINS
def test_all_iterations_are_one_launch_each_way(domain, device, monkeypatch):
    pytest.importorskip("triton", reason="plans are made for Triton's kernels")
    from fusewright.norm._core.launches import Launch

    launch, launched = Launch.__call__, []

    def counted(self, *operands):
        launched.append(self)
        return launch(self, *operands)

    monkeypatch.setattr(Launch, "__call__", counted)
    value_and_slope(torch.randn(9, 5, 5, device=device), iterations=20, domain=domain)
    assert len(launched) == 2


@DOMAINS
def test_programs_walk_over_more_matrices_than_they_hold(domain, device, fresh_plans, monkeypatch):
    from fusewright.norm._core.backends import DeviceProperties
    from fusewright.norm.sinkhorn import launch

    few = (launch.SinkhornConfig(max_n=64, matrices=2, num_warps=1, programs_per_sm=1),)
    monkeypatch.setattr(launch, "SINKHORN_BACKWARD", few)
    monkeypatch.setattr(
        launch, "device_properties", lambda device: DeviceProperties(2, 99 << 10, 90)
    )
    check(torch.randn(21, 3, 3, device=device), domain=domain)


@DOMAINS
def test_matrices_have_the_same_bits_whatever_is_beside_them(domain, device):
    x = torch.randn(37, 4, 4, device=device)
    y, dx = value_and_slope(x, domain=domain)
    fewer = value_and_slope(x[:2], domain=domain)
    assert torch.equal(y[:2], fewer[0])
    assert torch.equal(dx[:2], fewer[1])


@BOTH_DOMAINS
def test_second_derivative_of_great_logits_is_right(op, device):
    x = 1e4 * torch.randn(3, 4, 4, device=device)
    slopes = transforms.slopes_to_differentiate
    Yardstick(slopes(op.reference), [x], [torch.randn_like(x)]).check(slopes(op.kernels))


def test_matrices_larger_than_the_kernels_take_are_served_by_the_reference(device):
    x = torch.randn(2, 70, 70)
    assert torch.equal(sinkhorn_knopp(x), sinkhorn_knopp(x, backend="reference"))
    if device == "cuda":
        with pytest.warns(RuntimeWarning, match="n up to 64, not 70"):
            y = sinkhorn_knopp(x.cuda())
        assert torch.equal(y, sinkhorn_knopp(x.cuda(), backend="reference"))


def test_gradient_is_that_of_the_iterations_not_of_their_limit(device):
    """Far from converged, where the two differ."""
    x = 6 * torch.randn(2, 4, 4, device=device)
    yardstick = Yardstick(partial(reference.sinkhorn_knopp, iterations=20, eps=EPS), [x])
    with pytest.raises(AssertionError, match="gradient of input 0"):
        yardstick.check(with_the_gradient_of_the_limit)


def with_the_gradient_of_the_limit(x):
    """The output as it is, the gradient of five times the iterations."""
    limit = kernels(x, iterations=100)
    return limit + (kernels(x, iterations=20) - limit).detach()
