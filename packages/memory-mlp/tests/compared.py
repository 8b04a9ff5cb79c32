"""What tests of several operations compare."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def assert_same_but_for_rounding(found: Iterable, truth: Iterable) -> None:
    """Two orders of the same fp64 sums, the longest of fewer than 2^10 terms: apart by no more than
    one rounding per term of the largest number of all, as single ones may cancel. Counts and marks
    are equal.
    """
    found, truth = list(found), list(truth)
    sizes = [x.detach().abs() for x in truth if x.is_floating_point()]
    finite = [x[x.isfinite()] for x in sizes]
    largest = max((x.max().item() for x in finite if x.numel()), default=0.0)
    bound = 2**10 * torch.finfo(torch.float64).eps * largest
    for one, other in zip(found, truth, strict=True):
        atol = bound if other.is_floating_point() else 0.0
        torch.testing.assert_close(one, other, rtol=0.0, atol=atol, equal_nan=True)
