"""Checks say what was wanted and what came; precisions follow dtype, autocast and torch's
switch.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.example._core import checks, precision

META = torch.device("meta")
X = torch.ones(2, 3)
BOUNDS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: checks.check_floating("x", 3), TypeError, "x must be a tensor, got int"),
        (lambda: checks.check_floating("x", X.int()), TypeError, "x must be float32, .* got .*int"),
        (lambda: checks.check_floating("x", X.to_sparse()), TypeError, "strided tensor, got lay"),
        (lambda: checks.check_integers("x", [1]), TypeError, "x must be a tensor, got list"),
        (lambda: checks.check_integers("x", X), TypeError, "int32 or int64, got torch.float32"),
        (lambda: checks.check_integers("x", X.bool()), TypeError, "int32 or int64, got torch.bool"),
        (
            lambda: checks.check_integers("x", BOUNDS.to_sparse()),
            TypeError,
            "x must be a strided tensor, got layout torch.sparse_coo",
        ),
        (lambda: checks.check_bool("x", [True]), TypeError, "x must be a bool tensor, got list"),
        (
            lambda: checks.check_bool("x", X),
            TypeError,
            "x must be a bool tensor, got torch.float32",
        ),
        (
            lambda: checks.check_bool("x", (X > 0).to_sparse()),
            TypeError,
            "x must be a strided tensor, got layout torch.sparse_coo",
        ),
        (
            lambda: checks.check_strided("x", torch.nested.nested_tensor([X])),
            TypeError,
            "x must be a strided tensor, got a nested one",
        ),
        (
            lambda: checks.check_device("y", X.to(META), "x", X),
            ValueError,
            "y must be on x's device cpu, got meta",
        ),
        (
            lambda: checks.check_dtype("y", X.half(), "x", X),
            ValueError,
            "y must have x's dtype torch.float32, got torch.float16",
        ),
        (
            lambda: checks.check_same("y", X.T, "x", X),
            ValueError,
            r"y must have x's shape \(2, 3\), got \(3, 2\)",
        ),
        (lambda: checks.check_same("y", X.half(), "x", X), ValueError, "x's dtype"),
        (lambda: checks.check_same("y", X.to(META), "x", X), ValueError, "x's device"),
        (
            lambda: checks.check_cu_seqlens([0, 2], X[None]),
            TypeError,
            "cu_seqlens must be a tensor, got list",
        ),
        (
            lambda: checks.check_cu_seqlens(BOUNDS.float(), X[None]),
            TypeError,
            "cu_seqlens must be int32 or int64, got torch.float32",
        ),
        *(
            (
                lambda bounds=bounds: checks.check_cu_seqlens(bounds, X[None]),
                ValueError,
                r"cu_seqlens must be \[N \+ 1\] with N at least 1, got torch.Size",
            )
            for bounds in (BOUNDS[:1], BOUNDS[None])
        ),
        (
            lambda: checks.check_cu_seqlens(BOUNDS, X),
            ValueError,
            r"with cu_seqlens q must have one row, B = 1, got \(2, 3\)",
        ),
        (
            lambda: checks.check_cu_seqlens(BOUNDS.to(META), X[None]),
            ValueError,
            "cu_seqlens must be on q's device cpu, got meta",
        ),
        (
            lambda: checks.check_mask(X, X[..., None]),
            TypeError,
            "mask must be a bool tensor, got torch.float32",
        ),
        (
            lambda: checks.check_mask(X.T > 0, X[..., None]),
            ValueError,
            r"mask must be \[B, T\] = \(2, 3\), got \(3, 2\)",
        ),
        (
            lambda: checks.check_mask(X.to(META) > 0, X[..., None]),
            ValueError,
            "mask must be on x's device cpu, got meta",
        ),
        (
            lambda: checks.check_option("mode", "c", ("a", "b")),
            ValueError,
            'mode must be "a" or "b", got \'c\'',
        ),
        (lambda: checks.checked_real("eps", "1"), TypeError, "eps must be a number, got str"),
        (lambda: checks.checked_real("eps", True), TypeError, "eps must be a number, got bool"),
        (lambda: checks.checked_number("eps", math.nan), ValueError, "a finite number, got nan"),
        (lambda: checks.checked_number("eps", -math.inf), ValueError, "a finite number, got -inf"),
        (
            lambda: checks.checked_number("eps", -1, lowest=0.0),
            ValueError,
            "eps must be a finite number >= 0, got -1",
        ),
        (
            lambda: checks.checked_number("eps", 3, lowest=0.0, highest=2.0),
            ValueError,
            "eps must be from 0 to 2, got 3",
        ),
        (lambda: checks.checked_count("n", 2.0), TypeError, "n must be a whole number, got float"),
        (lambda: checks.checked_count("n", True), TypeError, "n must be a whole number, got bool"),
        (lambda: checks.checked_count("n", 0), ValueError, "n must be at least 1, got 0"),
    ],
)
def test_what_was_wanted_and_what_came(check, error, message):
    with pytest.raises(error, match=message):
        check()


def test_good_arguments_pass():
    checks.check_same("y", X, "x", X)
    checks.check_option("mode", "a", ("a", "b"))
    for dtype in (torch.int32, torch.int64):
        checks.check_cu_seqlens(BOUNDS.to(dtype), X[None])
    checks.check_mask(X > 0, X[..., None])
    assert checks.checked_number("eps", 1, lowest=1.0, highest=1.0) == 1.0
    assert type(checks.checked_number("eps", 1)) is float
    assert math.isnan(checks.checked_real("eps", math.nan))
    assert checks.checked_count("n", 0, lowest=0) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_fp32_or_fp64(dtype):
    x = X.to(dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert precision.wide(x).dtype == precision.wide_dtype(x) == wanted
    assert (precision.wide(x) is x) == (dtype == wanted)


def test_autocast_casts_as_a_matrix_product_does():
    double = X.double()
    assert precision.autocast(X, double) == (X, double)
    with torch.autocast("cpu", torch.bfloat16):
        assert [x.dtype for x in precision.autocast(X, X.half())] == [torch.bfloat16] * 2
        assert precision.autocast(double)[0] is double
        assert precision.autocasts("cpu")
        assert not precision.autocasts("meta")
        with precision.without_autocast(X.device):
            assert (X @ X.T).dtype == torch.float32
        with precision.without_autocast(META):
            pass


def test_fp32_products_follow_torchs_switch(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert precision.input_precision(torch.float32) == "tf32"
        assert precision.input_precision(torch.bfloat16) == "ieee"
        matmul.fp32_precision = "ieee"
        assert precision.input_precision(torch.float32) == "ieee"
    finally:
        matmul.fp32_precision = before


def test_widths_are_rounded_up():
    assert [precision.round_up(n, 32) for n in (1, 32, 33)] == [32, 32, 64]
    assert [precision.power_of_2(n) for n in (1, 2, 3, 1000)] == [1, 2, 4, 1024]
