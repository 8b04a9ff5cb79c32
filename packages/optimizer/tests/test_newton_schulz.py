"""newton_schulz: polynomials of singular values, whatever the shape, size and company."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.matrix.newton_schulz import CUBIC, QUINTIC, newton_schulz
from fusewright_testkit import Yardstick

SHAPES = [(6, 6), (5, 12), (12, 5), (1, 7), (7, 1), (2, 3, 8, 4)]


def drawn(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def by_singular_values(x, triples):
    """The definition: the same polynomials of each singular value."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s.unsqueeze(-2) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", [QUINTIC, CUBIC], ids=["quintic", "cubic"])
def test_singular_values_take_the_polynomial(shape, coefficients):
    x = drawn(shape, torch.float64)
    found = newton_schulz(x, 4, coefficients)
    torch.testing.assert_close(found, by_singular_values(x, [coefficients] * 4))


def test_each_step_may_have_coefficients_of_its_own():
    x, triples = drawn((5, 8), torch.float64), [QUINTIC, (2.0, -1.5, 0.5), CUBIC]
    torch.testing.assert_close(newton_schulz(x, 3, triples), by_singular_values(x, triples))


def test_cubic_converges_to_the_orthogonal_factor():
    x = drawn((3, 9, 4), torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(newton_schulz(x, 40, CUBIC), u @ v)


def test_five_quintic_steps_leave_singular_values_about_one():
    found = torch.linalg.svdvals(newton_schulz(drawn((4, 24, 40))))
    assert found.min() > 0.65
    assert found.max() < 1.25


def in_products(x):
    """The formula, one matrix after the other."""
    found = []
    for one in x:
        y = one / one.square().sum().sqrt()
        y = y.T if y.shape[0] > y.shape[1] else y
        for _ in range(5):
            gram = y @ y.T
            y = QUINTIC[0] * y + (QUINTIC[1] * gram + QUINTIC[2] * gram @ gram) @ y
        found.append(y.T if one.shape[0] > one.shape[1] else y)
    return torch.stack(found)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(3, 20, 20), (2, 33, 12), (2, 12, 33)])
def test_errs_about_as_the_formula_does(shape, dtype, device):
    x = drawn(shape, dtype).to(device)
    grads = [None] if dtype == torch.bfloat16 else None
    Yardstick(in_products, [x], grads).check(newton_schulz)


def test_gradients_are_the_formulas():
    x = drawn((2, 3, 4), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, 2), x)


def test_products_in_bf16_err_as_the_formula_with_such_products():
    x = drawn((4, 24, 32))
    yardstick = Yardstick(in_products, [x], [None], torch.bfloat16)
    yardstick.check(lambda x: newton_schulz(x, dtype=torch.bfloat16))
    assert not torch.equal(newton_schulz(x, dtype=torch.bfloat16), newton_schulz(x))


@pytest.mark.parametrize("power", [-120, -20, 20, 120])
def test_size_does_not_matter(power):
    x = drawn((2, 6, 9))
    assert torch.equal(newton_schulz(x * 2.0**power), newton_schulz(x))


def test_zeros_give_zeros_with_gradients():
    x = torch.zeros(2, 3, 4, requires_grad=True)
    y = newton_schulz(x)
    assert y.eq(0.0).all()
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_matrix(strange):
    x = drawn((4, 6, 9))
    clean = newton_schulz(x)
    x[1, 2, 3] = strange
    found = newton_schulz(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 4)])
def test_nothing_gives_nothing(shape):
    assert newton_schulz(torch.zeros(shape)).shape == shape


def test_autocast_does_not_change_the_precision():
    x = drawn((2, 6, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = newton_schulz(x)
    assert torch.equal(found, newton_schulz(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: newton_schulz(x.long()), TypeError, "floating, got torch.int64"),
        (lambda x: newton_schulz(x[0]), ValueError, r"rows, columns\], got \[3\]"),
        (lambda x: newton_schulz(x, 0), ValueError, "at least 1, got 0"),
        (lambda x: newton_schulz(x, 2.0), TypeError, "steps must be a whole number, got float"),
        (lambda x: newton_schulz(x, 5, (1.0, 2.0)), ValueError, "three numbers"),
        (lambda x: newton_schulz(x, 5, [CUBIC] * 4), ValueError, "each of 5 steps"),
        (lambda x: newton_schulz(x, dtype=torch.int32), TypeError, "dtype must be floating"),
    ],
    ids=["integers", "vector", "steps", "fraction", "pair", "triples", "dtype"],
)
def test_bad_input_is_refused_by_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 3))
