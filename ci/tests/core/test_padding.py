"""Weights stored wider than the model has them: state dicts hold them in the model's width."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusewright.example._core.padding import (
    Padded,
    clear_padding_of,
    keep_padding_out,
    padded_width,
    padding_of,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

DIM, WIDTH, BLOCKS = 3, 5, 4
STORED = padded_width(WIDTH)
SHAPES = {"hidden.weight": (BLOCKS * WIDTH, DIM), "output": (2, BLOCKS * WIDTH, 6)}


class Module(nn.Module):
    """A weight padded along its first axis, and one along an axis within it."""

    def __init__(self, width: int = WIDTH, device: str = "cpu") -> None:
        super().__init__()
        stored = padded_width(width)
        self.hidden = nn.Linear(DIM, BLOCKS * stored, bias=False, device=device)
        self.output = nn.Parameter(torch.randn(2, BLOCKS * stored, 6, device=device))
        self.other = nn.Linear(2, 2, device=device)
        self.padded = {
            "hidden.weight": Padded(0, BLOCKS, width, stored),
            "output": Padded(1, BLOCKS, width, stored),
        }
        keep_padding_out(self)
        clear_padding_of(self)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """As they are stored."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def loaded(state: dict[str, Tensor], assign: bool = False, **options: object) -> Module:
    module = Module(**options)
    module.load_state_dict(state, assign=assign)
    return module


def test_state_dict_holds_the_weights_in_the_width_of_the_model():
    module = Module()
    state = module.state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == {
        **SHAPES,
        "other.weight": (2, 2),
        "other.bias": (2,),
    }
    assert all(x.is_contiguous() for x in state.values())
    hidden = module.hidden.weight.view(BLOCKS, STORED, DIM)[:, :WIDTH]
    output = module.output.view(2, BLOCKS, STORED, 6)[:, :, :WIDTH]
    assert torch.equal(state["hidden.weight"].view(hidden.shape), hidden)
    assert torch.equal(state["output"].view(output.shape), output)
    assert not any(x.any() for x in padding_of(module))


def test_full_width_is_saved_and_loaded_as_by_torch():
    module = Module(STORED)
    state = module.state_dict()
    assert state["output"].data_ptr() == module.output.data_ptr()
    other = loaded(state, assign=True, width=STORED)
    assert other.output.data_ptr() == module.output.data_ptr()


