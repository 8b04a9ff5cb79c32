"""What torch.optim.AdamW promises, kept by ours beside it: PyTorch's own catalogue of optimizer
inputs, state dicts, copies, the scaler, schedulers, hooks and groups; and that a skipped step is
none.
"""

from __future__ import annotations

import copy
import importlib
import io
import math
import pickle
import weakref

import pytest
import torch
from fusewright.optimizer import AdamW
from fusewright_testkit.yardstick import Allowance, assert_within
from torch.optim import lr_scheduler

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")


def assert_near(found, expected):
    """The same formula in fp32, rounded elsewhere."""
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def assert_equal(found, expected):
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)


def everything(optimizer):
    """Copies of all parameters and states."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.append(p.detach().clone())
            found += [x.clone() for _, x in sorted(optimizer.state.get(p, {}).items())]
    return found


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
def test_hundred_steps_err_at_most_twice_as_much_as_torchs(backend, device, decoupled):
    twin = torch.optim.AdamW if decoupled else torch.optim.Adam
    starts = [torch.randn(40, 3, device=device)]
    gradients = [[torch.randn_like(x) for x in starts] for _ in range(100)]
    options = dict(lr=0.01, weight_decay=0.1)
    ours = dict(options, decoupled_weight_decay=decoupled, backend=backend)
    assert_as_good_as_torch(twin, starts, gradients, ours, options)


@pytest.fixture
def catalogue(monkeypatch):
    """PyTorch's own tests' optimizers, by name."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    # Its import would forbid all other tests of this process to set torch's flags.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    found = importlib.import_module("torch.testing._internal.common_optimizers")
    return {info.optim_cls.__name__: info for info in found.optim_db}


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_inputs_of_pytorchs_catalogue_give_torchs_numbers(
    training, catalogue, backend, device, name
):
    # Those for cards are numbers and CPU tensors: good anywhere. None has foreach, fused or
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
        # torch's takes it on cards alone.
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


def flat(ps):
    return ps


def groups(ps):
    return [
        dict(params=ps[:2], lr=0.1, amsgrad=True),
        dict(params=ps[2:], betas=(0.8, 0.9), weight_decay=0.3),
    ]


def named(ps):
    return [(f"p{number}", p) for number, p in enumerate(ps)]


