"""What only a GPU shows: graphs, streams, no synchronisation, narrow dtypes, sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import AdamW, clip_grad_norm_, grad_norm
from fusewright_testkit import Yardstick, capture, no_synchronisation

from .compared import assert_near

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_are_as_near_to_fp64_as_the_references(training, dtype, amsgrad):
    def stepped(backend):
        def run(*tensors):
            ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
            optimizer = AdamW(ps, lr=0.02, amsgrad=amsgrad, backend=backend)
            for step in range(3):
                for p, x in zip(ps, tensors, strict=True):
                    p.grad = torch.sin(x.detach() * (5 + step))
                optimizer.step()
            return tuple(p.detach() for p in ps)

        return run

    tensors = [p.detach() for p in training.parameters(dtype, "cuda")]
    Yardstick(stepped("reference"), tensors, [None] * len(tensors)).check(stepped("triton"))


@pytest.fixture
def captured(training):
    """A step in a CUDA graph: parameters, optimizer, gradients that it reads, and the graph."""
    ps = training.parameters(device="cuda")
    lr, beta1, beta2, eps, weight_decay = torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.01], device="cuda")
    optimizer = AdamW(ps, lr, (beta1, beta2), eps, weight_decay, max_grad_norm=1.0)
    source = [torch.zeros_like(p) for p in ps]

    def step():
        for p, g in zip(ps, source, strict=True):
            # In memory of the graph's own, as a backward pass has it.
            p.grad = g * 1.0
        optimizer.step()

    graph, _ = capture(step)
    return ps, optimizer, source, graph


def test_replayed_step_is_the_eager_one_and_follows_a_schedule(training, captured):
    ps, optimizer, source, graph = captured
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = AdamW(twin, lr=0.1, max_grad_norm=1.0)
    other.load_state_dict(optimizer.state_dict())
    for step in range(4):
        for some in (ps, twin):
            training.give_gradients(some, step)
        for p, g in zip(ps, source, strict=True):
            g.copy_(p.grad)
        group, numbers = optimizer.param_groups[0], other.param_groups[0]
        group["lr"].fill_(0.1 / (1 + step))
        group["betas"][0].fill_(0.9 - 0.1 * step)
        group["betas"][1].fill_(0.99 - 0.02 * step)
        group["eps"].fill_(10.0 ** -(8 - 2 * step))
        group["weight_decay"].fill_(0.02 * step)
        for name in ("lr", "eps", "weight_decay"):
            numbers[name] = group[name].item()
        numbers["betas"] = tuple(beta.item() for beta in group["betas"])
        graph.replay()
        other.step()
        assert all(map(torch.equal, ps, twin))
    # One before the capture, which takes none, and four replays.
    assert optimizer.state[ps[0]]["step"].item() == 5


def test_eager_steps_and_replays_follow_one_another_in_any_order(training, captured):
    ps, optimizer, source, graph = captured
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = AdamW(twin, lr=0.1, max_grad_norm=1.0)
    other.load_state_dict(optimizer.state_dict())
    held = [torch.zeros_like(p) for p in ps]
    for step, replayed in enumerate([False, True, False, False, True, True, False]):
        training.give_gradients(twin, step)
        for some in (source, held):
            for g, q in zip(some, twin, strict=True):
                g.copy_(q.grad)
        if replayed:
            graph.replay()
        else:
            for p, g in zip(ps, held, strict=True):
                p.grad = g
            optimizer.step()
        other.step()
        assert all(map(torch.equal, ps, twin)), step


def test_replayed_step_is_skipped_by_the_device(training, captured):
    ps, optimizer, source, graph = captured
    source[1][2, 3] = float("nan")
    before = [p.detach().clone() for p in ps]
    graph.replay()
    assert optimizer.skipped.item()
    assert all(map(torch.equal, ps, before))
    source[1][2, 3] = 1.0
    graph.replay()
    assert not optimizer.skipped.item()
    assert optimizer.skipped_steps.item() == 1
    assert not torch.equal(ps[1], before[1])


def test_no_step_waits_for_the_gpu(training):
    ps = training.parameters(device="cuda")
    kept = training.parameters(torch.bfloat16, "cuda")
    optimizers = [AdamW(ps, max_grad_norm=1.0), AdamW(kept, rounding="remainder")]
    training.give_gradients(ps, 0)
    training.give_gradients(kept, 0)
    gradients = [[p.grad for p in some] for some in (ps, kept)]
    with no_synchronisation():
        # With the first, which plans, and one whose gradients lie elsewhere and are fewer.
        for step in range(3):
            for optimizer, some, given in zip(optimizers, (ps, kept), gradients, strict=True):
                for p, g in zip(some, given, strict=True):
                    p.grad = g.clone() if step else g
                if step == 2:
                    some[0].grad = None
                optimizer.step()
        clip_grad_norm_(ps, 1.0)
        grad_norm([p.grad for p in ps[1:]])


def test_step_runs_on_the_current_stream(training):
    ps, twin = (training.parameters(device="cuda") for _ in range(2))
    training.run(AdamW, twin, 1)
    optimizer = AdamW(ps)
    training.give_gradients(ps, 0)
    wanted = [p.grad.clone() for p in ps]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for p, g in zip(ps, wanted, strict=True):
            p.grad.zero_()
            p.grad.add_(g)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, ps, twin))


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
    for p, q in zip(ps, twin, strict=True):
        assert_near([p], [q])


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
