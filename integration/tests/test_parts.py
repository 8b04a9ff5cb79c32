"""Processes that share the tokens of sequences have the losses and logits of one that reads all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models import HYBRID, TITAN_MAC, HybridLM, TitanMAC

from .groups import run_group

BEGIN = """
from dataclasses import astuple, replace
from types import SimpleNamespace
import numpy as np
from fusewright_models.text import evaluate_text
from fusewright_models import HYBRID, TITAN_MAC, HybridLM, TitanMAC
from torch.utils import _pytree as pytree

group = torch.distributed.group.WORLD

def part(tokens):
    return tokens.tensor_split(group.size(), 1)[group.rank()]

def make(kind, **changes):
    torch.manual_seed(0)
    if kind == "hybrid":
        model = HybridLM(replace(HYBRID["tiny"], **dict(dim=32, layers=5) | changes))
        # Behind a step of training, queries select unlike numbers of keys.
        with torch.no_grad():
            model.losses(torch.randint(11, (2, 24)))
    else:
        sizes = dict(vocab_size=11, dim=16, layers=3, heads=2, segment=8, persistent=2)
        sizes |= dict(memory_chunk=4, memory_hidden=8)
        model = TitanMAC(replace(TITAN_MAC["tiny"], **sizes | changes))
    return model.double().eval()
