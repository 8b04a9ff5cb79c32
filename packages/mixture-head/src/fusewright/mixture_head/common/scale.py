"""What the third parameter of a component means: its log sigma, clamped, or a softplus of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from .._core.checks import check_option, checked_number

Scale = Literal["log_sigma", "softplus"]
SCALES = get_args(Scale)

LOG_SIGMA_RANGE = (-7.0, 5.0)
EPS = 1e-3
# Within these, finite parameters and targets give finite results and gradients in fp32.
WIDEST_LOG_SIGMA = 20.0
LOWEST_EPS = 1e-6


class ScaleForm(NamedTuple):
    """The same as the ops take it."""

    softplus: bool
    low: float
    high: float
    eps: float


def checked_scale(scale: str, log_sigma_range: Sequence[float], eps: float) -> ScaleForm:
    """The form of these options; each must be within its range."""
    check_option("scale", scale, SCALES)
    if not isinstance(log_sigma_range, Sequence) or len(log_sigma_range) != 2:
        raise ValueError(f"log_sigma_range must be two numbers, got {log_sigma_range!r}")
    low, high = (
        checked_number("log_sigma_range", end, -WIDEST_LOG_SIGMA, WIDEST_LOG_SIGMA)
        for end in log_sigma_range
    )
    if low > high:
        raise ValueError(f"log_sigma_range must not fall, got {(low, high)}")
    return ScaleForm(scale == "softplus", low, high, checked_number("eps", eps, LOWEST_EPS, 1e6))
