"""The statistics and features of the learned optimizers as arXiv 2203.11860, 2211.09760 and their
published definitions describe them, in NumPy and fp64: with the decay along a last axis, features
too. With the steps that tests make of them they were run beside PyLO's own ``AdafacLO_naive`` and
``VeLO_naive``, and were the same but for roundings for all of these shapes, where NumPy sorts axes
in a stable order, but the one without axes, which PyLO does not serve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Where the two longest axes are of one length: matrices, others, and the first two of four.
TIES = ((6, 6), (3, 5, 5), (5, 2, 5), (2, 2, 3, 3), (4, 4, 3, 3))
# Without axes, with one, the longest axis first, last, in the middle, equal ones, and none at all.
SHAPES = ((), (5,), (1, 1), (7, 4), (3, 9), (2, 5, 3), (4, 2, 3, 3), *TIES, (0, 4))
STARTS = [0.9, 0.99, 0.999], [0.999], [0.9, 0.99, 0.999]


def spelled(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def factored_axes(shape: tuple[int, ...], velo: bool) -> tuple[int, int]:
    """The second longest axis and the longest. Of equals the later counts as longer; to VeLO, whose
    public weights were trained on matrices [inputs, outputs], the earlier of the two longest, but
    for the first two of four axes.
    """
    second, longest = (int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
    if velo and shape[second] == shape[longest] and (len(shape), second, longest) != (4, 0, 1):
        second, longest = longest, second
    return second, longest


class Published:
    """Of one tensor.

    Args:
        decays: of the momenta, of the square, and of rows and columns.
        velo: whether features are VeLO's.
    """

    def __init__(self, decays: Sequence[np.ndarray], velo: bool) -> None:
        self.decays, self.velo = decays, velo
        self.m = self.v = self.r = self.c = np.zeros(1)

    def features(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """After one more gradient."""
        x, g = x[..., None], g[..., None]
        b_m, b_v, b_f = self.decays
        self.m = b_m * self.m + (1 - b_m) * g
        self.v = b_v * self.v + (1 - b_v) * g**2
        g2 = g**2 + 1e-30
        s = (self.v + 1e-6) ** -0.5
        if g.ndim < 3:
            self.r = b_f * self.r + (1 - b_f) * g2
            r = c = self.r
            of_g = np.maximum(r + 1e-9, 1e-9) ** -0.5
            of_m = (r + (0.0 if self.velo else 1e-6)) ** -0.5
        else:
            second, longest = factored_axes(g.shape[:-1], self.velo)
            keep = dict(keepdims=True)
            self.r = b_f * self.r + (1 - b_f) * g2.mean(longest, **keep)
            self.c = b_f * self.c + (1 - b_f) * g2.mean(second, **keep)
            r, c = self.r + 0.0 * g2, self.c + 0.0 * g2
            scaled = self.r / (self.r.mean(second, **keep) + 1e-9)
            of_g = np.maximum(scaled, 1e-9) ** -0.5 * np.maximum(self.c, 1e-9) ** -0.5
            of_m = of_g
        clipped, rescaled = ([np.clip(g, -0.1, 0.1)], [g * s]) if self.velo else ([], [])
        found = [
            *(g, *clipped, x, self.m, self.v, self.m * s, s, g * of_g, *rescaled),
            *(r, c, (r + 1e-8) ** -0.5, (c + 1e-8) ** -0.5, self.m * of_m),
        ]
        return np.concatenate(found, -1)

    def normalised(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        f = self.features(x, g)
        return f / np.sqrt((f**2).reshape(-1, f.shape[-1]).mean(0) + 1e-5)
