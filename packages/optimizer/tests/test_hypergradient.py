"""The hypergradient against autograd through an unrolled step, what trains the controller, and
where it moves the multipliers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fusewright.optimizer.nested.controller_training import ControllerTraining
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer
from fusewright.optimizer.nested.nested_controller import NestedController

from .compared import assert_near
from .nested import NAN, give, model, optimizer_of

F64 = torch.float64


def validation(parameters):
    """A loss of parameters, in any order that is kept."""
    return sum((p * torch.cos(p * (2 + k))).sum() for k, p in enumerate(parameters))


def unrolled(optimizer, m, loss, max_norm=1.0):
    """L at the parameters that AdamW's next step with multipliers m leads to."""
    ps = optimizer._all_parameters()
    norm = torch.cat([p.grad.flatten() for p in ps]).norm()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    moved = []
    for number, group in enumerate(optimizer.param_groups):
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            state = optimizer.state.get(p)
            t = 1 if not state else state["step"].item() + 1
            g = p.grad * factor
            before = [torch.zeros_like(p)] * 2
            if state:
                before = [state["exp_avg"], state["exp_avg_sq"]]
            first = beta1 * before[0] + (1 - beta1) * g
            second = beta2 * before[1] + (1 - beta2) * g * g
            root = (second / (1 - beta2**t)).sqrt() + group["eps"]
            u = first / (1 - beta1**t) / root
            lr = group["lr"] * m[number]
            moved.append(p.detach() - lr * (u + group["weight_decay"] * p.detach()))
    return loss(moved)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["explicit", "simple"])
def test_hypergradient_is_that_of_autograd_through_the_step(mode, decay, monkeypatch):
    some = model()
    optimizer = optimizer_of(some, mode=mode, meta_update_freq=4, weight_decay=decay, base_lr=0.1)
    for step in (1, 2):
        optimizer.step(give(some, step))
    optimizer.param_groups[0]["lr"] = 0.03
    loss = give(some, 4)
    # Copies of parameters have no gradients.
    before = copy.deepcopy((some, optimizer))
    give(before[0], 4)
    optimizer.step(loss)
    m = optimizer._rates.multipliers.clone().requires_grad_()
    value = unrolled(before[1], m, validation)
    (expected,) = torch.autograd.grad(value, m)
    assert value.item() == pytest.approx(
        validation(optimizer._all_parameters()).item(), rel=2**8 * torch.finfo(F64).eps
    )
    if mode == "explicit":
        found = optimizer.meta_update(lambda: validation(optimizer._all_parameters()))[
            "hypergradient"
        ]
    else:
        seen = []
        follow = ControllerTraining.follow

        def watched(self, statistics, gradient, skipped):
            seen.append(gradient)
            follow(self, statistics, gradient, skipped)

        monkeypatch.setattr(ControllerTraining, "follow", watched)
        ps = optimizer._all_parameters()
        for p, g in zip(ps, torch.autograd.grad(validation(ps), ps), strict=True):
            p.grad = g
        # Of the next step's own learning rates nothing may depend.
        optimizer.param_groups[1]["lr"] = 7.0
        optimizer.step(1.0)
        (found,) = seen
    assert_near([found], [expected])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_kernels_hypergradient_is_the_references(device, decay):
    """Sums in fp64 of what is rounded elsewhere in fp32."""
    found = []
    for backend in ("triton", "reference"):
        some = model(torch.float32, device)
        optimizer = optimizer_of(some, backend=backend, weight_decay=decay, base_lr=0.1)
        for step in (1, 2, 4):
            optimizer.step(give(some, step))
        ps = optimizer._all_parameters()
        rows = [optimizer.meta_update(lambda ps=ps: validation(ps))["hypergradient"]]
        # One parameter has no gradient, and one's lies otherwise in its memory.
        some.lm_head.weight.grad = None
        some.layers[0].weight.grad = some.layers[0].weight.grad.T.contiguous().T
        optimizer.step(1.0)
        rows.append(optimizer.meta_update(lambda ps=ps: validation(ps[1:]))["hypergradient"])
        found.append(torch.stack(rows))
    assert found[0].abs().min().item() > 0.0
    assert_near([found[0].float()], [found[1].float()])


