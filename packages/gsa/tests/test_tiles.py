"""sparse_attention by tiles: values, what tiles list, who takes this path."""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fusewright.gsa import available_backends, sparse_attention
from fusewright.gsa._core.backends import DeviceProperties
from fusewright.gsa._core.launches import layouts
from fusewright.gsa.common import launches
from fusewright.gsa.sparse import launch, launch_backward, launch_unions
from fusewright.gsa.sparse.launch_paths import ways
from fusewright.gsa.sparse.launch_problem import SparseProblem, UnionConfig, sparse_problem
from fusewright.gsa.sparse.launch_unions import plan_members, plan_tiles
from fusewright_testkit import Yardstick, assert_within
from fusewright_testkit.conformance import everything, same_bits

from .operations import drawn, named_several_times

F32, BF16 = torch.float32, torch.bfloat16
TILES = dict(path="tiles")
needs_kernels = pytest.mark.skipif("triton" not in available_backends(), reason="needs the kernels")


@pytest.fixture
def tiles_of(monkeypatch, device):
    """Sets the one line of the tables of tiles, on a CPU; a GPU has its own."""

    def change(**fields):
        if device == "cpu":
            line = launch.UNION[0]._replace(**fields)
            for module, name in (
                (launch, "UNION"),
                (launch_backward, "UNION_DQ"),
                (launch_backward, "UNION_DKDV"),
            ):
                monkeypatch.setattr(module, name, (line,))

    return change


def test_bits_of_a_tile_may_take_several_words(sparse, tiles_of, device):
    tiles_of(rows=64)
    op = dataclasses.replace(sparse, key_heads=1)
    tensors = op.draw((1, 70, 70, 1, 4), F32, device)
    op.check(tensors, indices=drawn((1, 70, 5), 70, device), count=None, **TILES)


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_stretches_of_queries_give_the_gradients_of_the_whole(sparse, monkeypatch, again, device):
    tensors = sparse.draw((2, 20, 18, 2, 8), F32, device)
    indices = drawn((2, 20, 5), 18, device)
    if again:
        indices = named_several_times((2, 20), 5, 18, device)
    kernels = partial(sparse.kernels, indices=indices, count=None, **TILES)
    yardstick = Yardstick(partial(sparse.reference, indices=indices, count=None), tensors)
    whole = yardstick.run(kernels)
    monkeypatch.setattr(launch_unions, "MEMBERS_AT_A_TIME", 1)
    launch.forward_plan.cache_clear()
    launch_backward.backward_plan.cache_clear()
    yardstick.check(kernels)
    # o, lse and dq are no sums over queries.
    assert all(map(torch.equal, yardstick.run(kernels)[:3], whole[:3]))


def dense(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    position = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    seen = torch.arange(k.shape[2], device=q.device) <= position
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)


def test_bits_of_one_stretch_of_queries_are_there_at_a_time(sparse, monkeypatch, device):
    alive, most = weakref.WeakSet(), []
    make = launch_unions.Members.of

    def counted(members, *operands):
        bits = make(members, *operands)
        alive.add(bits)
        most.append(len(alive))
        return bits

    monkeypatch.setattr(launch_unions, "MEMBERS_AT_A_TIME", 1)
    monkeypatch.setattr(launch_unions.Members, "of", counted)
    launch.forward_plan.cache_clear()
    launch_backward.backward_plan.cache_clear()
    leaves = [x.requires_grad_() for x in sparse.draw((1, 70, 18, 2, 8), F32, device)]
    indices = drawn((1, 70, 5), 18, device)
    everything(partial(sparse.kernels, indices=indices, count=None, **TILES), leaves)
    assert len(most) > 4
    assert max(most) == 1


