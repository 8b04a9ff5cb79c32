"""Newton-Schulz by the kernel for Hopper, whose symmetric products are computed by halves."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import Muon
from fusewright.optimizer.matrix.launch_hopper import chain_on_hopper, serves
from fusewright.optimizer.matrix.newton_schulz import CUBIC, QUINTIC, chain
from fusewright_testkit import Yardstick, no_synchronisation

pytestmark = pytest.mark.gpu

# Fewer and more tiles than programs; a last tile that is half empty; both sides the shorter one.
SHAPES = [(3, 384, 640), (2, 640, 384), (2, 512, 512), (9, 1152, 2048), (5, 2112, 1024)]
CHAINS = {"quintic": [QUINTIC] * 5, "cubic": [QUINTIC, CUBIC, CUBIC]}


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiles for Hopper alone")


def drawn(shape, dtype=torch.bfloat16):
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    return (x / x.square().sum((-2, -1), keepdim=True).sqrt()).to(dtype)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errs_about_as_the_librarys_products_do(shape, name, dtype):
    assert serves(shape, dtype, torch.device("cuda", 0))
    yardstick = Yardstick(lambda x: chain(x, CHAINS[name]), [drawn(shape, dtype)], [None])
    yardstick.check(lambda x: chain_on_hopper(x.clone(), CHAINS[name]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_inputs_give_the_same_bits_and_no_matrix_sees_another(shape):
    x = drawn(shape)
    first = chain_on_hopper(x.clone(), CHAINS["quintic"])
    assert torch.equal(first, chain_on_hopper(x.clone(), CHAINS["quintic"]))
    x[0] = float("nan")
    again = chain_on_hopper(x.clone(), CHAINS["quintic"])
    assert again[0].isnan().all()
    assert torch.equal(again[1:], first[1:])


def test_sides_that_are_no_whole_tiles_or_short_are_left_to_the_library():
    device = torch.device("cuda", 0)
    for shape in ((1, 448, 1024), (1, 1024, 1000), (1, 256, 1024)):
        assert not serves(shape, torch.bfloat16, device)
    assert not serves((1, 512, 512), torch.float32, device)


def moved_by(backend):
    """Parameters after two steps, with Newton-Schulz in fp64 where these are."""

    def run(*tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        options = {"ns_dtype": None} if ps[0].dtype == torch.float64 else {}
        optimizer = Muon(ps, lr=0.1, backend=backend, **options)
        for step in range(2):
            for p, x in zip(ps, tensors, strict=True):
                p.grad = torch.cos(x.detach() * (step + 1))
            optimizer.step()
        return tuple(p.detach() for p in ps)

    return run


def test_a_step_errs_about_as_the_references_does():
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = [(384, 640)] * 3 + [(1024, 512)] * 2
    tensors = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    Yardstick(moved_by("reference"), tensors, [None] * 5).check(moved_by("triton"))


def test_a_step_waits_for_nothing():
    p = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = Muon([p], backend="triton")
    optimizer.step()
    with no_synchronisation():
        optimizer.step()


def test_first_step_takes_the_state_and_one_stacks_products():
    ps = [torch.nn.Parameter(torch.randn(1024, 2048, device="cuda")) for _ in range(24)]
    for p in ps:
        p.grad = torch.ones_like(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Muon(ps, backend="triton").step()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 24 * 1024 * 2048 * 4 + (161 << 20)