@pytest.mark.parametrize("prefix", ["", "0."], ids=["alone", "within"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_dict_makes_the_same_module(assign, prefix, device):
    if device == "meta" and not assign:
        device = "cpu"
    module, other = Module(), Module(device=device)
    if prefix:
        nn.Sequential(other).load_state_dict(nn.Sequential(module).state_dict(), assign=assign)
    else:
        other.load_state_dict(module.state_dict(), assign=assign)
    assert same(module, other)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_weights_saved_with_zero_padding_load(assign):
    module = Module()
    state = parameters(module)
    assert same(loaded(state, assign), module)


@pytest.mark.parametrize("number", [1e-30, float("nan"), float("inf")])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_padding_that_is_not_zero_is_another_width_and_stays_the_callers(assign, name, number):
    state = parameters(Module())
    where = Module().padded[name].beyond(state[name])
    where[(-1,) * where.ndim] = number
    before = copy.deepcopy(state)
    stored, width = tuple(state[name].shape), SHAPES[name]
    with pytest.raises(RuntimeError) as told:
        loaded(state, assign)
    lines = str(told.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        f"size mismatch for {name}: copying a param with shape torch.Size({list(stored)}) from "
        f"checkpoint, the shape in current model is torch.Size({list(width)})."
    ]
    for key, x in state.items():
        assert torch.equal(x.nan_to_num(7.0), before[key].nan_to_num(7.0))


@pytest.mark.parametrize("width", [1, WIDTH - 1, WIDTH + 1, STORED, STORED + 1])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("stored", [False, True], ids=["in-width", "with-padding"])
def test_weights_of_another_width_are_a_size_mismatch(stored, assign, width):
    other = Module(width)
    state = parameters(other) if stored else other.state_dict()
    before = copy.deepcopy(state)
    narrower = stored and width < WIDTH
    if narrower:
        # Zeros are all that they have beyond their width: the same model.
        assert not any(x.any() for x in padding_of(loaded(state, assign)))
        return
    with pytest.raises(RuntimeError, match="size mismatch") as told:
        loaded(state, assign)
    for name in SHAPES:
        assert str(told.value).count(f"size mismatch for {name}:") == 1
    assert "Missing" not in str(told.value)
    for name, x in state.items():
        assert torch.equal(x, before[name])


def test_keys_that_lack_or_are_no_tensors_are_torchs_to_tell():
    module = Module()
    state = module.state_dict()
    del state["output"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "output"'):
        module.load_state_dict(state)
    before = parameters(module)
    module.load_state_dict(state, strict=False)
    assert all(torch.equal(x, before[name]) for name, x in module.named_parameters())
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
        module.load_state_dict({**state, "output": 3.0})


def test_copies_and_pickles_save_and_load_their_own_weights():
    module = Module()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            other.hidden.weight.mul_(2.0)
        state = other.state_dict()
        assert tuple(state["output"].shape) == SHAPES["output"]
        assert torch.equal(state["hidden.weight"], 2.0 * module.state_dict()["hidden.weight"])
        fresh = Module()
        other.load_state_dict(fresh.state_dict())
        assert same(other, fresh)


def test_training_goes_on_from_a_state_dict_and_the_optimizers():
    """An optimizer's states have the shape in which the parameter is stored."""

    def steps(module, optimizer, first, last):
        for step in range(first, last):
            x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
            hidden = module.hidden(x).tanh()
            y = hidden @ module.output.sum(0)
            loss = module.other(y[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def new():
        module = Module()
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)

    module, optimizer = new()
    steps(module, optimizer, 0, 3)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    other, its = new()
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    steps(module, optimizer, 3, 6)
    steps(other, its, 3, 6)
    assert same(module, other)
    assert its.state[other.output]["exp_avg"].shape == other.output.shape
    assert not any(x.any() for x in padding_of(module))


def test_weights_that_are_computed_from_others_are_saved_as_those():
    module = Module()
    weight_norm(module.hidden)
    state = module.state_dict()
    assert tuple(state["output"].shape) == SHAPES["output"]
    other = Module()
    weight_norm(other.hidden)
    other.load_state_dict(state)
    assert same(module, other)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(Module().state_dict())


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FULL = StateDictOptions(full_state_dict=True)


def sharded_from(module: Module, *, like: Module) -> dict[str, Tensor]:
    """The module's state dict in the other's shards."""
    shards = dict(like.named_parameters())
    return {
        name: distribute_tensor(x, shards[name].device_mesh, shards[name].placements)
        for name, x in module.state_dict().items()
    }


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_sharded_weights_are_saved_with_padding_and_load_with_it_and_without(
    group, tmp_path: Path, assign
):
    plain, sharded, other, full = Module(), *(fully_shard(Module()) for _ in range(3))
    sharded.load_state_dict(sharded_from(plain, like=sharded), assign=assign)
    assert same_as_shards(sharded, plain)
    state = sharded.state_dict()
    assert state["output"].shape == plain.output.shape
    dcp.save(state, checkpoint_id=tmp_path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state, assign=assign)
    assert same_as_shards(other, plain)
    state = get_model_state_dict(other, options=FULL)
    assert same(loaded(state, assign), plain)
    for whole in (state, plain.state_dict()):
        set_model_state_dict(full, whole, options=FULL)
        assert same_as_shards(full, plain)


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`", "ignore:Multiple backends")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whole_weights_are_broadcast_into_shards_with_padding_alone(group, device):
    """Torch copies them past the hooks; without the padding it is an error."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    plain, sharded = Module(), fully_shard(Module(device=device))
    with pytest.raises(RuntimeError, match="size"):
        set_model_state_dict(sharded, plain.state_dict(), options=options)
    sharded = fully_shard(Module(device=device))
    set_model_state_dict(sharded, parameters(plain), options=options)
    assert same_as_shards(sharded, plain)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, STORED])
def test_sharded_weights_of_another_width_are_a_size_mismatch(group, width):
    module, other = fully_shard(Module()), Module(width)
    with pytest.raises(RuntimeError, match="size mismatch for output"):
        module.load_state_dict(sharded_from(other, like=module))
    if width > WIDTH:
        with pytest.raises(RuntimeError, match="size mismatch for output"):
            module.load_state_dict(fully_shard(other).state_dict())


def same_as_shards(sharded: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return all(isinstance(p, DTensor) and torch.equal(p.full_tensor(), q) for p, q in pairs)


def test_checkpoints_of_whole_weights_load(group, tmp_path: Path):
    plain, other = Module(), Module()
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "whole")
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "whole")
    set_model_state_dict(other, state["model"])
    assert same(plain, other)