@pytest.mark.parametrize("shape", [(1, 7, 7, 2, 8), (2, 3, 9, 4, 8)])
def test_dense_below_is_causal_attention_to_all_keys(sparse, shape, backend, device):
    tensors, keys = sparse.draw(shape, F32, device), shape[2]
    indices = torch.zeros(*shape[:2], 1, dtype=torch.int32, device=device)
    options = dict(scale=None, backend=backend)

    def below(bound):
        return lambda *tensors: sparse.public(*tensors, indices, None, dense_below=bound, **options)

    yardstick = Yardstick(dense, tensors)
    yardstick.check(lambda *tensors: below(keys + 1)(*tensors)[0])
    assert below(keys + 1)(*tensors)[1].isfinite().all()
    # Never without being asked.
    selected = below(keys)(*tensors)[0]
    assert torch.equal(selected, sparse.public(*tensors, indices, None, **options)[0])
    with pytest.raises(AssertionError, match="output 0: largest error"):
        yardstick.check(lambda *tensors: below(keys)(*tensors)[0])


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_same_inputs_same_bits(sparse, again, device):
    leaves = [x.requires_grad_() for x in sparse.draw((1, 18, 20, 4, 8), BF16, device)]
    options = dict(TILES)
    if again:
        options |= dict(indices=named_several_times((1, 18), 12, 20, device))
    one, other = (everything(partial(sparse.kernels, **options), leaves) for _ in range(2))
    assert same_bits(one, other)


@needs_kernels
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("order", [("queries", "tiles"), ("tiles", "queries")])
def test_each_pass_may_take_its_own_path(sparse, order, again, device):
    tensors = sparse.draw((1, 6, 20, 4, 8), F32, device)
    indices, count = sparse.selection(*tensors[:2])
    if again:
        indices = named_several_times((1, 6), indices.shape[-1], 20, device)
    operands = (*tensors, indices.unsqueeze(1), count.unsqueeze(1))
    forward, backward = order
    do = torch.randn_like(tensors[0])
    o, lse, softmax, _ = launch.sparse_forward(*operands, 0.3, forward)
    gradients = (do, None, *operands, o, softmax, 0.3, backward)
    found = (o, lse, *launch_backward.sparse_backward(*gradients))
    of_selection = partial(sparse.reference, indices=indices, count=count)
    yardstick = Yardstick(of_selection, tensors, [do, None])
    for one, truth, allowed in zip(found, yardstick.truth, yardstick.allowed, strict=True):
        assert_within(one, truth, allowed)


