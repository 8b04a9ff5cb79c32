"""DeepNestedOptimizer: its step beside one that branches on the host, AdamW's bits before any
training, groups and bad input.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright.optimizer import AdamW
from fusewright.optimizer._core.launches import Launch
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer
from fusewright.optimizer.nested.parameter_groups import parameter_groups, relative_depths
from torch.utils._python_dispatch import TorchDispatchMode

from .compared import assert_equal, assert_near, everything
from .nested import STEPS, Eager, assert_followed, give, model, optimizer_of

ADAMW = {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("features", ["log", "raw"])
@pytest.mark.parametrize("frequency", [1, 4])
def test_step_is_the_one_with_branches(features, frequency):
    some = model()
    options = dict(controller_update_freq=frequency, features=features, weight_decay=0.1)
    optimizer = optimizer_of(some, **options)
    assert_followed(some, optimizer, Eager(some, optimizer))
    assert optimizer.skipped_steps.item() == 6
    assert optimizer.state[some.norm.weight]["step"].item() == STEPS - 6


@pytest.mark.parametrize("frequency", [1, 4])
def test_kernels_step_is_the_references(device, frequency):
    """The same formula in fp32, rounded elsewhere."""
    found = []
    for backend in ("triton", "reference"):
        some = model(torch.float32, device)
        optimizer = optimizer_of(some, backend=backend, controller_update_freq=frequency)
        rows = []
        # Two bad losses and two bad gradients are among them.
        for step in range(1, 14):
            out = optimizer.step(give(some, step))
            ahead = out["lr_multipliers"], out["ema_loss"].view(1), out["skipped"].float().view(1)
            rows.append(torch.cat(ahead))
        found.append((torch.stack(rows), *(p.detach() for p in some.parameters())))
    for x, y in zip(*found, strict=True):
        assert_near([x], [y])


def test_kernels_share_groups_out_over_programs(device, many_programs, monkeypatch):
    """Of several programs for each group and several rounds of the controller's."""
    from fusewright.optimizer.common.launch import Block, GridStride
    from fusewright.optimizer.nested import launch

    monkeypatch.setattr(launch, "SQUARES", GridStride(size=4, num_warps=1, programs_per_sm=4))
    monkeypatch.setattr(launch, "PREPARE", Block(size=2, num_warps=1))
    some = model(torch.float32, device)
    optimizer = optimizer_of(some, backend="triton", max_grad_norm=None)
    loss = give(some, 1)
    gradients = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
    kept = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    optimizer.step(loss)
    rows = [
        [torch.cat([x.double().flatten() for x in tensors]).norm() for tensors in pair]
        for pair in zip(gradients, kept, strict=True)
    ]
    expected = torch.tensor(rows).float().to(device)
    # The sum of squares, its root and what is expected are rounded.
    bound = 2 * torch.finfo(torch.float32).eps * expected
    assert ((optimizer._rates.statistics[:, :2] - expected).abs() <= bound).all()


def test_programs_cover_every_block_once():
    from fusewright.optimizer.nested.launch import programs_by_group

    for blocks in ([7, 0, 1, 100], [1], [3, 3, 3], [0, 0]):
        for programs in (1, 2, 5, 1000):
            bounds, groups = programs_by_group(blocks, programs)
            assert bounds[0] == 0
            assert bounds[-1] == sum(blocks)
            spans = [stop - start for start, stop in itertools.pairwise(bounds)]
            assert all(span > 0 for span in spans)
            found = [0] * len(blocks)
            for group, span in zip(groups, spans, strict=True):
                found[group] += span
            assert found == blocks
            assert len(groups) <= programs + len(blocks)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_untrained_step_has_the_bits_of_adamw(device, backend):
    some, twin = (model(torch.float32, device) for _ in range(2))
    options = dict(weight_decay=0.1, max_grad_norm=1.0, backend=backend)
    ours = DeepNestedOptimizer(some, 0.02, mode="explicit", **options)
    names = {id(p): name for name, p in some.named_parameters()}
    others = dict(twin.named_parameters())
    theirs = AdamW([others[names[id(p)]] for p in ours._all_parameters()], 0.02, **options)
    for step in (1, 2, 5, 7):
        loss = give(some, step)
        give(twin, step)
        ours.step(loss)
        theirs.step()
        assert_equal(some.parameters(), twin.parameters())


