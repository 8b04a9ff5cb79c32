"""torch.distributed.checkpoint with every optimizer: training that was saved goes on in fresh
objects with the bits of training that was not interrupted; and FSDP2, which some refuse.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusewright.optimizer import M3, AdamW, DeepNestedOptimizer, LearnedOptimizer, Muon, VeLO
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from .compared import as_file, assert_equal
from .kinds import NAMES, Kind

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

BREAK, STEPS = 5, 9
UPDATES = {
    "nested": {},
    "nested-explicit": dict(mode="explicit"),
    "continuum": dict(update="continuum", frequencies=(1, 2)),
    "continuum-scalars": dict(update="continuum", frequencies=(2, 3), preprocessing=False),
}
WAYS = {
    "shards": {},
    "whole": dict(full_state_dict=True),
    "offloaded": dict(full_state_dict=True, cpu_offload=True),
    "flat": dict(flatten_optimizer_state_dict=True),
}


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[*NAMES, *UPDATES])
def case(request, learned):
    """An optimizer of a model, with networks of other weights for each seed but VeLO's and the
    learned optimizer's, which are not the optimizer's to save; and whether its step takes a loss.
    """
    name = request.param
    if name in UPDATES:
        options = dict(meta_update_freq=2, meta_lr=0.05) | UPDATES[name]

        def make(model, seed):
            torch.manual_seed(seed)
            return DeepNestedOptimizer(model, **options)

        return make, True
    kind = Kind(name, "reference", learned)
    return lambda model, seed: kind(list(model.parameters())), kind.takes_loss


def new_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers)


def train(model, optimizer, takes_loss, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step(*(loss,) * takes_loss)
        if getattr(optimizer, "options", None) and optimizer.options.mode == "explicit":
            held_out = torch.randn(6, 5, generator=generator)
            optimizer.meta_update(lambda x=held_out: model(x).square().mean())


def numbers(model, optimizer):
    """Everything that training leaves."""
    found = [*model.state_dict().values()]
    for p in model.parameters():
        found += [x for _, x in sorted(optimizer.state[p].items())]
    if hasattr(optimizer, "controller"):
        found += [*optimizer.controller.parameters(), *optimizer.get_lr_multipliers().values()]
    return [x.detach().clone() for x in (*found, *getattr(optimizer, "losses", ()))]


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(case, way, tmp_path):
    make, takes_loss = case
    options = StateDictOptions(**WAYS[way])
    model = new_model()
    optimizer = make(model, 1)
    train(model, optimizer, takes_loss, 0, BREAK)
    names = "model", "optimizer"
    saved = get_state_dict(model, optimizer, options=options)
    # Without a process group: one process.
    dcp.save(dict(zip(names, saved, strict=True)), checkpoint_id=tmp_path)
    train(model, optimizer, takes_loss, BREAK, STEPS)

    other = new_model()
    torch.nn.init.zeros_(other[0].weight)
    twin = make(other, 2)
    with warnings.catch_warnings():
        # Nothing is said about a step without a loss.
        warnings.simplefilter("error", RuntimeWarning)
        parts = get_state_dict(other, twin, options=options)
    loaded = dict(zip(names, parts, strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        other,
        twin,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    train(other, twin, takes_loss, BREAK, STEPS)
    assert_equal(numbers(model, optimizer), numbers(other, twin))


def test_state_dict_in_memory_goes_on_with_the_same_bits(case):
    make, takes_loss = case
    model = new_model()
    optimizer = make(model, 1)
    train(model, optimizer, takes_loss, 0, BREAK)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    twin = make(other, 2)
    set_optimizer_state_dict(other, twin, saved)
    for each, its in ((model, optimizer), (other, twin)):
        train(each, its, takes_loss, BREAK, STEPS)
    assert_equal(numbers(model, optimizer), numbers(other, twin))


@pytest.mark.parametrize("name", ["velo", *UPDATES])
def test_first_group_may_be_empty(name, learned):
    """torch.distributed.checkpoint keeps no options of it."""
    found = []
    networks = learned.velo_networks()

    def made(model, seed):
        first, rest = ([*part.parameters()] for part in (model[0], model[2]))
        groups = [dict(params=first), dict(params=rest)]
        torch.manual_seed(seed)
        if name == "velo":
            optimizer = VeLO(groups, networks, 20)
        else:
            options = dict(meta_update_freq=2, meta_lr=0.05) | UPDATES[name]
            optimizer = DeepNestedOptimizer(model, grouping=groups, **options)
        empty, whole = optimizer.param_groups
        empty["params"], whole["params"] = [], [*first, *rest]
        return optimizer

    model = new_model()
    optimizer = made(model, 1)
    train(model, optimizer, True, 0, BREAK)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    twin = made(other, 2)
    set_optimizer_state_dict(other, twin, saved)
    for each, its in ((model, optimizer), (other, twin)):
        train(each, its, True, BREAK, STEPS)
        found.append(numbers(each, its))
    assert_equal(*found)


@pytest.mark.parametrize("name", ["velo", "nested", "continuum"])
def test_groups_that_lose_what_is_of_no_parameter_are_refused(name, learned):
    """torch.distributed.checkpoint gives options to groups by their parameters, the last ones."""
    model = new_model()
    ps = [*model.parameters()]

    def made(first):
        groups = [dict(params=ps[:first]), dict(params=ps[first:])]
        if name == "velo":
            return VeLO(groups, learned.velo_networks(), 20)
        return DeepNestedOptimizer(model, grouping=groups, **UPDATES[name])

    optimizer, other = made(2), made(1)
    train(model, optimizer, True, 0, 2)
    saved = get_optimizer_state_dict(model, optimizer)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match='must have "optimizer_state" in one of its groups, got'):
        set_optimizer_state_dict(model, other, saved)


# What groups have in state dicts by now and did not have from the first.
LATER = {
    "adamw": ("decoupled_weight_decay",),
    "muon": ("adjust_lr_fn", "eps"),
    "velo": ("optimizer_state",),
    "nested": ("decoupled_weight_decay", "optimizer_state"),
    "continuum": ("decoupled_weight_decay", "optimizer_state"),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("flat", [False, True], ids=["shards", "flat"])
def test_checkpoint_of_before_there_was_an_option_loads_in_part(name, flat, tmp_path, learned):
    takes_loss = "optimizer_state" in LATER[name]

    def made():
        model = new_model()
        if name in UPDATES:
            return model, DeepNestedOptimizer(model, **UPDATES[name])
        return model, Kind(name, "reference", learned)(list(model.parameters()))

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (other, twin) = made(), made()
    train(model, optimizer, takes_loss, 0, BREAK)
    torch.nn.init.zeros_(other[0].weight)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    for group in [state] if flat else state["param_groups"]:
        for key in [*group]:
            # Of a flat one with a parameter's name before it.
            option = key.rpartition(".")[2]
            if option in LATER[name]:
                del group[key]
            elif option == "ns_dtype":
                group[key] = torch.bfloat16
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    names = "model", "optimizer"
    found = dict(zip(names, get_state_dict(other, twin, options=options), strict=True))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: opt"):
        dcp.load(found, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=tmp_path, planner=planner)
    loaded = dict(model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    set_state_dict(other, twin, **loaded, options=options)
    if not takes_loss:
        for each, its in ((model, optimizer), (other, twin)):
            train(each, its, False, BREAK, STEPS)
    # Losses and controllers were in no such checkpoint.
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == twin.state[q].keys()
        assert_equal(optimizer.state[p].values(), twin.state[q].values())


@pytest.mark.parametrize("name", ["velo", *UPDATES])
def test_allocation_before_loading_has_no_other_effect(name, learned):
    """So that the state of an optimizer that has none tells of no step."""
    model, other = new_model(), new_model()
    if name == "velo":
        networks = learned.velo_networks()
        pair = [VeLO(x.parameters(), networks, 20, lr=0.2) for x in (model, other)]
    else:
        pair = []
        for each in (model, other):
            torch.manual_seed(1)
            options = dict(meta_update_freq=2, meta_lr=0.05) | UPDATES[name]
            pair.append(DeepNestedOptimizer(each, **options))
    get_optimizer_state_dict(model, pair[0])
    assert all(pair[0].state[p] for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    for each, optimizer in zip((model, other), pair, strict=True):
        train(each, optimizer, True, 0, BREAK)
    assert_equal(numbers(model, pair[0]), numbers(other, pair[1]))


def test_velo_without_a_loss_is_refused_at_any_other_rate(learned):
    model = new_model()
    optimizer = VeLO(model.parameters(), learned.velo_networks(), 20)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for call in (optimizer.step, lambda: optimizer.step(closure=None)):
        with pytest.raises(TypeError, match=r"step needs the loss, .* got None"):
            call()
    assert not optimizer.state
    assert optimizer.step(closure=lambda: 2.0) == 2.0
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(TypeError, match=r"step needs the loss, .* got None"):
        optimizer.step()


def test_nested_step_at_a_rate_of_zero_counts_where_it_has_a_loss():
    model = new_model()
    optimizer = DeepNestedOptimizer(model, 0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert optimizer.step(1.0)["global_step"].item() == 1
    assert optimizer.state[model[0].weight]["step"].item() == 1


@pytest.mark.parametrize("name", ["velo", *UPDATES])
def test_plain_state_dict_has_what_is_of_no_parameter_in_its_old_place(name, learned):
    model = new_model()
    if name == "velo":
        optimizer, key = VeLO(model.parameters(), learned.velo_networks(), 20), "losses"
    else:
        optimizer, key = DeepNestedOptimizer(model, **UPDATES[name]), "nested"
    train(model, optimizer, True, 0, 2)
    saved = as_file(optimizer.state_dict())
    assert key in saved
    # Of before it was among a group's options, too.
    for group in saved["param_groups"]:
        assert group.pop("optimizer_state", None) is None or group is saved["param_groups"][0]
    expected = numbers(model, optimizer)
    train(model, optimizer, True, 2, 3)
    optimizer.load_state_dict(saved)
    found = numbers(model, optimizer)
    count = len(model.state_dict())
    assert_equal(found[count:], expected[count:])


@pytest.mark.parametrize("make", [Muon, M3])
def test_dtypes_that_are_saved_by_name_come_back(make):
    ps = [torch.nn.Parameter(torch.ones(3, 2))]
    optimizer = make(ps)
    for dtype in (torch.float32, None, torch.bfloat16):
        optimizer.param_groups[0]["ns_dtype"] = dtype
        saved = as_file(optimizer.state_dict())
        twin = make(ps, ns_dtype=torch.float64)
        twin.load_state_dict(saved)
        assert twin.param_groups[0]["ns_dtype"] is dtype
        # Of before it was saved by name.
        saved["param_groups"][0]["ns_dtype"] = dtype
        twin.load_state_dict(saved)
        assert twin.param_groups[0]["ns_dtype"] is dtype
    saved["param_groups"][0]["ns_dtype"] = "torch.int8"
    with pytest.raises(TypeError, match="dtype must be floating"):
        twin.load_state_dict(saved)


def test_sharded_parameters_are_taken_or_refused(case, one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    make, takes_loss = case
    model, plain = new_model(), new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    expected = make(plain, 1)
    takes = isinstance(expected, AdamW | LearnedOptimizer | M3 | Muon | VeLO)
    if isinstance(expected, DeepNestedOptimizer):
        takes = expected.options.update == "adamw" and expected.options.mode == "simple"
    if not takes:
        with pytest.raises(TypeError, match="got a DTensor"):
            make(model, 1)
        return
    optimizer = make(model, 1)
    train(model, optimizer, takes_loss, 0, BREAK)
    train(plain, expected, takes_loss, 0, BREAK)
    saved = get_optimizer_state_dict(model, optimizer)
    twin = make(model, 1)
    set_optimizer_state_dict(model, twin, saved)
    train(model, twin, takes_loss, BREAK, STEPS)
    train(plain, expected, takes_loss, BREAK, STEPS)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


def test_features_of_a_caller_stay_the_callers(learned):
    model = new_model()
    mlp = learned.network(extra=2)
    optimizer, twin = (
        LearnedOptimizer(model.parameters(), mlp, extra_features=torch.ones(2)) for _ in range(2)
    )
    train(model, optimizer, False, 0, 1)
    set_optimizer_state_dict(model, twin, get_optimizer_state_dict(model, optimizer))
    assert twin.param_groups[0]["extra_features"] is not None
    train(model, twin, False, 1, 2)
