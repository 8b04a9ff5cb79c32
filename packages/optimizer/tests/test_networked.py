"""LearnedOptimizer and VeLO: kernels beside the reference, parameters of any shape and layout."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick

from .compared import assert_near
from .kinds import of_kinds
from .published import SHAPES, spelled

# Its backend is the test's.
networked = of_kinds([("learned", "reference"), ("velo", "reference")])


def stepped(kind, learned, tensors, steps, **options):
    """Parameters after some steps."""
    ps = [torch.nn.Parameter(x.detach()) for x in tensors]
    optimizer = kind(ps, **options)
    starts = [p.detach().clone() for p in ps]
    for step in range(steps):
        for p, x in zip(ps, starts, strict=True):
            # The same for every backend: a rounded parameter must not choose it.
            p.grad = learned.gradient(x, step).to(p.dtype)
        optimizer.step(*kind.losses(step))
    return tuple(p.detach() for p in ps)


def check_kernels(kind, learned, tensors, steps, **options):
    def by(backend):
        def run(*some):
            return stepped(
                kind, learned, [x.clone() for x in some], steps, backend=backend, **options
            )

        return run

    Yardstick(by("reference"), tensors, [None] * len(tensors)).check(by("triton"))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=spelled)
@pytest.mark.usefixtures("small_learned_tiles")
def test_kernels_are_as_near_to_fp64_as_the_reference(networked, learned, shape, device):
    check_kernels(networked, learned, learned.drawn([shape], device), 2, weight_decay=0.1)


@pytest.mark.usefixtures("small_learned_tiles")
def test_kernels_of_many_tensors_are_as_near_to_fp64_as_the_reference(networked, learned, device):
    check_kernels(networked, learned, learned.drawn(learned.kinds, device), 2, max_grad_norm=3.0)


@pytest.mark.sampled
@pytest.mark.parametrize("lengths", [(3, 4, 2, 2), (3, 3, 2, 2)], ids=["longest", "equal"])
@pytest.mark.parametrize("permuted", [(1, 0), (0, 2, 1), (2, 0, 1), (0, 2, 3, 1)], ids=spelled)
@pytest.mark.usefixtures("small_learned_tiles")
def test_order_of_memory_changes_nothing(networked, learned, backend, permuted, lengths, device):
    shape = lengths[: len(permuted)]
    stored = learned.drawn([tuple(shape[axis] for axis in permuted)])[0].to(device)
    moved = stored.permute([permuted.index(axis) for axis in range(len(permuted))])
    expected = stepped(networked, learned, [moved.contiguous()], 2, weight_decay=0.1)
    found = stepped(networked, learned, [moved], 2, weight_decay=0.1, backend=backend)
    assert found[0].data_ptr() == moved.data_ptr()
    assert_near(found, expected)


def test_parameters_with_gaps_and_fp64_ones_are_moved_in_plain_torch(networked, learned, device):
    memory = torch.zeros(6, 4, device=device)
    memory[::2] = learned.drawn([(3, 4)], device)[0]
    plain = memory[::2].clone()
    (expected,) = stepped(networked, learned, [plain], 1)
    (found,) = stepped(networked, learned, [memory[::2]], 1, backend="auto")
    torch.testing.assert_close(found, expected)
    assert memory[1::2].count_nonzero() == 0
    with pytest.raises(RuntimeError, match="gaps"):
        stepped(networked, learned, [memory[::2]], 1, backend="triton")
    wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
    wide.grad = torch.ones_like(wide)
    optimizer = networked([wide], backend="auto")
    optimizer.step(*networked.losses(2))
    assert optimizer.state[wide]["momenta"].dtype == torch.float64
    assert not torch.equal(wide, torch.ones_like(wide))