def test_kernels_hypergradient_over_many_programs_is_that_over_few(device, monkeypatch):
    from fusewright.optimizer.common.launch import GridStride
    from fusewright.optimizer.nested import adamw_mode, launch

    # By kernels alone.
    monkeypatch.setattr(adamw_mode, "dots_by_group", None)
    found = []
    for size in (1024, 4):
        stride = GridStride(size=size, num_warps=1, programs_per_sm=4)
        monkeypatch.setattr(launch, "SQUARES", stride)
        some = model(torch.float32, device)
        optimizer = optimizer_of(some, backend="triton")
        optimizer.step(give(some, 1))
        ps = optimizer._all_parameters()
        found.append(optimizer.meta_update(lambda ps=ps: validation(ps))["hypergradient"])
    # Sums in fp64, in another order.
    assert_near([found[0]], [found[1]])


def test_hypergradient_of_a_parameter_in_other_memory_is_the_references(device):
    some = model(torch.float32, device)
    optimizer = optimizer_of(some, backend="triton")
    optimizer.step(give(some, 1))
    ps = optimizer._all_parameters()
    expected = optimizer._mode.hypergradient(optimizer.param_groups, [p.grad for p in ps])
    for p in ps:
        p.data = p.data.clone()
    found = optimizer._mode.hypergradient(optimizer.param_groups, [p.grad for p in ps])
    assert_near([found.float()], [expected.float()])


def test_hypergradient_of_a_continuum_is_that_of_autograd():
    some = model()
    options = dict(update="continuum", frequencies=(1, 2), weight_decay=0.1)
    optimizer = optimizer_of(some, **options)
    optimizer.step(give(some, 1))
    loss = give(some, 2)
    kept = [p.detach().clone() for p in optimizer._all_parameters()]
    optimizer.step(loss)
    m = optimizer._rates.multipliers.clone().requires_grad_()
    # The step divided by its learning rates is its direction.
    moved, places = [], iter(kept)
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            old = next(places)
            direction = (old - p.detach()) / (group["lr"] * m[number].item())
            moved.append(old - group["lr"] * m[number] * direction)
    (expected,) = torch.autograd.grad(validation(moved), m)
    found = optimizer.meta_update(lambda: validation(optimizer._all_parameters()))["hypergradient"]
    assert_near([found], [expected])


def test_controller_follows_adam_on_the_hypergradient():
    some = model()
    optimizer = optimizer_of(some, meta_lr=0.01)
    twin = copy.deepcopy(optimizer.controller)
    adam = torch.optim.Adam(twin.parameters(), 0.01)
    for step in (1, 2, 4):
        optimizer.step(give(some, step))
        statistics = optimizer._rates.statistics.clone()
        found = optimizer.meta_update(lambda: validation(optimizer._all_parameters()))[
            "hypergradient"
        ]
        adam.zero_grad()
        (twin(statistics) * found).sum().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        adam.step()
        assert_near(optimizer.controller.parameters(), twin.parameters())


def test_training_moves_multipliers_the_way_that_gains():
    """Of two groups one has a constant slope, which longer steps descend faster; the other jumps
    from one side of its minimum to the other, on which shorter steps would land.
    """
    slope = torch.nn.Parameter(torch.full((4,), 50.0, dtype=F64))
    bowl = torch.nn.Parameter(torch.full((4,), 0.25, dtype=F64))
    groups = [
        {"params": [slope], "name": "slope", "depth": 0.0},
        {"params": [bowl], "name": "bowl", "depth": 1.0},
    ]
    torch.manual_seed(0)
    optimizer = DeepNestedOptimizer(
        [("slope", slope), ("bowl", bowl)],
        0.5,
        0.01,
        grouping=groups,
        meta_update_freq=1,
        betas=(0.0, 0.9),
    )
    losses = []
    for _ in range(100):
        slope.grad, bowl.grad = torch.ones_like(slope), 4.0 * bowl.detach()
        losses.append(2.0 * bowl.detach().square().sum().item())
        optimizer.step(losses[-1] + slope.detach().sum())
    m = {name: x.item() for name, x in optimizer.get_lr_multipliers().items()}
    assert m["slope"] > 1.5
    assert m["bowl"] < 0.7
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("where", ["loss", "gradient", "last"])
def test_what_is_not_finite_trains_nothing(where):
    some = model()
    optimizer = optimizer_of(some, mode="simple", meta_update_freq=3, meta_lr=0.1)
    optimizer.step(give(some, 1))
    give(some, 2)
    if where == "last":
        some.norm.weight.grad[0] = NAN
    optimizer.step(1.0)
    give(some, 4)
    if where == "gradient":
        some.norm.weight.grad[0] = NAN
    before = [p.detach().clone() for p in optimizer.controller.parameters()]
    optimizer.step(NAN if where == "loss" else 1.0)
    assert all(map(torch.equal, optimizer.controller.parameters(), before))
    for step in (6, 7, 9):
        optimizer.step(give(some, step))
    assert not all(map(torch.equal, optimizer.controller.parameters(), before))