def as_file(state_dict):
    """The state dict as a file gives it back."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


TORCHS = [dict(foreach=False), dict(fused=True), dict(foreach=False, amsgrad=True)]


@pytest.mark.parametrize(
    ("options", "arranged"),
    [*((options, flat) for options in TORCHS), (TORCHS[0], groups), (TORCHS[1], named)],
    ids=["foreach=False", "fused", "amsgrad", "groups", "fused-named"],
)
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-torchs", "torchs-ours"])
def test_state_dicts_of_ours_and_of_torchs_go_on_in_the_other(
    training, backend, device, options, arranged, ours_first
):
    def theirs(ps):
        return torch.optim.AdamW(arranged(ps), **options)

    def ours(ps):
        return AdamW(arranged(ps), amsgrad=options.get("amsgrad", False), backend=backend)

    first, second = (ours, theirs) if ours_first else (theirs, ours)
    ps, twin = (training.parameters(device=device) for _ in range(2))
    before = training.run(first, ps, 2)
    after = second(ps)
    saved = as_file(before.state_dict())
    after.load_state_dict(saved)
    training.run(lambda _: after, ps, 2, first=2)
    expected = training.run(theirs, twin, 4)
    assert_near(ps, twin)
    for p, q in zip(ps, twin, strict=True):
        assert {*after.state[p]} == {*expected.state[q]}
        assert after.state[p]["step"].item() == 4
        assert_near([after.state[p]["exp_avg_sq"]], [expected.state[q]["exp_avg_sq"]])
    assert [g.get("param_names") for g in after.param_groups] == [
        g.get("param_names") for g in before.param_groups
    ]


OWN = [
    (F32, {}),
    (F32, {"state_dtype": BF16, "amsgrad": True}),
    (BF16, {"state_dtype": F32}),
    (BF16, {"rounding": "remainder"}),
    (BF16, {"rounding": "stochastic", "seed": 5}),
    (torch.float16, {"max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(
    ("dtype", "options", "how"),
    [*((*own, "file") for own in OWN), (*OWN[1], "deepcopy"), (*OWN[3], "pickle")],
    ids=str,
)
def test_interrupted_training_has_the_bits_of_uninterrupted(
    training, backend, device, dtype, options, how
):
    whole, ps = (training.parameters(dtype, device) for _ in range(2))
    expected = training.run(AdamW, whole, 4, backend=backend, **options)
    half = training.run(AdamW, ps, 2, backend=backend, **options)
    if how == "file":
        other = AdamW(ps, backend=backend, **options)
        other.load_state_dict(as_file(half.state_dict()))
    else:
        other = copy.deepcopy(half) if how == "deepcopy" else pickle.loads(pickle.dumps(half))
    training.run(lambda _: other, other.param_groups[0]["params"], 2, first=2)
    assert_equal(everything(other), everything(expected))


def test_loaded_state_has_the_dtypes_that_were_asked_for(training, device):
    ps = training.parameters(BF16, device)
    saved = training.run(torch.optim.AdamW, ps, 1).state_dict()
    optimizer = AdamW(ps, state_dtype=F32)
    optimizer.load_state_dict(saved)
    for p, number in zip(ps, saved["state"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][name].dtype == F32
            assert torch.equal(optimizer.state[p][name], saved["state"][number][name].float())


def test_a_remainder_that_another_optimizer_has_cast_is_forgotten(training):
    ps = training.parameters(BF16)
    ours = training.run(AdamW, ps, 2, rounding="remainder")
    assert any(ours.state[p]["remainder"].count_nonzero() for p in ps)
    theirs = torch.optim.AdamW(ps)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert not any("remainder" in ours.state[p] for p in ps)
    training.run(lambda _: ours, ps, 1)
    assert all(ours.state[p]["remainder"].dtype == torch.int16 for p in ps)


def test_loading_aliases_nothing_of_the_given_dict(training, backend, device):
    ps = training.parameters(device=device)
    given = training.run(AdamW, ps, 1, lr=torch.tensor(0.1, device=device)).state_dict()
    before = copy.deepcopy(given)
    other = AdamW(ps, backend=backend)
    other.load_state_dict(given)
    training.run(lambda _: other, ps, 2)
    other.param_groups[0]["lr"].fill_(0.2)
    for number, state in given["state"].items():
        assert_equal(state.values(), before["state"][number].values())
    assert given["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("wrong", ["shape", "step", "groups", "sizes"])
def test_refused_state_dict_changes_nothing(training, backend, wrong):
    ps = training.parameters()
    optimizer = training.run(AdamW, ps, 1, backend=backend, lr=0.1)
    given = training.run(AdamW, training.parameters(), 3).state_dict()
    (group,) = given["param_groups"]
    if wrong == "shape":
        given["state"][4]["exp_avg"] = torch.zeros(1, 7)
    elif wrong == "step":
        given["state"][4]["step"] = torch.zeros(2)
    elif wrong == "groups":
        given["param_groups"].append({**group, "params": []})
    else:
        group["params"] = group["params"][:-1]
    before = everything(optimizer)
    message = "of parameter 4 must" if wrong in ("shape", "step") else "must have groups of"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(given)
    assert_equal(everything(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_hooks_of_loading_adapt_what_comes_and_see_what_came(training):
    ps = training.parameters(BF16)
    given = training.run(AdamW, training.parameters(BF16), 2).state_dict()
    # As a checkpoint of other shapes, which a hook folds.
    for state in given["state"].values():
        state["exp_avg"] = state["exp_avg"].flatten()
    optimizer = AdamW(ps, state_dtype=F32)
    seen = []

    def fold(_, state_dict):
        for p, state in zip(ps, state_dict["state"].values(), strict=True):
            state["exp_avg"] = 2 * state["exp_avg"].view(p.shape)
        return state_dict

    optimizer.register_load_state_dict_pre_hook(fold)
    optimizer.register_load_state_dict_post_hook(
        lambda x: seen.extend(x.state[p]["exp_avg"].dtype for p in ps)
    )
    expected = [2 * state["exp_avg"].float() for state in given["state"].values()]
    optimizer.load_state_dict(given)
    assert_equal([optimizer.state[p]["exp_avg"].flatten() for p in ps], expected)
    assert seen == [F32] * len(ps)


def test_copy_of_a_scheduled_optimizer_steps_its_own_parameters(training):
    ps = training.parameters()
    optimizer = AdamW(ps)
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    before = everything(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        training.run(lambda _, other=other: other, theirs, 1)
        assert_equal(everything(optimizer), before)
        assert not torch.equal(theirs[1], ps[1])


def test_capturable_rates_stay_tensors_when_others_state_is_loaded(training):
    ps = training.parameters()
    given = training.run(torch.optim.AdamW, ps, 1, lr=0.25).state_dict()
    given["param_groups"][0]["capturable"] = True
    plain, capturable = AdamW(ps), AdamW(ps, capturable=True)
    for optimizer in (plain, capturable):
        optimizer.load_state_dict(given)
    assert plain.param_groups[0]["lr"] == 0.25
    assert not plain.param_groups[0]["capturable"]
    rate = capturable.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert (rate.item(), rate.dtype, rate.device) == (0.25, F32, ps[0].device)


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
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert not optimizer.skipped
    assert all(p.isfinite().all() for p in ps)


def test_results_before_a_step_are_those_of_none(training, backend):
    optimizer = AdamW([dict(params=[]), dict(params=training.parameters())], backend=backend)
    assert optimizer.grad_norm.isnan()
    assert (optimizer.grad_norm.dtype, optimizer.grad_norm.shape) == (F32, ())
    assert (optimizer.skipped.item(), optimizer.skipped_steps.item()) == (False, 0)
    optimizer.step()
    assert optimizer.grad_norm.isnan()
