"""Options of torch's optimizers and of ours through each other's state dicts: none is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from fusewright.optimizer import AdamW, DeepNestedOptimizer, Muon

from .compared import as_file, assert_equal, assert_near

Adam = torch.optim.Adam
TORCHS = {
    "adam": (Adam, {}),
    "adam-decoupled": (Adam, dict(decoupled_weight_decay=True)),
    "adamw-fused": (torch.optim.AdamW, dict(fused=True)),
    "adam-foreach-amsgrad": (Adam, dict(foreach=True, amsgrad=True)),
    "adamw-capturable": (torch.optim.AdamW, dict(capturable=True, foreach=False)),
    "adam-differentiable": (Adam, dict(differentiable=True, maximize=True)),
}


def options(optimizer):
    """Of the groups of a state dict, but for the parameters."""
    groups = optimizer.state_dict()["param_groups"]
    return [{k: x for k, x in group.items() if k != "params"} for group in groups]


def groups(ps):
    return [dict(params=ps[:2]), dict(params=ps[2:], lr=0.1, weight_decay=0.3)]


def matrices(value=1.0):
    return [torch.nn.Parameter(value * torch.cos(torch.arange(12.0)).view(4, 3)) for _ in range(3)]


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("capturable", [False, True])
def test_options_of_torchs_come_back_from_ours(training, name, capturable):
    make, given = TORCHS[name]
    theirs = make(groups(training.parameters()), **given)
    ours = AdamW(groups(training.parameters()), capturable=capturable)
    ours.load_state_dict(as_file(theirs.state_dict()))
    for through in (ours, copy.deepcopy(ours)):
        back = make(groups(training.parameters()))
        back.load_state_dict(as_file(through.state_dict()))
        assert options(back) == options(theirs)
    assert all(group["capturable"] == capturable for group in ours.param_groups)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_torchs_foreach_goes_on_after_ours_were_capturable(training, name, scheduled):
    """It takes no tensor for a rate."""
    make = getattr(torch.optim, name)
    whole, ps = training.parameters(), training.parameters()
    theirs = make(groups(ps), lr=1, foreach=True)
    training.run(lambda _: theirs, ps, 1)
    ours = AdamW(groups(ps), capturable=True)
    ours.load_state_dict(as_file(theirs.state_dict()))
    training.run(lambda _: ours, ps, 1, first=1)
    if scheduled:
        ours.param_groups[0]["lr"].mul_(0.5)
    back = make(groups(ps))
    back.load_state_dict(as_file(copy.deepcopy(ours).state_dict()))
    training.run(lambda _: back, ps, 1, first=2)
    expected = make(groups(whole), lr=1, foreach=True)
    training.run(lambda _: expected, whole, 2)
    if scheduled:
        expected.param_groups[0]["lr"] *= 0.5
    training.run(lambda _: expected, whole, 1, first=2)
    assert_near(ps, whole)
    assert back.param_groups[1]["lr"] == 0.1
    assert not any(isinstance(group["lr"], torch.Tensor) for group in back.param_groups)


@pytest.mark.parametrize("decoupled", [True, False])
def test_decay_of_ours_comes_back_from_torchs_adam(training, backend, decoupled):
    """And every optimizer on the way takes the same steps."""
    made = dict(lr=0.05, weight_decay=0.5)
    whole = training.parameters()
    training.run(Adam, whole, 6, decoupled_weight_decay=decoupled, **made)
    ps = training.parameters()
    first = training.run(AdamW, ps, 2, decoupled_weight_decay=decoupled, backend=backend, **made)
    theirs = Adam(ps)
    theirs.load_state_dict(as_file(first.state_dict()))
    training.run(lambda _: theirs, ps, 2, first=2)
    last = AdamW(ps, decoupled_weight_decay=not decoupled, backend=backend)
    last.load_state_dict(as_file(theirs.state_dict()))
    training.run(lambda _: last, ps, 2, first=4)
    assert last.decoupled_weight_decay == decoupled
    assert_near(ps, whole)


def test_groups_may_decay_in_both_ways(training, backend, device):
    def made(make, ps, **given):
        half = [dict(params=ps[::2], decoupled_weight_decay=False), dict(params=ps[1::2])]
        return make(half, lr=0.05, weight_decay=0.5, **given)

    ps, twin = (training.parameters(device=device) for _ in range(2))
    ours = made(AdamW, ps, backend=backend, max_grad_norm=100.0)
    theirs = made(Adam, twin, decoupled_weight_decay=True)
    for step in range(3):
        # An option may change between steps, as all others.
        if step == 2:
            for optimizer in (ours, theirs):
                optimizer.param_groups[1]["decoupled_weight_decay"] = False
        for some, optimizer in ((ps, ours), (twin, theirs)):
            training.give_gradients(some, step)
            optimizer.step()
        squares = sum(p.grad.double().square().sum() for p in ps)
        assert torch.equal(ours.grad_norm, squares.sqrt().float())
    assert_near(ps, twin)


def test_state_dict_of_before_there_was_the_option_leaves_it(training):
    saved = training.run(AdamW, training.parameters(), 1).state_dict()
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    for decoupled in (True, False):
        optimizer = AdamW(training.parameters(), decoupled_weight_decay=decoupled)
        optimizer.load_state_dict(saved)
        assert optimizer.decoupled_weight_decay == decoupled


def test_adams_decay_is_refused_where_decay_is_decoupled():
    some = torch.nn.Linear(3, 2)
    optimizer = DeepNestedOptimizer(some)
    ps = [group["params"] for group in optimizer.param_groups]
    saved = Adam([{"params": x} for x in ps], weight_decay=0.1).state_dict()
    with pytest.raises(ValueError, match="decoupled_weight_decay must be True, got False"):
        optimizer.load_state_dict(saved)
    # Without decay there is no difference.
    optimizer.load_state_dict(Adam([{"params": x} for x in ps]).state_dict())


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_options_that_nested_groups_do_not_have_are_refused(name):
    some = torch.nn.Linear(3, 2)
    optimizer = DeepNestedOptimizer(some)
    grouping = [dict(params=group["params"]) for group in optimizer.param_groups]
    for make in (torch.optim.AdamW, AdamW):
        saved = make(grouping, **{name: True}).state_dict()
        with pytest.raises(ValueError, match=f"{name} must be False, got True"):
            optimizer.load_state_dict(saved)
    grouping[1][name] = True
    with pytest.raises(ValueError, match=f"{name} must be False, got True"):
        DeepNestedOptimizer(some, grouping=grouping)
    assert not any(group.get(name) for group in optimizer.param_groups)


MUONS = [
    {},
    dict(adjust_lr_fn="original", eps=1e-5),
    dict(adjust_lr_fn="match_rms_adamw", nesterov=False, ns_steps=3),
    dict(ns_coefficients=(3.0, -4.0, 2.0), momentum=0.5),
]


@pytest.mark.parametrize("given", MUONS, ids=str)
def test_options_of_torchs_muon_come_back_from_ours(given):
    theirs = torch.optim.Muon(groups(matrices()), **given)
    ours = Muon(groups(matrices()))
    ours.load_state_dict(as_file(theirs.state_dict()))
    for through in (ours, copy.deepcopy(ours)):
        back = torch.optim.Muon(groups(matrices()))
        back.load_state_dict(as_file(through.state_dict()))
        wanted = options(theirs)
        for found, each in zip(options(back), wanted, strict=True):
            assert {name: found[name] for name in each} == each


@pytest.mark.parametrize("scale", ["output_rms", "adamw_rms", "none"])
def test_scale_of_ours_comes_back_from_torchs_muon(training, scale):
    """Which scales as ours does meanwhile."""
    twin = matrices()
    ours, theirs = Muon(matrices(), lr=0.05, scale=scale), torch.optim.Muon(twin)
    theirs.load_state_dict(as_file(ours.state_dict()))
    (group,) = theirs.param_groups
    for shape in ((4, 3), (3, 4), (1, 7)):
        expected = torch.optim._muon._adjust_lr(1.0, group["adjust_lr_fn"], torch.Size(shape))
        assert ours._scale_of(*shape, ours.param_groups[0]) == expected
    training.give_gradients(twin, 0)
    theirs.step()
    assert not any(map(torch.equal, twin, matrices()))
    back = Muon(matrices())
    back.load_state_dict(as_file(theirs.state_dict()))
    assert back.param_groups[0]["scale"] == scale
    assert back.param_groups[0]["ns_dtype"] == torch.bfloat16


def test_adjustment_that_changes_in_torchs_muon_is_taken():
    ours, theirs = Muon(matrices()), torch.optim.Muon(matrices())
    theirs.load_state_dict(ours.state_dict())
    theirs.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["scale"] == "adamw_rms"
    # And one of ours since.
    ours.param_groups[0]["scale"] = "output_rms"
    assert ours.state_dict()["param_groups"][0]["adjust_lr_fn"] == "original"


def test_unknown_adjustment_of_muon_is_refused():
    ours = Muon(matrices())
    saved = ours.state_dict()
    saved["param_groups"][0]["adjust_lr_fn"] = "twice"
    with pytest.raises(ValueError, match=r"adjust_lr_fn must be .* got 'twice'"):
        ours.load_state_dict(saved)


def test_copy_of_a_pickle_of_before_there_was_the_option(training):
    optimizer = training.run(AdamW, training.parameters(), 1, decoupled_weight_decay=False)
    state = optimizer.__getstate__()
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    del state["defaults"]["decoupled_weight_decay"]
    state["decoupled_weight_decay"] = False
    other = AdamW.__new__(AdamW)
    other.__setstate__(state)
    for each in (optimizer, other):
        training.run(lambda _, each=each: each, each.param_groups[0]["params"], 1)
    assert not other.decoupled_weight_decay
    assert_equal(*(each.param_groups[0]["params"] for each in (optimizer, other)))
