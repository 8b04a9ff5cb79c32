"""VeLO as an optimizer: losses, skips, state, and what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from fusewright.optimizer.velo.velo import VeLO
from fusewright.optimizer.velo.velo_networks import VeLONetworks


def trained(learned, backend, device="cpu", steps=2, first=None, ps=None, **options):
    """Parameters and their optimizer after some steps."""
    networks = learned.velo_networks(device)
    if ps is None:
        ps = [torch.nn.Parameter(x) for x in learned.drawn(((5,), (2, 5, 3), (3, 4)), device)]
    optimizer = VeLO(ps, networks, 20, lr=0.2, backend=backend, **options)
    take(learned, optimizer, range(steps))
    return ps, optimizer


def take(learned, optimizer, steps) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = learned.gradient(p, step)
        optimizer.step(3.0 - step)


def everything(ps, optimizer) -> list[torch.Tensor]:
    """All that a step may change."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    return [x.detach().clone() for x in (*ps, *states, *optimizer.losses)]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["number", "tensor of one", "closure"])
def test_losses_of_every_kind_are_the_same_loss(learned, backend, device, kind):
    ps, optimizer = trained(learned, backend, device)
    twin, other = trained(learned, backend, device)
    for p, q in zip(ps, twin, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)

    def closure():
        assert torch.is_grad_enabled()
        for q in twin:
            q.grad = torch.ones_like(q)
        return torch.tensor(1.5, device=device, requires_grad=True)

    kinds = {
        "number": 1.5,
        "tensor of one": torch.tensor([1.5], dtype=torch.bfloat16, device=device),
        "closure": closure,
    }
    optimizer.step(torch.tensor(1.5, device=device))
    assert torch.as_tensor(other.step(kinds[kind])).item() == 1.5
    assert all(map(torch.equal, everything(ps, optimizer), everything(twin, other)))


def test_steps_depend_on_the_loss(learned, backend, device):
    found = []
    for loss in (1.0, 5.0):
        ps, optimizer = trained(learned, backend, device)
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step(loss)
        found.append(ps[2].detach())
    assert not torch.equal(*found)


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["loss nan", "loss inf", "gradient nan", "scaler"])
def test_skipped_step_changes_nothing(learned, backend, device, what):
    ps, optimizer = trained(learned, backend, device, skip_nonfinite=True, weight_decay=0.1)
    assert not optimizer.skipped
    before = everything(ps, optimizer)
    for p in ps:
        p.grad = torch.ones_like(p)
    loss = {"loss nan": math.nan, "loss inf": math.inf}.get(what, 1.0)
    if what == "gradient nan":
        ps[2].grad[0, 1] = math.nan
    if what == "scaler":
        optimizer.found_inf = torch.ones(1, device=device)
    optimizer.step(torch.tensor(loss, device=device))
    assert optimizer.skipped
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, before, everything(ps, optimizer)))
    if what == "scaler":
        del optimizer.found_inf
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step(1.0)
    assert not optimizer.skipped
    assert all(p.isfinite().all() for p in ps)


def test_first_step_may_be_a_skipped_one(learned, backend, device):
    """Nothing but what was there before is read then."""
    found = []
    for skips in (False, True):
        ps, optimizer = trained(learned, backend, device, steps=0, skip_nonfinite=True)
        for p in ps:
            p.grad = torch.ones_like(p)
        if skips:
            optimizer.step(math.nan)
        take(learned, optimizer, range(3))
        found.append(everything(ps, optimizer))
    assert all(map(torch.equal, *found))


def test_nan_loss_spreads_where_steps_are_not_skipped(learned, backend, device):
    ps, optimizer = trained(learned, backend, device)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step(math.nan)
    assert not optimizer.skipped
    assert ps[2].isnan().all()


def test_parameters_without_gradients_or_elements_take_no_part(learned, backend, device):
    xs = learned.drawn([(3, 4), (5,), (0, 4)], device)
    found = []
    for count in (1, 3):
        ps = [torch.nn.Parameter(x.clone()) for x in xs[:count]]
        optimizer = VeLO(ps, learned.velo_networks(device), 20, backend=backend)
        optimizer.step(1.0)
        assert optimizer.losses.step == 0
        for step in range(3):
            ps[0].grad = learned.gradient(ps[0], step)
            if count == 3:
                ps[2].grad = torch.ones_like(ps[2])
            optimizer.step(2.0 - step)
        found.append(ps[0].detach())
    assert torch.equal(*found)
    assert list(optimizer.state) == [ps[0]]


def test_rates_follow_a_schedule(learned, backend, device):
    ps, optimizer = trained(learned, backend, device, steps=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in ps]
    take(learned, optimizer, range(1, 2))
    schedule.step()
    assert all(map(torch.equal, ps, before))


def test_an_untrained_network_is_no_hindrance(backend, device):
    """As it is drawn, with default sizes."""
    torch.manual_seed(0)
    networks = VeLONetworks().to(device)
    p = torch.nn.Parameter(torch.randn(6, 4, device=device))
    optimizer = VeLO([p], networks, 100, backend=backend)
    before = p.detach().clone()
    for step in range(3):
        p.grad = 2.0 * p.detach()
        optimizer.step(p.detach().square().sum() / (1 + step))
    assert p.isfinite().all()
    assert not torch.equal(p, before)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (None, TypeError, "step needs the loss"),
        ("1", TypeError, "step needs the loss"),
        (True, TypeError, "step needs the loss"),
        (torch.ones(2), ValueError, r"tensor of one, got \[2\]"),
        (torch.ones((), dtype=torch.int64), ValueError, "floating tensor of one"),
        (lambda: None, TypeError, "step needs the loss"),
    ],
    ids=lambda x: str(x)[:16],
)
def test_bad_losses_are_refused_before_anything_is_touched(learned, backend, loss, error, message):
    ps, optimizer = trained(learned, backend)
    before = everything(ps, optimizer)
    with pytest.raises(error, match=message):
        optimizer.step(loss)
    assert all(map(torch.equal, before, everything(ps, optimizer)))


def test_bad_networks_and_parameters_are_refused(learned):
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(TypeError, match="networks must be of float32 or float64"):
        VeLO([p], learned.velo_networks().bfloat16(), 20).step(1.0)
    with pytest.raises(ValueError, match="on one device of parameters with gradients"):
        VeLO([p], learned.velo_networks().to("meta"), 20).step(1.0)
    with pytest.raises(TypeError, match=r"a parameter must be floating, got torch\.complex64"):
        VeLO([torch.nn.Parameter(torch.ones(2) * 1j)], learned.velo_networks(), 20)
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="strided"):
        VeLO([p], learned.velo_networks(), 20).step(1.0)


def test_bad_states_are_refused(learned):
    ps, optimizer = trained(learned, "reference")
    saved = optimizer.state_dict()
    before = everything(ps, optimizer)
    lost = {k: copy.deepcopy(x) for k, x in saved.items() if k != "losses"}
    # Where torch.distributed.checkpoint keeps them.
    del lost["param_groups"][0]["optimizer_state"]
    with pytest.raises(ValueError, match="must have losses with step"):
        optimizer.load_state_dict(lost)
    short = {**saved["losses"], "means": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"means must have shape \[10\], got \[3\]"):
        optimizer.load_state_dict({**saved, "losses": short})
    wide = copy.deepcopy(saved)
    wide["state"][2]["lstm"] = torch.zeros(2, 9)
    with pytest.raises(ValueError, match=r"lstm of parameter 2 must have shape \[2, 8\]"):
        optimizer.load_state_dict(wide)
    assert all(map(torch.equal, before, everything(ps, optimizer)))
