"""What only a GPU shows of VeLO: graphs, streams, no synchronisation, narrow dtypes, sizes,
memory.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.velo.velo import VeLO
from fusewright.optimizer.velo.velo_networks import VeLONetworks
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu

SHAPES = ((3,), (), (130, 70), (64, 32, 3, 3), (0, 4), (1, 5000))


def stepped(learned, backend):
    """Parameters after four steps, as a function of what they start from."""

    def run(*tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        networks = learned.velo_networks("cuda")
        networks.to(torch.promote_types(ps[0].dtype, torch.float32))
        optimizer = VeLO(ps, networks, 20, lr=0.1, weight_decay=0.01, backend=backend)
        for step in range(4):
            for p, x in zip(ps, tensors, strict=True):
                # The same for every backend: a rounded parameter must not choose it.
                p.grad = learned.gradient(x, step).to(p.dtype)
            optimizer.step(3.0 - step)
        return tuple(p.detach() for p in ps)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_are_as_near_to_fp64_as_the_references(learned, dtype):
    tensors = [x.to(dtype) for x in learned.drawn(SHAPES, "cuda")]
    yardstick = Yardstick(stepped(learned, "reference"), tensors, [None] * len(tensors))
    yardstick.check(stepped(learned, "triton"))


@pytest.fixture
def captured(learned):
    """A step in a CUDA graph: parameters, optimizer, gradients and loss that it reads, and the
    graph.
    """
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    lr = torch.tensor(0.1, device="cuda")
    networks = learned.velo_networks("cuda")
    optimizer = VeLO(ps, networks, 20, lr=lr, weight_decay=0.01, max_grad_norm=1.0)
    source = [torch.zeros_like(p) for p in ps]
    loss = torch.ones((), device="cuda")

    def step():
        for p, g in zip(ps, source, strict=True):
            # In memory of the graph's own, as a backward pass has it.
            p.grad = g * 1.0
        optimizer.step(loss)

    graph, _ = capture(step)
    return ps, optimizer, source, loss, graph


def test_replayed_step_is_the_eager_one_and_follows_losses_and_a_schedule(learned, captured):
    ps, optimizer, source, loss, graph = captured
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = VeLO(twin, optimizer.networks, 20, lr=0.1, weight_decay=0.01, max_grad_norm=1.0)
    other.load_state_dict(optimizer.state_dict())
    for step in range(5):
        for p, q, g in zip(ps, twin, source, strict=True):
            q.grad = learned.gradient(q, step)
            g.copy_(learned.gradient(p, step))
        loss.fill_(4.0 / 2**step)
        optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + step))
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"].item()
        graph.replay()
        other.step(4.0 / 2**step)
        assert all(map(torch.equal, ps, twin))
    assert all(map(torch.equal, optimizer.losses, other.losses))
    # One before the capture, which takes none, and five replays.
    assert optimizer.losses.step.item() == 6


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_replayed_step_is_skipped_by_the_device(captured, bad):
    ps, optimizer, source, loss, graph = captured
    states = [x for state in optimizer.state.values() for x in state.values()]
    before = [x.detach().clone() for x in (*ps, *states, *optimizer.losses)]
    place = loss if bad == "loss" else source[2][2, 3]
    place.fill_(float("nan"))
    graph.replay()
    assert optimizer.skipped.item()
    assert all(map(torch.equal, (*ps, *states, *optimizer.losses), before))
    place.fill_(1.0)
    graph.replay()
    assert not optimizer.skipped.item()
    assert optimizer.skipped_steps.item() == 1


def test_no_step_waits_for_the_gpu(learned):
    networks = learned.velo_networks("cuda")
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    optimizer = VeLO(ps, networks, 20, weight_decay=0.01, max_grad_norm=1.0)
    gradients = [torch.ones_like(p) for p in ps]
    losses = (1.0, torch.ones((), device="cuda"), torch.ones(()))
    with no_synchronisation():
        # With the first, which plans, and one whose gradients lie elsewhere and are fewer.
        for step, loss in enumerate(losses):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone() if step else g
            if step == 2:
                ps[0].grad = None
            optimizer.step(loss)


def test_step_runs_on_the_current_stream(learned):
    networks = learned.velo_networks("cuda")
    ps, twin = ([torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")] for _ in range(2))
    wanted = [torch.sin(p.detach()) for p in ps]
    for q, g in zip(twin, wanted, strict=True):
        q.grad = g.clone()
    VeLO(twin, networks, 20).step(2.0)
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer = VeLO(ps, networks, 20)
    loss = torch.zeros((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for p, g in zip(ps, wanted, strict=True):
            p.grad.add_(g)
        loss.add_(2.0)
        optimizer.step(loss)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, ps, twin))


@pytest.mark.parametrize("shape", [(4096, 4096), (50304, 768), (512, 512, 3, 3), (2**24,)])
def test_no_features_are_in_memory(shape):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = VeLO([p], VeLONetworks().cuda(), 100, backend="triton")
    optimizer.step(2.0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(1.0)
    # The plan's own tables and partial sums were there before.
    assert torch.cuda.max_memory_allocated() - before < 2 << 20
    assert p.isfinite().all()


def test_large_matrix_is_moved_as_by_the_reference(learned):
    x = torch.randn(2048, 1024, device="cuda")
    networks = learned.velo_networks("cuda")
    found = []
    for backend in ("triton", "reference"):
        p = torch.nn.Parameter(x.clone())
        optimizer = VeLO([p], networks, 20, backend=backend)
        for _ in range(2):
            p.grad = torch.sin(3 * x)
            optimizer.step(1.0)
        found.append(p.detach())
    difference = (found[0] - found[1]).abs().max()
    # Two steps, each of a network whose sums have fewer than 2^8 terms.
    roundings = 2 * 2**8 * torch.finfo(torch.float32).eps
    assert difference < roundings * (found[1] - x).abs().max()


@pytest.mark.large
def test_matrix_of_more_than_31_bits_is_moved_to_its_end(learned):
    p = torch.nn.Parameter(torch.ones(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.ones_like(p)
    networks = learned.velo_networks("cuda")
    VeLO([p], networks, 20, lr=1.0, backend="triton").step(1.0)
    # Alike wherever they are, since everything that is seen of them is.
    assert (p == p[0, 0]).all()
    assert p[0, 0] != 1.0
