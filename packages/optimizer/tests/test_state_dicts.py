"""State dicts of AdamW: those of torch's, those of interrupted training, bad ones, and state that
others put there.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fusewright.optimizer import AdamW
from torch.optim import lr_scheduler

from .compared import as_file, assert_equal, assert_near, everything

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")


def flat(ps):
    return ps


def groups(ps):
    return [
        dict(params=ps[:2], lr=0.1, amsgrad=True),
        dict(params=ps[2:], betas=(0.8, 0.9), weight_decay=0.3),
    ]


def named(ps):
    return [(f"p{number}", p) for number, p in enumerate(ps)]


TORCHS = [dict(foreach=False), dict(fused=True), dict(foreach=False, amsgrad=True)]


@pytest.mark.sampled
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


@pytest.mark.sampled
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