"""
COMPARED = """
def assert_near(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.numel():
        found, expected = found.double(), expected.double()
        bound = 2**20 * torch.finfo(torch.float64).eps * expected.abs().max()
        assert (found - expected).abs().max() <= bound

def held(caches):
    if isinstance(caches, dict):
        caches = [getattr(cache, "__dict__", cache) for cache in caches.values()]
    return [torch.as_tensor(leaf) for leaf in pytree.tree_leaves(caches) if leaf is not None]

@torch.no_grad()
def compare(model, length):
    tokens = torch.randint(11, (2, length + 1))
    given = part(tokens[:, :-1])
    if isinstance(model, HybridLM):
        read, loss_of = model.read, model.next_token_loss
    else:
        read, loss_of = model, model.loss
    hidden, after = read(tokens[:, :-1])
    mine, state = read(given, group=group)
    assert_near(model.logits(mine), part(model.logits(hidden)))
    if group.rank() == group.size() - 1:
        # That of all tokens; caches of one reading have room for more.
        for found, expected in zip(held(state), held(after), strict=True):
            assert_near(found, expected[:, : found.shape[1]] if found.ndim > 1 else expected)
    places = part(torch.arange(length)[None])[0].tolist()
    if places:
        read_and_next = tokens[:, places[0] : places[-1] + 2]
    else:
        read_and_next = tokens[:, -1:]
    loss = loss_of(read_and_next, group=group)
    assert loss.isnan() == (given.numel() == 0)
    summed = loss.nan_to_num() * given.numel()
    torch.distributed.all_reduce(summed)
    assert_near(summed / (2 * length), loss_of(tokens))

    # Windows that the processes share, the last one shorter than there are processes.
    stream = torch.randint(11, (5 * length + 2,))
    asked = dict(length=length, batch_size=2, text_bytes=100)
    with_loss = SimpleNamespace(loss=loss_of)
    # Of documents some parts have no target.
    for ends in (None, np.array([2, len(stream) // 2, len(stream)])):
        asked["ends"] = ends
        whole, shared = (evaluate_text(with_loss, stream, group=g, **asked) for g in (None, group))
        assert_near(*(torch.tensor(astuple(x), dtype=torch.float64) for x in (shared, whole)))

for kind, changes, lengths in {cases}:
    model = make(kind, **changes)
    for length in lengths:
        compare(model, length)
"""
MAC, MAG, MAL, LMM = (("titan-mac", {"variant": name}) for name in ("mac", "mag", "mal", "lmm"))
ORIGIN = "titan-mac", {"memory_rule": "origin"}
BARE = "titan-mac", {"persistent": 0, "convolution": 0}
OFF = "titan-mac", {"memory": False}
EXACT, PLAIN = (("hybrid", {"mode": mode}) for mode in ("exact", "plain"))


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        # Parts that end within a segment, a token, no token.
        (2, [(*MAC, [21, 1]), (*EXACT, [15])]),
        pytest.param(
            4, [(*MAC, [50, 7, 2]), (*LMM, [21]), (*EXACT, [50, 2])], marks=pytest.mark.slow
        ),
        pytest.param(
            3,
            [(*each, [48, 22, 2]) for each in (MAG, MAL, LMM, ORIGIN, BARE, OFF, PLAIN)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_parts_of_sequences_are_read_as_the_whole(count, cases):
    run_group(BEGIN + COMPARED.format(cases=cases), count)


MEMORY = """
import weakref
from torch.utils._python_dispatch import TorchDispatchMode

class Peak(TorchDispatchMode):
    # Of the bytes of all storages that were allocated here.
    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.living = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(made):
            if torch.is_tensor(x):
                self.note(x.untyped_storage())
        return made

    def note(self, storage):
        if storage._cdata in self.living:
            return
        self.living.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.let_go, storage._cdata, storage.nbytes())

    def let_go(self, key, size):
        self.living.remove(key)
        self.now -= size

def peak_of(read, tokens, **options):
    with torch.no_grad(), Peak() as peak:
        read(tokens, **options)
    return peak.most

for kind in ("titan-mac", "hybrid"):
    model = make(kind, layers=4)
    read = getattr(model, "read", model)
    tokens = torch.randint(11, (1, 768))
    whole, own = peak_of(read, tokens), peak_of(read, part(tokens), group=group)
    assert own < whole / 3, (kind, group.rank(), whole, own)
"""


@pytest.mark.slow
def test_no_process_of_four_holds_a_third_of_what_one_alone_would():
    run_group(BEGIN + MEMORY, 4)


PIPELINED = """
import os
from datetime import timedelta
store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
model, rank = make("titan-mac"), group.rank()
first, last = model.blocks[0], model.blocks[-1]
begun = dict.fromkeys((first, last), 0)

def act(block, _):
    begun[block] += 1
    if (rank, block, begun[block]) == (1, first, 1):
        store.set("the second process has begun", "")
    if (rank, block, begun[block]) == (0, last, 1):
        store.wait(["the second process has begun"], timedelta(seconds=60))
    if (rank, block, begun[block]) == (0, first, 2):
        store.set("the first process goes on", "")
    if (rank, block, begun[block]) == (1, last, 1):
        store.wait(["the first process goes on"], timedelta(seconds=60))

for block in (first, last):
    block.register_forward_pre_hook(act)
stream = torch.randint(11, (61,))
evaluate_text(model, stream, length=20, batch_size=1, text_bytes=60, group=group)
assert begun == dict.fromkeys((first, last), 3)
"""


@pytest.mark.slow
def test_processes_compute_other_layers_and_windows_at_the_same_time():
    """The first one's last layer waits for the second one's first layer, whose last layer waits for
    the first one's next window: without a pipeline neither would come.
    """
    run_group(BEGIN + PIPELINED, 2)


class Group:
    """The second of two processes, which waits for nothing."""

    def rank(self):
        return 1

    def size(self):
        return 2


def models():
    yield TitanMAC(replace(TITAN_MAC["tiny"], layers=1))
    yield HybridLM(HYBRID["tiny"])


def test_what_would_end_at_a_part_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for model in models():
        loss_of = getattr(model, "next_token_loss", model.loss)
        with pytest.raises(RuntimeError, match=r"wanted torch.no_grad .* got a call that autograd"):
            loss_of(tokens, group=Group())
        # As fully_shard leaves it.
        next(model.children()).set_reshard_after_backward = None
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"all its parameters in each .* fully_shard"),
        ):
            loss_of(tokens, group=Group())


@torch.no_grad()
def test_state_beside_a_group_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    titan, hybrid = models()
    with pytest.raises(ValueError, match=r"wanted no state beside a group, .* of 0 tokens"):
        titan(tokens, titan.init_state(1), group=Group())
    with pytest.raises(ValueError, match="wanted no caches beside a group"):
        hybrid.read(tokens, {}, group=Group())
