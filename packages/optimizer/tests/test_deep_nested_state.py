"""DeepNestedOptimizer's state: copies and resumed training to the bit, state dicts of others, and
bad ones, of which nothing is taken.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from fusewright.optimizer import AdamW
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer
from torch.utils import _pytree as pytree

from .compared import as_file, assert_equal, assert_near
from .nested import NAN, give, model, optimizer_of

UPDATES = ("adamw", "continuum")
TRAINING = dict(mode="simple", meta_update_freq=3, meta_lr=0.05, frequencies=(1, 3))


def copied(some, optimizer, way, **options):
    """Model and optimizer again, in the way of a copy."""
    if way == "deepcopy":
        return copy.deepcopy((some, optimizer))
    if way == "pickle":
        return pickle.loads(pickle.dumps((some, optimizer)))
    other = copy.deepcopy(some)
    twin = DeepNestedOptimizer(other, 0.5, **options)
    state = optimizer.state_dict()
    twin.load_state_dict(as_file(state) if way == "file" else state)
    return other, twin


def numbers(optimizer):
    """Copies of everything that a state dict has."""
    return copy.deepcopy(pytree.tree_leaves(optimizer.state_dict()))


def assert_same(found, expected):
    tensors = [[x for x in some if isinstance(x, torch.Tensor)] for some in (found, expected)]
    torch.testing.assert_close(*tensors, rtol=0.0, atol=0.0, equal_nan=True)
    others = [[x for x in some if not isinstance(x, torch.Tensor)] for some in (found, expected)]
    assert others[0] == others[1]


@pytest.mark.sampled
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy", "pickle"])
@pytest.mark.parametrize("saved", [4, 6], ids=["after-4", "before-training"])
def test_training_goes_on_from_a_copy(update, way, saved):
    options = TRAINING | dict(update=update, controller_update_freq=2, meta_update_freq=7)
    some = model()
    optimizer = optimizer_of(some, **options)
    for step in range(1, saved + 1):
        optimizer.step(give(some, step))
    other, twin = copied(some, optimizer, way, **options)
    assert twin.global_step == saved
    untrained = [x.detach().clone() for x in optimizer.controller.parameters()]
    for step in range(saved + 1, 16):
        a = optimizer.step(give(some, step))
        b = twin.step(give(other, step))
        assert_same([*a.values()], [*b.values()])
        assert_equal(some.parameters(), other.parameters())
        assert_equal(optimizer.controller.parameters(), twin.controller.parameters())
    assert not any(map(torch.equal, untrained, optimizer.controller.parameters()))


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["file", "deepcopy"])
@pytest.mark.parametrize("without", [(), ("norm.weight", "layers.0.bias")], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_training_goes_on_from_a_copy_right_before_it_learns(device, dtype, without, way):
    """Whose hypergradient is through the step before the copy, of the parameters that it moved."""
    options = dict(backend="triton", weight_decay=0.1, state_dtype=torch.float32, **TRAINING)
    some = model(dtype, device)
    # Of two dtypes are two launches.
    some.norm.float()
    optimizer = optimizer_of(some, **options)
    for step in (1, 2):
        loss = give(some, step)
        for name in without if step == 2 else ():
            some.get_parameter(name).grad = None
        optimizer.step(loss)
    other, twin = copied(some, optimizer, way, **options)
    # A copy of what was loaded and not yet used.
    other, twin = copied(other, twin, way, **options)
    found = []
    for each, its in ((some, optimizer), (other, twin)):
        loss = give(each, 4)
        gradients = [p.grad for p in its._all_parameters()]
        found.append(its._mode.hypergradient(its.param_groups, gradients))
        its.step(loss)
        its.step(give(each, 6))
    assert found[0].abs().min().item() > 0.0
    assert torch.equal(*found)
    assert_equal(optimizer.controller.parameters(), twin.controller.parameters())
    assert_equal(some.parameters(), other.parameters())


def test_numbers_of_a_step_are_those_of_the_kernels():
    from fusewright.optimizer.common.tiles_step import NUMBERS
    from fusewright.optimizer.nested.adamw_mode import STEP_NUMBERS

    assert NUMBERS.value == STEP_NUMBERS


@pytest.mark.parametrize("update", UPDATES)
def test_group_added_before_training_leaves_the_others_hypergradient(device, update):
    some = model(torch.float32, device)
    optimizer = optimizer_of(some, update=update, **TRAINING)
    for step in (1, 2):
        optimizer.step(give(some, step))
    gradients = [p.grad for p in optimizer._all_parameters()]
    expected = optimizer._mode.hypergradient(optimizer.param_groups, gradients)
    later = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer.add_param_group({"params": [later], "name": "later", "depth": 1.0})
    gradients.append(torch.ones_like(later))
    found = optimizer._mode.hypergradient(optimizer.param_groups, gradients)
    assert torch.equal(found[:2], expected)
    assert found[2].item() == 0.0


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("update", UPDATES)
def test_step_without_gradients_has_no_norm_and_no_hypergradient(device, update, backend):
    some = model(torch.float32, device)
    optimizer = optimizer_of(some, update=update, backend=backend)
    optimizer.step(give(some, 1))
    gradients = [p.grad for p in optimizer._all_parameters()]
    assert optimizer._mode.hypergradient(optimizer.param_groups, gradients).all()
    assert optimizer.step(NAN)["skipped"].item()
    optimizer.zero_grad()
    out = optimizer.step(1.0)
    assert not out["skipped"].item()
    assert out["grad_norm"].isnan().item()
    assert optimizer.skipped_steps.item() == 1
    _, twin = copied(some, optimizer, "deepcopy")
    for each in (optimizer, twin):
        assert not each._mode.hypergradient(each.param_groups, gradients).any()


def test_state_of_torchs_adamw_is_taken():
    some = model(torch.float32)
    optimizer = DeepNestedOptimizer(some, 0.02)
    plain = torch.optim.AdamW(
        [{"params": group["params"]} for group in optimizer.param_groups], 0.1
    )
    give(some, 1)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    p = some.norm.weight
    assert torch.equal(optimizer.state[p]["exp_avg"], plain.state[p]["exp_avg"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["name"] for group in optimizer.param_groups] == ["embed", "core"]
    optimizer.step(give(some, 2))
    assert optimizer.state[p]["step"].item() == 2


def taken(update="adamw", **options):
    """An optimizer after two steps, right before it learns."""
    some = model()
    optimizer = optimizer_of(some, update=update, **TRAINING | options)
    for step in (1, 2):
        optimizer.step(give(some, step))
    return optimizer


def assert_refused(optimizer, state, message):
    before = numbers(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same(numbers(optimizer), before)


@pytest.mark.parametrize("options", [{"controller_hidden_dim": 16}, {"controller_num_layers": 1}])
@pytest.mark.parametrize("update", UPDATES)
def test_state_of_another_controller_is_refused(update, options):
    state = taken(update, **options).state_dict()
    assert_refused(taken(update), state, r"nested\.controller.* must .*got")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequencies": (1, 2, 4)}, "must have momentum_0, momentum_1, sum_1, got momentum_0,"),
        ({"frequencies": (1, 1)}, "must have momentum_0, momentum_1, sum_1, got momentum_0,"),
        ({"momentum_hidden_dim": 4}, r"nested\.continuum\.network\.layers\.0\.weight must be"),
        ({"preprocessing": False}, r"nested\.continuum\.network.* must"),
    ],
    ids=str,
)
def test_state_of_another_continuum_is_refused(options, message):
    assert_refused(taken("continuum"), taken("continuum", **options).state_dict(), message)


def test_state_of_another_update_is_refused():
    adamw, continuum = taken("adamw"), taken("continuum")
    wanted = 'state of update="adamw" must have step, exp_avg, exp_avg_sq, got momentum_0,'
    assert_refused(adamw, continuum.state_dict(), wanted)
    wanted = 'state of update="continuum" must have momentum_0, momentum_1, sum_1, got step,'
    assert_refused(continuum, adamw.state_dict(), wanted)
    groups = [{"params": group["params"]} for group in continuum.param_groups]
    assert_refused(continuum, AdamW(groups).state_dict(), "nested must have .*, got None")
    # Before the first step there is no state that tells.
    fresh = [optimizer_of(model(), update=update) for update in UPDATES]
    assert_refused(adamw, fresh[1].state_dict(), r"nested\.\w+ must .*got")
    assert_refused(continuum, fresh[0].state_dict(), r"nested\.\w+ must .*got")


BAD = {
    "shape": (("state", 0, "exp_avg", torch.ones(2, 2)), "exp_avg of parameter 0 must have shape"),
    "no tensor": (("state", 0, "exp_avg", 3.0), "exp_avg of parameter 0 must be a tensor, got 3.0"),
    "name": (
        ("state", 0, "momentum", torch.ones(4, 3)),
        "state of .* must have step, exp_avg, exp_avg_sq, got .*momentum of parameter 0",
    ),
    "lacking": (
        ("state", 0, {"step": torch.ones(()), "exp_avg": torch.ones(4, 3)}),
        "must have step, exp_avg, exp_avg_sq, got step, exp_avg of parameter 0",
    ),
    "nested": (
        ("nested", {"global_step": 3}),
        "nested must have global_step, multipliers,.* got g",
    ),
    "no nested": (("nested", None), "nested must have .* got None"),
    "step": (
        ("nested", "global_step", -1),
        "nested.global_step must be at least 0, got -1",
    ),
    "groups": (
        ("nested", "rates", torch.ones(3)),
        r"rates must be a tensor of \[2\], got one of \[",
    ),
    "results": (("nested", "results", []), "nested.results must be a list of 3, got 0"),
    "result": (("nested", "results", 0, torch.ones(1)), r"results\[0\] must be a tensor of \[\],"),
    "training": (("nested", "training", "optimizer", {}), "must be the state dict of an AdamW"),
    "trained": (
        ("nested", "training", "optimizer", "param_groups", [{"lr": 1.0}]),
        "must be the state dict of an AdamW over parameters like .* got one with this fault",
    ),
    "record": (("nested", "training", "losses", torch.ones(2)), "training.losses must be a tensor"),
    "continuum": (("nested", "continuum", {}), "nested.continuum must be None"),
    "last": (("nested", "last", None), "nested.last must have gradients, numbers, got None"),
    "gradients": (("nested", "last", "gradients", [None]), "last.gradients must be a list of 8,"),
    "dtype": (("nested", "last", "gradients", 3 * [1, None] + [1, 1]), "must be a floating dtype"),
    "numbers": (
        ("nested", "last", "numbers", torch.ones(8)),
        r"numbers must be a tensor of \[8, 8",
    ),
}
BAD_CONTINUA = {
    "continuum": (("nested", "continuum", None), "continuum must have network, trainer, previous"),
    "network": (("nested", "continuum", "network", {}), "continuum.network must have layers.0.wei"),
    "trainer": (("nested", "continuum", "trainer", None), "must be the state dict of an AdamW"),
    "previous": (
        ("nested", "continuum", "previous", torch.ones(2, 2)),
        "previous must be a tensor of",
    ),
    "directions": (("nested", "last", "directions", []), "directions must be a list of 8, got 0"),
    "direction": (
        ("nested", "last", "directions", 0, torch.ones(1)),
        r"directions\[0\] must be a tensor of \[4, 3\], got one of \[1\] in torch.float32",
    ),
}


@pytest.mark.parametrize(
    ("update", "bad"),
    [("adamw", name) for name in BAD] + [("continuum", name) for name in BAD_CONTINUA],
)
def test_bad_state_is_refused_and_nothing_is_taken(update, bad):
    (*names, value), message = (BAD if update == "adamw" else BAD_CONTINUA)[bad]
    optimizer, other = taken(update), taken(update)
    other.step(give(model(), 4))
    other.param_groups[0]["lr"] = 0.7
    state = copy.deepcopy(other.state_dict())
    *way, last = names
    place = state
    for name in way:
        place = place[name]
    place[last] = value
    assert_refused(optimizer, state, message)


def two_groups(device="cpu", **options):
    draws = [torch.cos(torch.arange(9.0, device=device) * k).view(3, 3) for k in (1, 2, 3)]
    ps = [torch.nn.Parameter(x) for x in draws]
    named = [(f"layers.{number}.weight", p) for number, p in enumerate(ps)]
    grouping = [dict(params=ps[:1], depth=0.0), dict(params=ps[1:], depth=1.0)]
    optimizer = optimizer_of(named, grouping=grouping, **TRAINING | options)
    return ps, optimizer


def train(ps, optimizer, first, last):
    for step in range(first, last):
        for number, p in enumerate(ps):
            p.grad = torch.sin(p.detach() * (step + number + 2))
        optimizer.step(3.0 / (1 + step))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("way", ["itself", "state_dict", "deepcopy", "pickle", "group"])
@pytest.mark.parametrize("frequency", [2, 3], ids=["", "right-before-it-learns"])
def test_group_without_parameters_is_as_one_without_gradients(update, way, frequency):
    found = []
    for emptied in (True, False):
        ps, optimizer = two_groups(update=update, meta_update_freq=frequency)
        train(ps, optimizer, 1, 3)
        first, rest = ps[0], ps[1:]
        if emptied:
            optimizer.param_groups[0]["params"] = []
            del optimizer.state[first]
        first.grad = None
        if way == "state_dict":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif way == "group":
            more = torch.nn.Parameter(torch.ones(2, 2))
            optimizer.add_param_group(dict(params=[more]))
            rest = [*rest, more]
        elif way == "deepcopy":
            rest, optimizer = copy.deepcopy((rest, optimizer))
        elif way == "pickle":
            rest, optimizer = pickle.loads(pickle.dumps((rest, optimizer)))
        train(rest, optimizer, 3, 7)
        found.append([*rest, *optimizer.controller.parameters()])
        found[-1] += optimizer.get_lr_multipliers().values()
    assert_equal(*found)


def removed(groups):
    groups[1]["params"] += groups.pop(0)["params"]


def appended(groups):
    groups.append({**groups[1], "name": "more", "params": [groups[1]["params"].pop()]})


def deeper(groups):
    groups[0]["depth"] = 0.25


CHANGES = removed, appended, deeper, list.reverse


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("change", CHANGES, ids=[x.__name__ for x in CHANGES])
def test_other_groups_than_rates_are_of_are_refused(update, change):
    ps, optimizer = two_groups(update=update)
    train(ps, optimizer, 1, 3)
    change(optimizer.param_groups)
    before = numbers(optimizer)
    more = torch.nn.Parameter(torch.ones(2))
    calls = (
        lambda: optimizer.step(1.0),
        lambda: optimizer.meta_update(sum((p * p).sum() for p in ps)),
        lambda: optimizer.add_param_group(dict(params=[more])),
    )
    for call in calls:
        with pytest.raises(ValueError, match="groups must be group_0 of depth 0, group_1 of depth"):
            call()
    assert_same(numbers(optimizer), before)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("way", ["itself", "state_dict", "deepcopy", "twice"])
def test_parameters_may_leave_their_lists_right_before_it_learns(update, way, backend, device):
    """And copies know then, by parameter, what moved in the last step."""
    found = []
    for left in (True, False):
        ps, optimizer = two_groups(update=update, backend=backend, device=device)
        train(ps[1:], optimizer, 1, 3)
        second, third = ps[1:]
        if left:
            optimizer.param_groups[0]["params"].clear()
            optimizer.param_groups[1]["params"].reverse()
        for _ in range(2 if way == "twice" else 1):
            if way in ("state_dict", "twice"):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif way == "deepcopy":
                (second, third), optimizer = copy.deepcopy(((second, third), optimizer))
        train([second, third], optimizer, 3, 5)
        found.append([second, third, *optimizer.controller.parameters()])
    assert_near(*found)
    assert not torch.equal(found[0][-1], torch.zeros_like(found[0][-1]))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_state_dict_of_right_after_a_group_was_added_is_taken(update, backend, device):
    found = []
    for saved in (True, False):
        ps, optimizer = two_groups(update=update, backend=backend, device=device)
        train(ps, optimizer, 1, 3)
        more = torch.nn.Parameter(torch.ones(2, 2, device=device))
        optimizer.add_param_group(dict(params=[more]))
        if saved:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train([*ps, more], optimizer, 3, 5)
        found.append([*ps, more, *optimizer.controller.parameters()])
    assert_equal(*found)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_loaded_state_is_saved_again_after_it_has_learned(update, backend, device):
    ps, optimizer = two_groups(update=update, backend=backend, device=device, mode="explicit")
    train(ps, optimizer, 1, 3)
    expected = pytree.tree_leaves(copy.deepcopy(optimizer.state_dict()["nested"]["last"]))
    for _ in range(3):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.meta_update(sum((p * p).sum() for p in ps))
        # The controller learns, what it learns from stays.
        assert_same(pytree.tree_leaves(optimizer.state_dict()["nested"]["last"]), expected)


@pytest.mark.parametrize("update", UPDATES)
def test_refused_step_after_a_parameter_left_its_group_changes_nothing(update):
    ps, optimizer = two_groups(update=update)
    train(ps, optimizer, 1, 2)
    optimizer.param_groups[0]["params"].clear()
    del optimizer.state[ps[0]]
    before = numbers(optimizer)
    ps[2].grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(TypeError, match="a gradient must be a strided tensor"):
        optimizer.step(1.0)
    assert_same(numbers(optimizer), before)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("loaded", [False, True])
def test_parameter_that_left_its_group_is_freed_by_the_next_step(update, loaded):
    ps, optimizer = two_groups(update=update)
    train(ps, optimizer, 1, 3)
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    left = weakref.ref(ps[0])
    del optimizer.state[ps[0]], optimizer.param_groups[0]["params"][:], ps[0]
    train(ps, optimizer, 3, 4)
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("update", UPDATES)
def test_loaded_state_follows_parameters_into_other_groups(update):
    ps, optimizer = two_groups(update=update)
    train(ps, optimizer, 1, 3)
    for group, its in zip(optimizer.param_groups, (ps[2:], ps[:2]), strict=True):
        group["params"] = its
    expected = [sorted(copy.deepcopy(optimizer.state[p]).items()) for p in ps]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for p, pieces in zip(ps, expected, strict=True):
        assert_same([x for _, x in sorted(optimizer.state[p].items())], [x for _, x in pieces])
