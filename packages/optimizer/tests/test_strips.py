"""LearnedOptimizer's matrices in strips: which they are, and that their steps are the others'."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.common.statistics.launch import APPLY_STRIP
from fusewright.optimizer.common.statistics.layout import Layout, Strips
from fusewright.optimizer.learned.learned_optimizer import LearnedOptimizer
from fusewright_testkit import Yardstick

from .published import spelled

CPU = torch.device("cpu")
SERVED = (3, 128), (3, 103), (1000, 384), (300, 128, 1)
OTHERS = (3, 102), (1000, 300), (0, 128), (4096,), (2, 300, 128)


@pytest.mark.parametrize("shape", [*SERVED, *OTHERS], ids=spelled)
def test_strips_are_of_matrices_whose_rows_are_contiguous_and_fill_them(shape):
    layout = Layout(torch.empty(shape, device="meta"))
    assert APPLY_STRIP.serves(layout) is (shape in SERVED)


def test_programs_take_every_row_of_every_strip_once():
    layouts = [Layout(torch.empty(shape, device="meta")) for shape in ((5, 30), (7,), (9, 16))]
    strip = APPLY_STRIP._replace(size=16, shortest=2, programs=3)
    strips = Strips([0, 2], layouts, strip, CPU)
    # Of two strips 10 rows in three programs are 4 rows each, at least.
    assert strips.table.view(-1, 5).tolist() == [[0, 5, 30, 0, 4], [2, 9, 16, 35, 3]]
    assert strips.counts == [4, 3]
    assert strips.lines == 5 + 30 + 9 + 16


def moved(learned, tensors, backend, transposed):
    """Parameters after two steps of different gradients."""
    stored = [x.clone() for x in tensors]
    ps = [torch.nn.Parameter(x.t() if transposed else x) for x in stored]
    optimizer = LearnedOptimizer(ps, learned.network(), lr=0.1, weight_decay=0.1, backend=backend)
    for step in range(2):
        for p, x in zip(ps, tensors, strict=True):
            g = learned.gradient(x, step)
            p.grad = g.t() if transposed else g
        optimizer.step()
    return tuple(stored)


@pytest.mark.sampled
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (3, 30), (40, 16), (16, 40), (5, 13)], ids=spelled)
@pytest.mark.usefixtures("small_learned_tiles")
def test_matrix_in_strips_is_moved_as_near_to_fp64_as_by_the_reference(learned, shape, transposed):
    """Beside a vector and a matrix that is in none, so that all have their own places in tables."""
    tensors = learned.drawn([(5,), shape, (3, 4), shape])

    def by(backend):
        return lambda *some: moved(learned, some, backend, transposed)

    Yardstick(by("reference"), tensors, [None] * len(tensors)).check(by("triton"))
