"""A training loop under torch.compile: its graphs are compiled, the steps between them run as they
are.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import AdamW

from .compared import assert_equal, everything
from .kinds import of_kinds
from .nested import model, optimizer_of

STEPS = 4
# Of each class that has a step of its own.
kind = of_kinds([(name, "reference") for name in ("adamw", "muon", "learned", "velo")])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(ps, optimizer, losses, compiled):
    """Numbers after steps along the gradients of a loss, and the loss where a step takes it."""

    def train(scale):
        optimizer.zero_grad()
        loss = sum((p * (3.0 * p + scale).sin()).sum() for p in ps)
        loss.backward()
        return optimizer.step(*(loss,) * losses)

    # What dynamo traces, without what a compiler of graphs rounds otherwise.
    call = torch.compile(train, backend="eager") if compiled else train
    for step in range(STEPS):
        call(torch.tensor(1.0 + step))
    return everything(optimizer)


def test_compiled_loop_has_the_bits_of_an_eager_one(training, kind):
    found = []
    for compiled in (False, True):
        ps = training.parameters()
        found.append(trained(ps, kind(ps), kind.takes_loss, compiled))
    assert_equal(*found)


@pytest.mark.parametrize(("update", "meta"), [("adamw", "hypergradient"), ("continuum", "proxy")])
def test_compiled_loop_trains_the_controller_as_an_eager_one(update, meta):
    found = []
    for compiled in (False, True):
        some = model(torch.float32)
        options = dict(mode="simple", meta_update_freq=2, meta_lr=0.05, frequencies=(1, 2))
        optimizer = optimizer_of(some, update=update, meta=meta, **options)
        before = [x.detach().clone() for x in optimizer.controller.parameters()]
        numbers = trained(list(some.parameters()), optimizer, True, compiled)
        weights = [x.detach().clone() for x in optimizer.controller.parameters()]
        assert not any(map(torch.equal, before, weights))
        found.append([*numbers, *weights, optimizer.get_lr_multipliers()["core"]])
    assert_equal(*found)


def test_compiled_meta_update_is_the_eager_one():
    found = []
    for compiled in (False, True):
        some = model(torch.float32)
        optimizer = optimizer_of(some, meta_lr=0.05)
        ps = list(some.parameters())

        def learn(scale, optimizer=optimizer, ps=ps):
            return optimizer.meta_update(sum((p * scale).sin().sum() for p in ps))

        trained(ps, optimizer, True, False)
        call = torch.compile(learn, backend="eager") if compiled else learn
        found.append([*call(torch.tensor(2.0)).values(), *optimizer.controller.parameters()])
    assert_equal(*found)


def test_hooks_of_a_compiled_step_run_once():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer, seen = AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert seen == ["before", "after"]
    assert optimizer.state[p]["step"].item() == 1