class NoNumberRead(TorchDispatchMode):
    """A tensor that is asked for its value on the host raises, on any device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero"))
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("update", ["adamw", "continuum"])
@pytest.mark.parametrize("meta", ["hypergradient", "proxy"])
def test_no_step_reads_a_number(update, meta):
    some = model()
    optimizer = optimizer_of(
        some, update=update, meta=meta, mode="simple", meta_update_freq=2, frequencies=(1, 3)
    )
    losses = [torch.tensor(give(some, step)) for step in range(1, 13)]
    with NoNumberRead():
        for loss in losses:
            optimizer.step(loss.double())
        optimizer.get_lr_multipliers()
        optimizer.get_effective_lrs()
        optimizer.get_momentum_stats()
        optimizer.meta_update(lambda: some.norm.weight.square().sum())
    with pytest.raises(AssertionError), NoNumberRead():
        bool(losses[0] > 0.0)


@pytest.mark.parametrize("frequency", [1, 100])
def test_step_is_adamws_launches_and_one(device, frequency, monkeypatch):
    launched = []
    plain = Launch.__call__

    def watched(self, *some):
        launched.append((self.kernel.__name__, self.grid))
        return plain(self, *some)

    monkeypatch.setattr(Launch, "__call__", watched)
    found = {}
    for name in ("ours", "theirs"):
        some = model(torch.float32, device)
        options = dict(max_grad_norm=1.0, backend="triton")
        if name == "ours":
            options.update(mode="explicit", controller_update_freq=frequency)
            optimizer = DeepNestedOptimizer(some, **options)
        else:
            optimizer = AdamW(some.parameters(), **options)
        for step in (1, 2):
            launched.clear()
            loss = give(some, step)
            optimizer.step(*[loss] * (name == "ours"))
        found[name] = dict(launched)
        assert len(found[name]) == len(launched)
    assert list(found["theirs"]) == ["squares_kernel", "prepare_kernel", "adamw_kernel"]
    expected = ["group_squares_kernel", "control_kernel", "prepare_kernel", "adamw_kernel"]
    assert list(found["ours"]) == expected
    # Where multipliers stay, the parameters are not read.
    assert found["ours"]["group_squares_kernel"][1] == (2 if frequency == 1 else 1)


def test_state_is_adamws_alone():
    some = model(torch.float32)
    optimizer = DeepNestedOptimizer(some, meta_update_freq=2)
    for step in (1, 2, 4):
        optimizer.step(give(some, step))
    assert all(set(state) == ADAMW for state in optimizer.state.values())
    assert optimizer._mode.adamw.state is optimizer.state
    plain = AdamW(some.parameters())
    plain.step()
    held = [
        sum(x.numel() for s in o.state.values() for x in s.values()) for o in (optimizer, plain)
    ]
    assert held[0] == held[1]


def test_multipliers_are_exactly_one_at_the_start(device, backend):
    some = model(torch.float32, device)
    optimizer = DeepNestedOptimizer(some, 0.3, backend=backend)
    optimizer.step(give(some, 1))
    assert all(m.item() == 1.0 for m in optimizer.get_lr_multipliers().values())
    assert [lr.item() for lr in optimizer.get_effective_lrs().values()] == [0.3, 0.3]


def test_loss_may_come_in_any_way():
    runs = []
    for way in range(4):
        some = model()
        optimizer = optimizer_of(some)
        for step in (1, 2):
            loss = torch.tensor(give(some, step)).double()
            if way == 0:
                optimizer.step(loss.requires_grad_())
            elif way == 1:
                optimizer.step(lambda kept=loss: kept)
            elif way == 2:
                optimizer.step(closure=lambda kept=loss: kept)
            else:
                optimizer.set_loss(loss.float())
                optimizer.step()
        runs.append(optimizer._rates.ema_loss.item())
    assert runs[:3] == [runs[0]] * 3
    assert runs[3] == pytest.approx(runs[0])


def test_missing_loss_is_warned_about_once(recwarn):
    some = model()
    optimizer = optimizer_of(some)
    for step in (1, 2):
        give(some, step)
        out = optimizer.step()
    found = [x for x in recwarn if "set_loss" in str(x.message)]
    assert len(found) == 1
    assert out["ema_loss"].item() == 0.0
    # A loss that was set serves one step.
    optimizer.set_loss(4.0)
    assert optimizer.step()["loss"].item() == 4.0
    assert optimizer.step()["loss"].item() == 0.0


def test_schedulers_scale_all_groups():
    some = model()
    optimizer = DeepNestedOptimizer(some, 0.8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in (1, 2):
        optimizer.step(give(some, step))
        schedule.step()
    assert [lr.item() for lr in optimizer.get_effective_lrs().values()] == [0.2, 0.2]
    assert optimizer._rates.rates.tolist() == [0.4, 0.4]


def test_learning_rates_may_be_tensors():
    found = []
    for lr in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        some = model()
        optimizer = optimizer_of(some, base_lr=lr)
        optimizer.step(give(some, 1))
        found.append([p.detach() for p in some.parameters()])
    assert all(map(torch.equal, *found))


def test_hooks_run_once_a_step():
    some = model()
    optimizer = DeepNestedOptimizer(some)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step(give(some, 1))
    assert seen == ["before", "after"]


@pytest.mark.parametrize("update", ["adamw", "continuum"])
def test_scaler_unscales_and_skips_in_the_step(update):
    """With the two tensors that a GradScaler gives an optimizer for the time of a step."""
    some, twin = model(), model()
    options = dict(update=update, frequencies=(1, 2))
    optimizers = [optimizer_of(x, **options) for x in (some, twin)]
    for step in (1, 2, 5, 6):
        loss = give(some, step)
        for p, q in zip(some.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad * 1024.0
        out = optimizers[0].step(loss)
        optimizers[1].set_loss(loss)
        optimizers[1].grad_scale = torch.tensor(1024.0)
        finite = all(q.grad.isfinite().all() for q in twin.parameters())
        optimizers[1].found_inf = torch.tensor(0.0 if finite else 1.0)
        other = optimizers[1].step()
        del optimizers[1].grad_scale, optimizers[1].found_inf
        assert out["skipped"].item() == other["skipped"].item() == (step == 5)
        torch.testing.assert_close(out["lr_multipliers"], other["lr_multipliers"])
        assert_near(some.parameters(), twin.parameters())


def test_found_inf_alone_skips():
    some = model()
    optimizer = optimizer_of(some)
    before = [p.detach().clone() for p in some.parameters()]
    loss = give(some, 1)
    optimizer.found_inf = torch.tensor(1.0)
    assert optimizer.step(loss)["skipped"].item()
    assert all(map(torch.equal, some.parameters(), before))


def test_squares_that_are_not_finite_are_not_stored(backend, device):
    some = model(torch.float32, device)
    optimizer = optimizer_of(some, backend=backend, max_grad_norm=None)
    for step in (1, 2, 4):
        loss = give(some, step)
        if step == 2:
            some.norm.weight.grad[1] = 3e22
        before = [p.detach().clone() for p in some.parameters()]
        assert optimizer.step(loss)["skipped"].item() == (step == 2)
        assert all(map(torch.equal, some.parameters(), before)) == (step == 2)
        assert all(x.isfinite().all() for x in everything(optimizer))
    assert optimizer.state[some.norm.weight]["step"].item() == 2


def test_group_added_later_has_its_own_multiplier():
    some = model()
    optimizer = optimizer_of(some)
    optimizer.step(give(some, 1))
    before = optimizer.get_lr_multipliers()
    later = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [later], "lr": 0.5, "name": "later", "depth": 1.0})
    assert list(optimizer.get_lr_multipliers()) == ["embed", "core", "later"]
    assert torch.equal(optimizer.get_lr_multipliers()["core"], before["core"])
    give(some, 2)
    later.grad = torch.ones_like(later)
    optimizer.step(1.0)
    assert optimizer.global_step == 2
    assert optimizer.state[later]["step"].item() == 1
    assert optimizer.state[some.norm.weight]["step"].item() == 2


def test_step_without_gradients_counts_alone():
    some = model()
    optimizer = optimizer_of(some)
    before = [p.detach().clone() for p in some.parameters()]
    out = optimizer.step(1.0)
    assert out["global_step"].item() == 1
    assert not optimizer.state
    assert all(map(torch.equal, some.parameters(), before))


def test_groups_and_depths_follow_from_names():
    some = model()
    embed, core = parameter_groups(some)
    assert (embed["name"], core["name"]) == ("embed", "core")
    names = {id(p): name for name, p in some.named_parameters()}
    found = [names[id(p)] for p in core["params"]]
    assert found == ["layers.0.weight", "layers.1.weight", "lm_head.weight"]
    assert core["depth"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    # The table, two biases of layers, and the norm at the top.
    assert embed["depth"] == pytest.approx((0.0 + 0.5 + 1.0 + 1.0 + 1.0) / 5)
    found = relative_depths(["x.embed_tokens.weight", "blocks.3.a", "h.1.b", "conv.weight"])
    assert found == [0.0, 1.0, 0.5, 0.5]


def test_grouping_is_the_callers():
    some = model()
    optimizer = DeepNestedOptimizer(some, grouping=lambda name, p: name.split(".")[0])
    assert list(optimizer.get_lr_multipliers()) == ["token_embedding", "layers", "norm", "lm_head"]
    assert [group["depth"] for group in optimizer.param_groups] == [0.0, 0.75, 1.0, 1.0]
    head = {"params": [some.lm_head.weight], "name": "head", "weight_decay": 0.3}
    rest = {"params": list(some.layers.parameters()), "depth": 0.25}
    optimizer = DeepNestedOptimizer(some, grouping=[head, rest])
    assert [group["name"] for group in optimizer.param_groups] == ["head", "group_1"]
    assert [group["depth"] for group in optimizer.param_groups] == [1.0, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_frozen_parameters_are_left_out():
    some = model()
    some.token_embedding.requires_grad_(False)
    optimizer = DeepNestedOptimizer(some)
    assert len(optimizer._all_parameters()) == 7
    with pytest.raises(ValueError, match="must be parameters that need gradients"):
        DeepNestedOptimizer(some.requires_grad_(False))


def test_what_is_no_model_is_refused():
    for given in (torch.ones(3), [torch.nn.Parameter(torch.ones(3))], 3):
        with pytest.raises(TypeError, match="model must be a module or pairs"):
            DeepNestedOptimizer(given)
    with pytest.raises(TypeError, match='groups must be mappings with "params"'):
        DeepNestedOptimizer(model(), grouping=[[1]])
    with pytest.raises(TypeError, match="grouping must give the name"):
        DeepNestedOptimizer(model(), grouping=lambda name, p: 3)
    turned = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="parameters must be real"):
        DeepNestedOptimizer([("z", turned)])
    far = torch.nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="on one device"):
        DeepNestedOptimizer([("a", far), ("b", torch.nn.Parameter(torch.ones(3)))])


@pytest.mark.parametrize("update", ["adamw", "continuum"])
def test_bad_gradients_and_losses_are_refused_before_anything_moves(update):
    some = model()
    optimizer = optimizer_of(some, update=update)
    loss = give(some, 1)
    before = [p.detach().clone() for p in some.parameters()]
    with pytest.raises(ValueError, match="loss must be one number"):
        optimizer.step(torch.ones(2))
    some.lm_head.weight.grad = torch.ones(5, 3, dtype=torch.float64).to_sparse()
    with pytest.raises(TypeError, match="a gradient must be a strided tensor"):
        optimizer.step(loss)
    assert optimizer.global_step == 0
    assert all(map(torch.equal, some.parameters(), before))


def test_same_inputs_same_bits(device, backend):
    runs = []
    for _ in range(2):
        some = model(torch.float32, device)
        optimizer = optimizer_of(some, mode="simple", meta_update_freq=2, backend=backend)
        for step in range(1, 5):
            optimizer.step(give(some, step))
        runs.append([*(p.detach() for p in some.parameters()), *optimizer.controller.parameters()])
    assert all(map(torch.equal, *runs))
