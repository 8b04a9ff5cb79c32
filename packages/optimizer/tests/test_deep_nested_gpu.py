"""DeepNestedOptimizer on a GPU: nothing waits, replays have the bits of eager steps, and a scaler
drives the step.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer
from fusewright_testkit import capture, no_synchronisation

from .compared import assert_equal
from .nested import give, model, optimizer_of


@pytest.fixture
def small(request):
    """A model on the GPU and its optimizer, with training in every second step."""
    some = model(torch.float32, "cuda")
    options = dict(mode="simple", meta_update_freq=2, frequencies=(1, 2), meta=request.param[1])
    return some, optimizer_of(some, update=request.param[0], **options)


KINDS = [(update, meta) for update in ("adamw", "continuum") for meta in ("hypergradient", "proxy")]


@pytest.mark.gpu
@pytest.mark.parametrize("small", KINDS, indirect=True, ids="-".join)
def test_no_step_waits_for_the_gpu(small):
    some, optimizer = small
    give(some, 1)
    loss = torch.tensor(1.0, device="cuda")
    with no_synchronisation():
        for step in range(12):
            optimizer.step(loss if step % 2 else 0.5 / (1 + step))
        optimizer.get_lr_multipliers()
        optimizer.get_effective_lrs()
        optimizer.get_momentum_stats()
        if optimizer.options.meta == "hypergradient":
            optimizer.meta_update(lambda: sum(p.square().sum() for p in some.parameters()))
        else:
            optimizer.meta_update()
    assert all(p.isfinite().all().item() for p in some.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("update", ["adamw", "continuum"])
def test_replayed_step_is_the_eager_one(update):
    options = dict(update=update, frequencies=(1, 1), capturable=True)
    some, twin = (model(torch.float32, "cuda") for _ in range(2))
    ours, theirs = (optimizer_of(x, **options) for x in (some, twin))
    source = [torch.zeros_like(p) for p in some.parameters()]
    loss = torch.zeros((), device="cuda")

    def step():
        for p, g in zip(some.parameters(), source, strict=True):
            # In memory of the graph's own, as a backward pass has it.
            p.grad = g * 1.0
        return ours.step(loss)

    def show(number):
        value = give(twin, number)
        for g, q in zip(source, twin.parameters(), strict=True):
            g.copy_(q.grad)
        loss.fill_(value)
        return torch.tensor(value, device="cuda")

    stream = torch.cuda.Stream()
    for number in range(1, 6):
        value = show(number)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        theirs.step(value)
    at = ours.global_step
    graph, _ = capture(step, warm_up=False)
    # Of the element network every fifth step trains: none of these does.
    assert at % 5 == 0
    for number in range(6, 10):
        value = show(number)
        rate = 1e-2 / number
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"].fill_(rate)
        graph.replay()
        out = theirs.step(value)
        assert torch.equal(ours._rates.multipliers, out["lr_multipliers"])
        assert torch.equal(ours.skipped, out["skipped"])
        assert_equal(some.parameters(), twin.parameters())


@pytest.mark.gpu
def test_scaler_drives_the_step():
    some = model(torch.float32, "cuda")
    optimizer = DeepNestedOptimizer(some, 1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        loss = sum((p * torch.cos(p.detach())).sum() for p in some.parameters())
        scaler.scale(loss).backward()
        if step == 2:
            some.norm.weight.grad[0] = float("inf")
        optimizer.set_loss(loss)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.state[some.norm.weight]["step"].item() == 4
    assert optimizer.skipped_steps.item() == 1
