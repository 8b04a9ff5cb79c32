"""What torch.optim.AdamW promises, kept by ours beside it: PyTorch's own catalogue of optimizer
inputs, the scaler, schedulers, hooks and groups; and that a skipped step is
none.
"""

from __future__ import annotations

import importlib
import math
import warnings
import weakref

import pytest
import torch
from fusewright.optimizer import AdamW
from fusewright_testkit.yardstick import Allowance, assert_within
from torch.optim import lr_scheduler

from .compared import assert_equal, assert_near, everything

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")


def trained(make, starts, gradients, dtype, **options):
    """Parameters after a step for each list of gradients."""
    ps = [torch.nn.Parameter(x.detach().to(dtype, copy=True)) for x in starts]
    optimizer = make(ps, **options)
    for some in gradients:
        for p, g in zip(ps, some, strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in ps]


def assert_as_good_as_torch(twin, starts, gradients, ours, theirs):
    """At most twice the error of torch's fp32, and two units, against torch's fp64."""
    truths = trained(twin, starts, gradients, F64, foreach=False, **theirs)
    eagers = trained(twin, starts, gradients, F32, foreach=False, **theirs)
    found = trained(AdamW, starts, gradients, F32, **ours)
    for p, truth, eager in zip(found, truths, eagers, strict=True):
        assert_within(p, truth, Allowance.of(truth, eager))


@pytest.mark.parametrize(
    ("backend", "decoupled"), [("triton", True), ("reference", True), ("reference", False)]
)
def test_many_steps_err_at_most_twice_as_much_as_torchs(backend, device, decoupled):
    twin = torch.optim.AdamW if decoupled else torch.optim.Adam
    starts = [torch.randn(40, 3, device=device)]
    gradients = [[torch.randn_like(x) for x in starts] for _ in range(40)]
    options = dict(lr=0.01, weight_decay=0.1)
    ours = dict(options, decoupled_weight_decay=decoupled, backend=backend)
    assert_as_good_as_torch(twin, starts, gradients, ours, options)