@needs_kernels
@pytest.mark.parametrize(
    ("tile", "queries", "keys", "named"),
    [(8, 22, 40, range(40)), (8, 22, 100, range(5, 35)), (64, 70, 100, range(100))],
    ids=["one-word", "none-of-the-last", "two-words"],
)
def test_lists_are_the_unions_of_selections(tile, queries, keys, named, device):
    """Each name once, ascending, with its members; further slots of a block without any."""
    slots = 6
    indices = drawn((2, 1, queries, slots), len(named), device) + named.start
    count = torch.randint(0, slots + 1, (2, 1, queries), device=device)
    count[:, :, 10:20] = 0
    q, k = torch.zeros(2, queries, 1, 4, device=device), torch.zeros(2, keys, 1, 4, device=device)
    operands = (q, k, k, indices, count)
    problem = sparse_problem(
        (q.shape, k.shape, indices.shape), layouts(*operands), "ieee", q.device
    )
    config = UnionConfig(256, 4, rows=tile, columns=16, num_warps=4, num_stages=1)
    first, part = 2, queries - 2
    members = plan_members(problem, first, part)
    bits = members.of(indices, count)
    for sequence in range(2):
        chosen = [
            set(indices[sequence, 0, query, : count[sequence, 0, query]].tolist())
            for query in range(queries)
        ]
        for of_keys, tiled in (
            (False, plan_tiles(None, problem, config, members)),
            (True, plan_tiles(None, problem, config, members, of_keys=True)),
        ):
            number_of_tiles = tiled.lists // 2
            names, held, lengths = (
                x.unflatten(0, (2, number_of_tiles))[sequence].tolist() for x in tiled.of(bits)
            )
            for number in range(number_of_tiles):
                expected = {}
                for query in range(first, queries):
                    for key in chosen[query]:
                        name, place = (query, key) if of_keys else (key, query - first)
                        if place // tile == number:
                            expected.setdefault(name, set()).add(place % tile)
                length = lengths[number]
                assert names[number][:length] == sorted(expected)
                for slot in range(-(-length // 16) * 16):
                    found = {
                        32 * word + bit
                        for word in range(tiled.words)
                        for bit in range(32)
                        if held[number][word][slot] >> bit & 1
                    }
                    wanted = expected[names[number][slot]] if slot < length else set()
                    assert found == wanted
                    assert names[number][slot] in expected


def problem_of(queries, keys, slots, heads, key_heads, dtype=BF16):
    sizes = (1, queries, keys, heads, key_heads, 64, 1, slots)
    return SparseProblem(*sizes, dtype, torch.device("cpu"), (), (), (), "ieee")


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability that the rule sees."""

    def change(number):
        gpu = DeviceProperties(multiprocessors=132, shared_bytes=227 << 10, capability=number)
        monkeypatch.setattr(launches, "device_properties", lambda device: gpu)

    return change


def test_rule_follows_the_sizes(capability):
    capability(90)

    def found(*sizes, path="auto"):
        return ways(problem_of(*sizes), path)

    # What the benchmark times: sixteen heads that share no keys, four that do, and eight.
    assert found(4096, 4096, 256, 16, 16) == (True, True)
    assert found(4096, 4096, 512, 16, 4) == (True, True)
    assert found(16384, 16384, 1024, 16, 16) == (True, True)
    assert found(16384, 16384, 1024, 16, 2) == (True, True)
    assert found(8192, 8192, 512, 16, 2) == (True, True)
    assert found(32768, 32768, 512, 16, 4) == (False, True)
    assert found(131072, 131072, 32, 16, 1) == (False, False)
    assert found(1, 16384, 1024, 16, 16) == (False, False)
    assert found(1, 16384, 1024, 16, 16, path="tiles") == (True, True)
    assert found(16384, 16384, 1024, 16, 16, path="queries") == (False, False)
    # Without a key or a slot there is nothing to list.
    assert found(4, 0, 4, 2, 2, path="tiles") == (False, False)
    assert found(4, 4, 0, 2, 2, path="tiles") == (False, False)


def test_rule_follows_the_capability(capability):
    """No GPU goes by the rates of another: where products are slower, gathering pays sooner."""
    sizes = (16384, 16384, 256, 16, 16)
    for number, expected in ((90, (True, True)), (80, (False, True)), (89, (False, True))):
        capability(number)
        assert ways(problem_of(*sizes), "auto") == expected
        assert ways(problem_of(*sizes), "tiles") == (True, True)


BAD_SELECTIONS = [
    (dict(indices=[[0, 9]]), r"from -1 to 8, got 9 at .* \[0, 0, 0, 1\]"),
    (dict(indices=[[0, -2]]), "from -1 to 8, got -2"),
    (dict(indices=[[3, 5, 3]]), r"must differ, got 3 twice at .* \[0, 0, 0\]"),
]


@pytest.mark.parametrize(("selection", "message"), BAD_SELECTIONS)
def test_checked_selection_is_refused(sparse, selection, message, device):
    tensors = sparse.draw((1, 1, 9, 2, 8), F32, device)
    indices = torch.tensor([selection["indices"]], device=device)
    with pytest.raises(ValueError, match=message):
        sparse_attention(*tensors, indices, check=True)


def test_slots_that_do_not_count_are_not_checked(sparse, device):
    tensors = sparse.draw((1, 1, 9, 2, 8), F32, device)
    indices = torch.tensor([[[3, -1, -1, 5, 3, 77]]], device=device)
    count = torch.tensor([[4]], device=device)
    expected = sparse_attention(*tensors, indices, count)
    assert torch.equal(sparse_attention(*tensors, indices, count, check=True), expected)
    mask = torch.arange(6, device=device) < 4
    found = sparse_attention(*tensors, indices, mask=mask.expand(1, 1, -1), check=True)
    assert torch.equal(found, expected)
