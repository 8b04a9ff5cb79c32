"""What only a GPU shows of the learned optimizer: graphs, streams, no synchronisation, narrow
dtypes, sizes, memory.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.learned.learned_optimizer import LearnedOptimizer
from fusewright.optimizer.learned.learned_update import learned_init, learned_update
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu

SHAPES = ((3,), (), (130, 70), (64, 32, 3, 3), (0, 4), (1, 5000))


def stepped(learned, backend):
    """Parameters after three steps, as a function of what they start from."""

    def run(*tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        mlp = learned.network(device="cuda").to(torch.promote_types(ps[0].dtype, torch.float32))
        optimizer = LearnedOptimizer(ps, mlp, lr=0.1, backend=backend)
        for step in range(3):
            for p, x in zip(ps, tensors, strict=True):
                # The same for every backend: a rounded parameter must not choose it.
                p.grad = learned.gradient(x, step).to(p.dtype)
            optimizer.step()
        return tuple(p.detach() for p in ps)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_are_as_near_to_fp64_as_the_references(learned, dtype):
    tensors = [x.to(dtype) for x in learned.drawn(SHAPES, "cuda")]
    yardstick = Yardstick(stepped(learned, "reference"), tensors, [None] * len(tensors))
    yardstick.check(stepped(learned, "triton"))


def test_gradients_of_the_network_are_as_near_to_fp64_as_autograds(learned):
    p = learned.drawn([(130, 70)], "cuda")[0]
    mlp = learned.network(device="cuda")
    names = [name for name, _ in mlp.named_parameters() if "offsets" not in name]

    def by(backend):
        def op(*weights):
            dtype = weights[0].dtype
            some = [p.to(dtype)], [learned.gradient(p, 0).to(dtype)], learned_init([p.to(dtype)])
            given = dict(zip(names, weights, strict=True))
            mlp.to(dtype)
            found, _ = torch.func.functional_call(mlp, given, some, {"backend": backend})
            mlp.float()
            return found[0]

        return op

    weights = [x.detach().clone() for x in mlp.weights()]
    Yardstick(by("reference"), weights, [torch.cos(p)]).check(by("triton"))


@pytest.fixture
def captured(learned):
    """A step in a CUDA graph: parameters, optimizer, gradients that it reads, and the graph."""
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    lr = torch.tensor(0.1, device="cuda")
    mlp = learned.network(device="cuda")
    optimizer = LearnedOptimizer(ps, mlp, lr=lr, max_grad_norm=1.0)
    source = [torch.zeros_like(p) for p in ps]

    def step():
        for p, g in zip(ps, source, strict=True):
            # In memory of the graph's own, as a backward pass has it.
            p.grad = g * 1.0
        optimizer.step()

    graph, _ = capture(step)
    return ps, optimizer, source, graph


def test_replayed_step_is_the_eager_one_and_follows_a_schedule(learned, captured):
    ps, optimizer, source, graph = captured
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = LearnedOptimizer(twin, optimizer.mlp, lr=0.1, max_grad_norm=1.0)
    other.load_state_dict(optimizer.state_dict())
    for step in range(4):
        for p, q, g in zip(ps, twin, source, strict=True):
            q.grad = learned.gradient(q, step)
            g.copy_(learned.gradient(p, step))
        optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + step))
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"].item()
        graph.replay()
        other.step()
        assert all(map(torch.equal, ps, twin))
    # One before the capture, which takes none, and four replays.
    assert optimizer.state[ps[0]]["step"].item() == 5


def test_replayed_step_reads_the_networks_weights_as_they_are(learned, captured):
    ps, optimizer, source, graph = captured
    before = [p.detach().clone() for p in ps]
    for x, p in zip(source, ps, strict=True):
        x.copy_(torch.sin(p.detach()))
    with torch.no_grad():
        optimizer.mlp.last.weight.zero_()
        optimizer.mlp.last.bias.zero_()
    graph.replay()
    assert all(map(torch.equal, ps, before))


def test_replayed_step_is_skipped_by_the_device(captured):
    ps, optimizer, source, graph = captured
    source[2][2, 3] = float("nan")
    before = [p.detach().clone() for p in ps]
    graph.replay()
    assert optimizer.skipped.item()
    assert all(map(torch.equal, ps, before))
    source[2][2, 3] = 1.0
    graph.replay()
    assert not optimizer.skipped.item()
    assert optimizer.skipped_steps.item() == 1


def test_no_step_waits_for_the_gpu(learned):
    mlp = learned.network(extra=1, device="cuda")
    told = torch.ones(1, device="cuda")
    ps = [torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")]
    optimizer = LearnedOptimizer(ps, mlp, extra_features=told, max_grad_norm=1.0)
    gradients = [torch.ones_like(p) for p in ps]
    plain = [p.detach().clone() for p in ps]
    kept = learned_init(plain)
    given = [told] * len(ps)
    with no_synchronisation():
        # With the first, which plans, and one whose gradients lie elsewhere and are fewer.
        for step in range(3):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone() if step else g
            if step == 2:
                ps[0].grad = None
            optimizer.step()
        updates, _ = learned_update(mlp, plain, gradients, kept, given)
        sum(u.sum() for u in updates).backward()


def test_step_runs_on_the_current_stream(learned):
    mlp = learned.network(device="cuda")
    ps, twin = ([torch.nn.Parameter(x) for x in learned.drawn(SHAPES, "cuda")] for _ in range(2))
    wanted = [torch.sin(p.detach()) for p in ps]
    for q, g in zip(twin, wanted, strict=True):
        q.grad = g.clone()
    LearnedOptimizer(twin, mlp).step()
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer = LearnedOptimizer(ps, mlp)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for p, g in zip(ps, wanted, strict=True):
            p.grad.add_(g)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, ps, twin))


@pytest.mark.parametrize("shape", [(4096, 4096), (50304, 768), (512, 512, 3, 3), (2**24,)])
def test_no_features_are_in_memory(learned, shape):
    p = torch.nn.Parameter(torch.randn(shape, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = LearnedOptimizer([p], learned.network(device="cuda"), backend="triton")
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    # The plan's own tables and partial sums were there before.
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert p.isfinite().all()


def test_large_matrix_is_moved_as_by_the_reference(learned):
    x = torch.randn(2048, 1024, device="cuda")
    mlp = learned.network(device="cuda")
    found = []
    for backend in ("triton", "reference"):
        p = torch.nn.Parameter(x.clone())
        p.grad = torch.sin(3 * x)
        LearnedOptimizer([p], mlp, backend=backend).step()
        found.append(p.detach())
    difference = (found[0] - found[1]).abs().max()
    # Two steps, each of a network whose sums have fewer than 2^8 terms.
    roundings = 2 * 2**8 * torch.finfo(torch.float32).eps
    assert difference < roundings * (found[1] - x).abs().max()


@pytest.mark.large
def test_matrix_of_more_than_31_bits_is_moved_to_its_end():
    from fusewright.optimizer.learned.learned_update import UpdateMLP

    p = torch.nn.Parameter(torch.zeros(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.ones_like(p)
    mlp = UpdateMLP().cuda()
    with torch.no_grad():
        # One direction for all.
        mlp.last.weight.zero_()
        mlp.last.bias.copy_(torch.tensor([50.0, 0.0]))
    LearnedOptimizer([p], mlp, lr=1.0, backend="triton").step()
    assert (p == -0.5).all()