def test_parameter_without_a_gradient_in_the_step_has_no_part():
    some = model()
    optimizer = optimizer_of(some)
    optimizer.step(give(some, 1))
    give(some, 2)
    some.lm_head.weight.grad = None
    optimizer.step(1.0)
    found = optimizer.meta_update(lambda: 3.0 * some.lm_head.weight.sum())["hypergradient"]
    assert found.tolist() == [0.0, 0.0]


def proxy_loss(m, losses, last):
    if len(losses) < 10:
        return (m - 1.0).square().mean()
    if losses[-10] - losses[-1] > 1e-3:
        return (m - last).square().mean()
    return (m - 1.0).square().mean() - 0.1 * (m - 1.0).abs().mean()


@pytest.mark.parametrize("falls", [True, False])
def test_proxy_is_the_rule_with_branches(falls):
    some = model()
    options = dict(mode="simple", meta="proxy", meta_update_freq=1, meta_lr=0.01)
    optimizer = optimizer_of(some, **options)
    twin = copy.deepcopy(optimizer.controller)
    adam = torch.optim.Adam(twin.parameters(), 0.01)
    losses, last = [], None
    for step in range(1, 16):
        give(some, 1 + step % 2)
        loss = 1.0 / step if falls else float(step)
        optimizer.step(loss)
        m = twin(optimizer._rates.statistics)
        adam.zero_grad()
        proxy_loss(m, losses, last).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        adam.step()
        losses.append(loss)
        last = m.detach()
        assert_near(optimizer.controller.parameters(), twin.parameters())


def test_meta_update_leaves_gradients_alone():
    some = model()
    optimizer = optimizer_of(some)
    optimizer.step(give(some, 1))
    before = [p.grad.clone() for p in some.parameters()]
    optimizer.meta_update(validation(list(some.parameters())))
    assert all(map(torch.equal, (p.grad for p in some.parameters()), before))
    assert all(p.grad is None for p in optimizer.controller.parameters())


def test_meta_update_refuses_what_it_cannot_judge():
    some = model()
    optimizer = optimizer_of(some)
    with pytest.raises(RuntimeError, match="needs a step before it, got none yet"):
        optimizer.meta_update(lambda: validation(list(some.parameters())))
    optimizer.step(give(some, 1))
    for loss in (None, 3.0, torch.ones(())):
        with pytest.raises(TypeError, match="needs a loss with its graph"):
            optimizer.meta_update(loss)


def test_proxys_meta_update_needs_no_loss():
    some = model()
    optimizer = optimizer_of(some, meta="proxy", meta_lr=0.1)
    optimizer.step(give(some, 1))
    before = [p.detach().clone() for p in optimizer.controller.parameters()]
    assert optimizer.meta_update()["loss"].item() == optimizer._rates.ema_loss.item()
    assert set(optimizer.meta_update(2.0)) == {"loss"}
    assert not all(map(torch.equal, optimizer.controller.parameters(), before))


def test_training_of_a_controller_at_its_start_begins_with_the_last_layer():
    torch.manual_seed(0)
    controller = NestedController(dtype=F64)
    training = ControllerTraining(controller, 2, 0.01, "reference")
    before = copy.deepcopy(controller.state_dict())
    no = torch.zeros((), dtype=torch.bool)
    training.follow(torch.ones(2, 3, dtype=F64), torch.ones(2, dtype=F64), no)
    moved = {
        name for name, x in controller.state_dict().items() if not torch.equal(x, before[name])
    }
    assert moved == {"layers.2.weight", "layers.2.bias"}
    assert (controller(torch.ones(2, 3, dtype=F64)) < 1.0).all()
