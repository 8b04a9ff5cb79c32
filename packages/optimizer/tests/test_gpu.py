"""What only a GPU shows: graphs, streams, no synchronisation, narrow dtypes, sizes, memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from fusewright.optimizer import AdamW, clip_grad_norm_, grad_norm
from fusewright_testkit import Yardstick, capture, no_synchronisation
from torch.utils._pytree import tree_leaves, tree_map

from .compared import assert_equal, assert_near, everything
from .kinds import of_kinds

pytestmark = pytest.mark.gpu

SHAPES = ((3,), (), (130, 70), (64, 32, 3, 3), (0, 4), (1, 5000))
BY_KERNELS = [(name, "triton") for name in ("adamw", "learned", "velo")]
kind = of_kinds(BY_KERNELS, SHAPES)
networked = of_kinds(BY_KERNELS[1:], SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_are_as_near_to_fp64_as_the_references(training, learned, kind, dtype):
    tensors = [p.detach() for p in training.parameters(dtype, "cuda")]

    def by(backend, **options):
        def run(*tensors):
            ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
            optimizer = kind(ps, backend=backend, **options)
            for step in range(3):
                for p, x in zip(ps, tensors, strict=True):
                    # The same for every backend: a rounded parameter must not choose it.
                    p.grad = learned.gradient(x, step).to(p.dtype)
                optimizer.step(*kind.losses(step))
            return tuple(p.detach() for p in ps)

        return run

    for options in ({}, {"amsgrad": True}) if kind.name == "adamw" else ({"weight_decay": 0.01},):
        yardstick = Yardstick(by("reference", **options), tensors, [None] * len(tensors))
        yardstick.check(by("triton", **options))


class Captured(NamedTuple):
    """A step in a CUDA graph, and the gradients and losses that it reads."""

    ps: list[torch.nn.Parameter]
    optimizer: Any
    source: list[torch.Tensor]
    losses: list[torch.Tensor]
    graph: torch.cuda.CUDAGraph


def numbers_at(kind, step):
    """The numbers of a schedule."""
    found = {"lr": 0.1 / (1 + step), "weight_decay": 0.01 + 0.02 * step}
    if kind.name == "adamw":
        found["betas"] = (0.9 - 0.1 * step, 0.99 - 0.02 * step)
        found["eps"] = 10.0 ** -(8 - 2 * step)
    return found


@pytest.fixture
def captured(training, kind) -> Captured:
    ps = training.parameters(device="cuda")
    numbers = tree_map(lambda x: torch.tensor(x, device="cuda"), numbers_at(kind, 0))
    optimizer = kind(ps, max_grad_norm=1.0, **numbers)
    source = [torch.zeros_like(p) for p in ps]
    losses = [torch.ones((), device="cuda") for _ in kind.losses(0)]

    def step():
        for p, g in zip(ps, source, strict=True):
            # In memory of the graph's own, as a backward pass has it.
            p.grad = g * 1.0
        optimizer.step(*losses)

    graph, _ = capture(step)
    return Captured(ps, optimizer, source, losses, graph)


def twin_of(kind, captured):
    """Copies of the parameters, and an optimizer of them."""
    twin = [torch.nn.Parameter(p.detach().clone()) for p in captured.ps]
    other = kind(twin, max_grad_norm=1.0)
    other.load_state_dict(captured.optimizer.state_dict())
    return twin, other


def show(training, kind, captured, step):
    """Have the graph read the gradients and the loss of a step."""
    training.give_gradients(captured.source, step)
    for g in captured.source:
        g.copy_(g.grad)
    for kept, loss in zip(captured.losses, kind.losses(step), strict=True):
        kept.fill_(loss)


def test_replayed_step_is_the_eager_one_and_follows_a_schedule(training, kind, captured):
    _, other = twin_of(kind, captured)
    group, its = captured.optimizer.param_groups[0], other.param_groups[0]
    for step in range(4):
        show(training, kind, captured, step)
        for name, new in numbers_at(kind, step).items():
            for kept, x in zip(tree_leaves(group[name]), tree_leaves(new), strict=True):
                kept.fill_(x)
            its[name] = tree_map(torch.Tensor.item, group[name])
        captured.graph.replay()
        kind.go_on(training, other, [step])
        assert_equal(everything(captured.optimizer), everything(other))
    # One before the capture, which takes none, and four replays.
    assert captured.optimizer.state[captured.ps[0]]["step"].item() == 5


def test_eager_steps_and_replays_follow_one_another_in_any_order(training, kind, captured):
    twin, other = twin_of(kind, captured)
    held = [torch.zeros_like(p) for p in twin]
    for step, replayed in enumerate([False, True, False, False, True, True, False]):
        show(training, kind, captured, step)
        for h, g in zip(held, captured.source, strict=True):
            h.copy_(g)
        if replayed:
            captured.graph.replay()
        else:
            for p, h in zip(captured.ps, held, strict=True):
                p.grad = h
            captured.optimizer.step(*captured.losses)
        kind.go_on(training, other, [step])
        assert_equal(captured.ps, twin)


def test_replayed_step_is_skipped_by_the_device(captured):
    ps, optimizer, source, losses, graph = captured
    for count, place in enumerate([source[2][2, 3], *losses], 1):
        before = everything(optimizer)
        place.fill_(float("nan"))
        graph.replay()
        assert optimizer.skipped.item()
        assert_equal(everything(optimizer), before)
        place.fill_(1.0)
        start = ps[2].detach().clone()
        graph.replay()
        assert not optimizer.skipped.item()
        assert optimizer.skipped_steps.item() == count
        assert not torch.equal(ps[2], start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_waits_for_the_gpu(training, kind, dtype):
    ps = training.parameters(dtype, "cuda")
    keeps = kind.name == "adamw" and dtype == torch.bfloat16
    optimizer = kind(ps, max_grad_norm=1.0, **({"rounding": "remainder"} if keeps else {}))
    training.give_gradients(ps, 0)
    gradients = [p.grad for p in ps]
    losses = 1.0, torch.ones((), device="cuda"), torch.ones(())
    with no_synchronisation():
        # With the first, which plans, and one whose gradients lie elsewhere and are fewer.
        for step, loss in enumerate(losses):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone() if step else g
            if step == 2:
                ps[0].grad = None
            optimizer.step(*[loss] * kind.takes_loss)
        clip_grad_norm_(ps, 1.0)
        grad_norm([p.grad for p in ps[1:]])


def test_step_runs_on_the_current_stream(training, kind):
    ps, twin = (training.parameters(device="cuda") for _ in range(2))
    kind.go_on(training, kind(twin), [0])
    optimizer = kind(ps)
    for p in ps:
        p.grad = torch.zeros_like(p)
    losses = [torch.zeros((), device="cuda") for _ in kind.losses(0)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for p, q in zip(ps, twin, strict=True):
            p.grad.add_(q.grad)
        for kept, loss in zip(losses, kind.losses(0), strict=True):
            kept.add_(loss)
        optimizer.step(*losses)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(ps, twin)


@pytest.mark.parametrize("shape", [(4096, 4096), (50304, 768), (512, 512, 3, 3), (2**24,)])
def test_no_features_are_in_memory(networked, shape):
    p = torch.nn.Parameter(torch.randn(shape, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = networked([p])
    optimizer.step(*networked.losses(1))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(*networked.losses(2))
    # The plan's own tables and partial sums were there before.
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert p.isfinite().all()


def test_large_matrix_is_moved_as_by_the_reference(networked):
    x = torch.randn(2048, 1024, device="cuda")
    found = []
    for backend in ("triton", "reference"):
        p = torch.nn.Parameter(x.clone())
        optimizer = networked([p], backend=backend)
        for _ in range(2):
            p.grad = torch.sin(3 * x)
            optimizer.step(*networked.losses(2))
        found.append(p.detach())
    difference = (found[0] - found[1]).abs().max()
    # Two steps, each of a network whose sums have fewer than 2^8 terms.
    roundings = 2 * 2**8 * torch.finfo(torch.float32).eps
    assert difference < roundings * (found[1] - x).abs().max()


def test_scaler_unscales_and_skips_in_the_step(training):
    ps, twin = (training.parameters(device="cuda") for _ in range(2))
    ours, theirs = AdamW(ps, backend="triton"), torch.optim.AdamW(twin, fused=True)
    for some, optimizer in ((ps, ours), (twin, theirs)):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            loss = sum((p * (i + 1) * torch.cos(p.detach())).sum() for i, p in enumerate(some))
            scaler.scale(loss).backward()
            if step == 2:
                some[1].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        assert optimizer.state[some[0]]["step"].item() == 4
    assert_near(ps, twin)


@pytest.mark.parametrize("start", [0, 1])
def test_unaligned_parameters_move_as_aligned_ones(start):
    memory = torch.randn(5000, device="cuda")
    p, q = (torch.nn.Parameter(memory[1:4098].clone()) for _ in range(2))
    held = torch.empty(4098, device="cuda")
    p.data = held[start : start + 4097].copy_(p.data)
    for x in (p, q):
        x.grad = torch.cos(x.detach())
        AdamW([x]).step()
    assert torch.equal(p, q)


@pytest.mark.large
def test_parameter_of_more_than_31_bits_is_moved_to_its_end():
    p = torch.nn.Parameter(torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.zeros_like(p)
    p.grad[-3:] = 1.0
    p.grad[:2] = -1.0
    AdamW([p], lr=0.5, max_grad_norm=100.0).step()
    assert p[-3:].tolist() == [-0.5] * 3
    assert p[:3].tolist() == [0.5, 0.5, 0.0]
    assert p.count_nonzero().item() == 5
    assert grad_norm([p.grad]).item() == pytest.approx(5**0.5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_parameters_of_two_devices_have_one_norm(training):
    ps = training.parameters(device="cuda:0") + training.parameters(device="cuda:1")
    twin = training.parameters(device="cuda:0") + training.parameters(device="cuda:0")
    training.run(AdamW, ps, max_grad_norm=0.5)
    training.run(AdamW, twin, max_grad_norm=0.5)
    assert all(torch.equal(p, q.to(p.device)) for p, q in zip(ps, twin, strict=True))


def test_whole_training_step_in_a_graph_is_the_eager_one():
    def training_run(replayed: bool):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(40, 70), torch.nn.LayerNorm(70), torch.nn.GELU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(70, 9)).cuda()
        optimizer = AdamW(model.parameters(), lr=0.02, capturable=True, max_grad_norm=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        x = torch.randn(16, 40, device="cuda")

        def step():
            optimizer.zero_grad()
            loss = (model(x) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            if replayed:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    loss = step()
            losses = []
            for _ in range(10):
                schedule.step()
                x.copy_(torch.randn(16, 40))
                if replayed:
                    graph.replay()
                else:
                    loss = step()
                losses.append(loss.detach().clone())
        stream.synchronize()
        return torch.stack(losses), [p.detach() for p in model.parameters()]

    eager, replays = training_run(False), training_run(True)
    assert torch.equal(eager[0], replays[0])
    assert all(map(torch.equal, eager[1], replays[1]))
    assert eager[0][-1] < 0.7 * eager[0][0]