@pytest.fixture
def catalogue(monkeypatch):
    """PyTorch's own tests' optimizers, by name."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    # Its import would forbid all other tests of this process to set torch's flags.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    with warnings.catch_warnings():
        # It warns where hypothesis is not installed.
        warnings.simplefilter("ignore", ImportWarning)
        found = importlib.import_module("torch.testing._internal.common_optimizers")
    return {info.optim_cls.__name__: info for info in found.optim_db}


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_inputs_of_pytorchs_catalogue_give_torchs_numbers(
    training, catalogue, backend, device, name
):
    # Those for GPUs are numbers and CPU tensors: good anywhere. None has foreach, fused or
    # differentiable, which do not exist here.
    inputs = catalogue[name].optim_inputs_func("cuda", F32)
    assert len(inputs) >= 10
    starts = training.parameters(device=device)[:2]
    gradients = []
    for step in range(3):
        training.give_gradients(starts, step)
        gradients.append([p.grad for p in starts])
    for each in inputs:
        # torch's Adam and ours have different defaults.
        common = {} if name == "AdamW" else dict(weight_decay=0.0)
        ours = {**common, **each.kwargs}
        # torch's takes it on GPUs alone.
        theirs = {key: x for key, x in ours.items() if key != "capturable"}
        ours |= dict(decoupled_weight_decay=name == "AdamW", backend=backend)
        assert_as_good_as_torch(catalogue[name].optim_cls, starts, gradients, ours, theirs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_bad_inputs_of_pytorchs_catalogue_raise_as_torchs(catalogue, name):
    raised = 0
    for each in catalogue[name].optim_error_inputs_func("cpu", F32):
        given = each.optimizer_error_input
        betas = given.kwargs.get("betas", ())
        # foreach does not exist here, and one beta may be a number and the other a tensor.
        if "foreach" in given.kwargs or len({type(x) for x in betas}) > 1:
            continue
        params = [torch.nn.Parameter(torch.ones(2))] if given.params is None else given.params
        with pytest.raises(each.error_type):
            AdamW(params, **given.kwargs)
        raised += 1
    assert raised >= 8


@pytest.mark.parametrize("unscaled", [False, True], ids=["inside", "unscale_"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3], ids=["", "clipped"])
def test_scaler_skips_and_scales_as_with_torchs_fused(
    training, backend, device, unscaled, max_grad_norm
):
    def run(make, clip_outside):
        ps = training.parameters(device=device)
        optimizer = make(ps)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            factors = [torch.sin(p.detach() * (1 + step)) for p in ps]
            if step == 2:
                factors[1][3, 4] = INF
            loss = sum((p * x).sum() for p, x in zip(ps, factors, strict=True))
            scaler.scale(loss).backward()
            if unscaled or clip_outside:
                scaler.unscale_(optimizer)
            if clip_outside:
                torch.nn.utils.clip_grad_norm_(ps, max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return optimizer, ps, scales

    ours, ps, scales = run(
        lambda ps: AdamW(ps, max_grad_norm=max_grad_norm, backend=backend), False
    )
    theirs, twin, expected = run(
        lambda ps: torch.optim.AdamW(ps, fused=True), max_grad_norm is not None
    )
    assert scales == expected
    assert 2.0**10 in scales
    assert_near(ps, twin)
    assert [ours.state[p]["step"].item() for p in ps] == [4.0] * len(ps)
    assert [theirs.state[p]["step"].item() for p in twin] == [4.0] * len(ps)
    assert (ours.skipped_steps.item(), ours.skipped.item()) == (1, False)
    assert not hasattr(ours, "grad_scale")


SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)),
    "one-cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=6),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("scheduler", "rate"),
    [
        ("lambda", "number"),
        ("lambda", "tensor"),
        ("one-cycle", "number"),
        ("one-cycle", "capturable"),
        ("cosine", "tensor"),
    ],
)
def test_schedulers_steer_as_they_steer_torchs(training, backend, device, scheduler, rate):
    def run(make):
        ps = training.parameters(device=device)
        optimizer = make(ps)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates = []
        for step in range(5):
            training.give_gradients(ps, step)
            optimizer.step()
            schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return optimizer, ps, rates

    lr = torch.tensor(0.1, dtype=F64, device=device) if rate == "tensor" else 0.1
    ours, ps, rates = run(
        lambda ps: AdamW(ps, lr=lr, capturable=rate == "capturable", backend=backend)
    )
    theirs, twin, expected = run(lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False))
    assert rates == pytest.approx(expected)
    assert len(set(rates)) > 2
    assert_near(ps, twin)
    assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"]
    if rate == "tensor":
        # Written to, not put in another's place: a captured step reads it.
        assert ours.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("set_to_none", [True, False])
def test_step_after_zero_grad_is_torchs(training, backend, device, set_to_none):
    def run(make):
        ps = training.parameters(device=device)
        optimizer = training.run(make, ps, 2)
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        assert [p.grad is None for p in ps] == [set_to_none] * len(ps)
        return optimizer, ps

    ours, ps = run(lambda ps: AdamW(ps, backend=backend))
    _, twin = run(lambda ps: torch.optim.AdamW(ps, foreach=False))
    assert_near(ps, twin)
    assert ours.state[ps[0]]["step"].item() == (2 if set_to_none else 3)


def test_zero_grad_frees_the_gradients(training, backend, device):
    ps = training.parameters(device=device)
    optimizer = training.run(AdamW, ps, 2, backend=backend, max_grad_norm=1.0)
    held = [weakref.ref(p.grad) for p in ps]
    optimizer.zero_grad()
    assert [x() for x in held] == [None] * len(ps)


def test_hooks_run_around_a_step_and_may_write_gradients(training, backend):
    ps, twin = training.parameters(), training.parameters()
    optimizer = AdamW(ps, backend=backend)
    seen = []

    def double(opt, args, kwargs):
        seen.append(everything(opt)[0])
        for p in ps:
            p.grad = 2 * p.grad

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(everything(opt)[0]))
    training.run(lambda _: optimizer, ps, 1, scale=0.5)
    training.run(AdamW, twin, 1, backend=backend)
    assert_equal(ps, twin)
    assert len(seen) == 2
    assert not torch.equal(*seen)


def test_closure_computes_the_gradients_of_the_step_and_its_loss_is_returned(backend):
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = AdamW([p], lr=0.5, weight_decay=0.0, backend=backend)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 5.0
    assert_near([p], [torch.tensor([0.5, -1.5])])
    assert AdamW([p], backend=backend).step() is None


def test_groups_gradients_and_freezing_come_and_go_as_in_torchs(training, backend, device):
    def run(make):
        ps = training.parameters(device=device)
        later = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5, device=device))
        optimizer = make(ps[:4])
        for step in range(7):
            if step == 2:
                optimizer.add_param_group(dict(params=[ps[4], later], lr=0.1))
            training.give_gradients(ps, step)
            # One parameter's gradients begin late, one's are missing in between, one is frozen.
            if step < 3:
                ps[1].grad = None
            if step == 4:
                ps[0].grad = None
            later.grad = torch.ones_like(later) if step > 4 else None
            ps[3].requires_grad_(step != 5)
            if step == 5:
                ps[3].grad = None
            optimizer.step()
        return optimizer, [*ps, later]

    ours, ps = run(lambda ps: AdamW(ps, backend=backend))
    theirs, twin = run(lambda ps: torch.optim.AdamW(ps, foreach=False))
    assert_near(ps, twin)
    for p, q in zip(ps, twin, strict=True):
        assert ours.state[p]["step"] == theirs.state[q]["step"]


SKIPPING = [
    ({"max_grad_norm": 0.5}, NAN),
    ({"max_grad_norm": 0.5}, INF),
    ({"skip_nonfinite": True}, -INF),
]


@pytest.mark.parametrize(("options", "strange"), SKIPPING, ids=["clips", "clips-inf", "skips"])
def test_one_strange_gradient_leaves_everything_as_if_no_step_was_taken(
    training, backend, device, options, strange
):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    expected = training.run(AdamW, twin, 2, backend=backend, **options)
    optimizer = training.run(AdamW, ps, 1, backend=backend, **options)
    before = everything(optimizer)
    training.give_gradients(ps, 9)
    ps[1].grad[32, 39] = strange
    optimizer.step()
    assert_equal(everything(optimizer), before)
    assert (optimizer.skipped.item(), optimizer.skipped_steps.item()) == (True, 1)
    assert not optimizer.grad_norm.isfinite()
    training.run(lambda _: optimizer, ps, 1, first=1)
    assert_equal(everything(optimizer), everything(expected))
    assert (optimizer.skipped.item(), optimizer.skipped_steps.item()) == (False, 1)
    assert torch.equal(optimizer.grad_norm, expected.grad_norm)


def test_first_step_skipped_leaves_the_second_a_first(training, backend):
    ps, twin = training.parameters(), training.parameters()
    optimizer = AdamW(ps, skip_nonfinite=True, backend=backend)
    training.run(lambda _: optimizer, ps, 1, scale=NAN)
    training.run(lambda _: optimizer, ps, 1)
    expected = training.run(AdamW, twin, 1, backend=backend)
    assert_equal(everything(optimizer), everything(expected))


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_norm_of_huge_and_tiny_gradients_is_that_of_fp64(training, backend, device, scale):
    ps = training.parameters(device=device)
    optimizer = training.run(AdamW, ps, 1, scale=scale, max_grad_norm=1.0, backend=backend)
    squares = sum(p.grad.double().square().sum().item() for p in ps)
    assert optimizer.grad_norm.item() == pytest.approx(
        math.sqrt(squares), rel=4 * torch.finfo(torch.float32).eps
    )
    assert not optimizer.skipped
    assert all(p.isfinite().all() for p in ps)


def test_results_before_a_step_are_those_of_none(training, backend):
    optimizer = AdamW([dict(params=[]), dict(params=training.parameters())], backend=backend)
    assert optimizer.grad_norm.isnan()
    assert (optimizer.grad_norm.dtype, optimizer.grad_norm.shape) == (F32, ())
    assert (optimizer.skipped.item(), optimizer.skipped_steps.item()) == (False, 0)
    optimizer.step()
    assert optimizer.grad_norm.isnan()
