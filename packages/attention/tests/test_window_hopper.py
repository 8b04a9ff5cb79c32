"""The passes of a window by warp groups on Hopper, by a GPU; their shares of work and the order of
sums, by the source of their kernels with Python's numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest
import torch
from fusewright.attention._core.launches import cdiv
from fusewright.attention.common.launch import plan_query_tiles
from fusewright.attention.common.outputs import WORD
from fusewright.attention.common.problem import key_of, problem_of, tile_config
from fusewright.attention.window import kernels as kernels_window
from fusewright.attention.window import (
    kernels_hopper,
    launch,
    launch_hopper,
    launch_hopper_backward,
)
from fusewright.attention.window import kernels_hopper_backward as kernels
from fusewright.attention.window.launch_hopper_backward import KEYS, QUERIES, ROWS, TILES
from fusewright_testkit import capture
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.yardstick import Yardstick

from .ordered import Ordered, Step
from .test_combine import interpreted
from .test_hopper import counted_plans, on_hopper

BF16, FP16 = torch.bfloat16, torch.float16
WINDOWS = [64, 65, 127, 128, 129, 300, 512, 10_000]


class Programs(Ordered):
    """The programs of one launch for sequences of so many tokens."""

    def __init__(self, heads: int, tokens: int, window: int, programs: int) -> None:
        self.query_tiles, self.key_tiles = cdiv(tokens, QUERIES), cdiv(tokens, KEYS)
        self.sizes = self.query_tiles, self.key_tiles, min(window, tokens)
        self.pieces = heads * self.key_tiles
        self.programs = min(programs, self.pieces)
        names = dict(gl=SimpleNamespace(minimum=min), KEYS=KEYS, TILES=TILES, ROWS=ROWS)
        names |= dict(QUERIES=QUERIES)
        self.work_of = FunctionType(kernels.work_of.fn.__code__, names)
        self.added_tiles = FunctionType(kernels.added_tiles.fn.__code__, names)

    def steps(self, program: int) -> Iterator[Step]:
        for piece in range(program, self.pieces, self.programs):
            head, key_tile, tiles, _, _ = self.work_of(piece, self.sizes)
            added = self.added_tiles(key_tile, tiles, self.sizes[2])
            for step in range(tiles):
                number, adds = step // TILES, step < added
                block, tile = key_tile + number, key_tile * TILES + step
                begins, ends = adds and step % TILES == 0, step == added - 1
                yield Step(head, block, tile, key_tile, number, begins, ends, adds)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [64, 65, 128, 129, 193, 700, 1500])
def test_each_group_has_the_tiles_that_see_its_keys(tokens, window):
    programs = Programs(1, tokens, window, programs=5)
    row = torch.arange(tokens)
    distance = row[:, None] - row[None, :]
    seen = (distance >= 0) & (distance < window)
    for piece in range(programs.pieces):
        _, key_tile, tiles, *of_groups = programs.work_of(piece, programs.sizes)
        for group, steps in enumerate(of_groups):
            first = key_tile * KEYS + group * ROWS
            of_tile = [x.any().item() for x in seen[:, first : first + ROWS].split(QUERIES)]
            begin = key_tile * TILES + group
            assert [i for i, some in enumerate(of_tile) if some] == list(
                range(begin, begin + steps)
            )
            # Of the ring of queries the first group leaves at most the last tile to the second.
            assert tiles - 1 <= group + steps <= tiles


@pytest.mark.parametrize("seed", range(60))
def test_programs_add_every_tile_in_one_order_and_never_all_wait(seed):
    draw = random.Random(seed)
    heads, tokens = draw.choice([1, 2, 3, 7]), draw.randint(64, 2500)
    window = draw.choice([*WINDOWS, draw.randint(64, 2500)])
    programs = Programs(heads, tokens, window, draw.choice([1, 2, 5, 12, 33, 132]))
    order = programs.run(0)
    assert set(order) == {(h, i) for h in range(heads) for i in range(programs.query_tiles)}
    for (_, tile), key_tiles in order.items():
        assert key_tiles == list(range(tile // TILES, key_tiles[-1] - 1, -1))
    assert programs.run(1) == order


@pytest.mark.parametrize("window", [*WINDOWS, 191, 192, 193])
@pytest.mark.parametrize("tokens", [64, 65, 128, 129, 193, 700, 1500])
def test_the_last_piece_of_a_tile_and_no_other_rounds_its_dq(tokens, window):
    programs = Programs(2, tokens, window, programs=5)
    pieces, counted = defaultdict(dict), defaultdict(set)
    steps = [step for program in range(programs.programs) for step in programs.steps(program)]
    for step in steps:
        pieces[step.stripe, step.tile][step.key_tile] = step.adds
        if step.adds:
            counted[step.stripe, step.block].add(step.key_tile)
    assert len(pieces) == 2 * programs.query_tiles
    for adds in pieces.values():
        assert [key_tile for key_tile in adds if not adds[key_tile]] == [min(adds)]
    # All that a piece waits for, those before it at its block, count.
    for step in steps:
        before = range(step.key_tile + 1, step.block + 1)
        assert len(before) == step.number
        assert counted[step.stripe, step.block].issuperset(before)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [64, 65, 128, 129, 193, 700, 1500])
@pytest.mark.parametrize(("groups", "block"), [(3, 64), (3, 128), (2, 64), (2, 128)])
def test_each_group_has_the_tiles_that_its_rows_see(tokens, window, groups, block):
    heads, together, tiles = 6, 3, cdiv(tokens, groups * ROWS)
    sizes = tiles, tokens, min(window, tokens), together
    config = SimpleNamespace(GROUPS=groups, BLOCK_K=block)
    gl = SimpleNamespace(minimum=min, maximum=max, where=lambda is_so, a, b: a if is_so else b)
    work_of, share_of = (
        FunctionType(function.fn.__code__, dict(gl=gl, ROWS=ROWS))
        for function in (kernels_hopper.work_of, kernels_hopper.share_of)
    )
    row = torch.arange(tokens)
    distance = row[:, None] - row[None, :]
    seen = (distance >= 0) & (distance < window)
    found = []
    for piece in range(heads * tiles):
        head, tile, newest, count = work_of(piece, sizes, config)
        assert newest - count + 1 >= 0
        for first in range(tile * groups * ROWS, (tile + 1) * groups * ROWS, ROWS):
            own, steps, inner = share_of(first, newest, sizes, config)
            # What the group leaves out and what it sees are the tiles of the piece.
            assert newest - count < own - steps + 1 <= own <= newest
            assert 1 <= inner <= steps
            if first >= tokens:
                assert steps == 1
                continue
            found.append((head, first))
            of_rows = seen[first : first + ROWS]
            some = [i for i, x in enumerate(of_rows.split(block, 1)) if x.any()]
            assert some == list(range(own - steps + 1, own + 1))
            whole = range(own - inner + 1, own)
            assert all(of_rows[:, i * block : (i + 1) * block].all() for i in whole)
            # No tile has a mask that needs none, but where rows past the last have one.
            if first + ROWS <= tokens:
                rest = range(own - steps + 1, own - inner + 1)
                assert not any(of_rows[:, i * block : (i + 1) * block].all() for i in rest)
    assert sorted(found) == [(i, j) for i in range(heads) for j in range(0, tokens, ROWS)]


@interpreted
def test_flagged_tiles_are_computed_again_and_no_others():
    q, k, v = (torch.randn(2, 150, 2, 64).to(FP16) for _ in range(3))
    key, band = key_of((q, k, v), None, None), launch.Band(70, 0)
    problem = problem_of(key, 3, launch.integers_of(band, key))
    config = tile_config(launch_hopper.AGAIN, problem)
    flags = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.int32)
    words = torch.empty(2, 150, 2, 64 // WORD, dtype=torch.int32)
    outputs = q, torch.empty(2, 2, 150), torch.empty(2, 2, 2, 150), words
    whole, again = ([torch.full_like(x, -1000) for x in outputs] for _ in range(2))
    run = plan_query_tiles(kernels_window.window_forward_kernel, problem, config)
    run((q, k, v, None, None, *whole), (0.125,))
    run = plan_query_tiles(kernels_window.flagged_window_forward_kernel, problem, config)
    run((q, k, v, None, None, flags, *again), (0.125,))
    flagged = flags.view(2, 2, 3).bool().repeat_interleave(ROWS, 2)[..., :150]
    for first, second in zip(whole, again, strict=True):
        by_row = flagged.mT.unsqueeze(-1) if first.shape[1] == 150 else flagged
        assert torch.equal(second, torch.where(by_row, first, -1000))


@pytest.fixture
def forward_plans(fresh_plans, monkeypatch) -> list[launch_hopper.HopperPlan]:
    """The plans of forward passes that tests make, whatever the size."""
    return counted_plans(monkeypatch, launch_hopper, launch, "HOPPER_FORWARD", "plan_hopper")


@pytest.fixture
def plans(forward_plans, monkeypatch) -> list[launch_hopper_backward.HopperBackwardPlan]:
    """Those of backward passes, behind such forward passes."""
    return counted_plans(monkeypatch, launch_hopper_backward, launch)


def draw(op, tokens, batches=2, heads=3, width=64, dtype=BF16):
    return op.draw((batches, tokens, tokens, heads, width), dtype, "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [64, 65, 127, 129, 200, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(
    window_op, forward_plans, plans, tokens, window, dtype
):
    tensors = draw(window_op, tokens, dtype=dtype)
    window_op.check(tensors, window=window, prefix=0, scale=0.125)
    assert plans
    assert forward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", [64, 129, 512])
@pytest.mark.parametrize("tokens", [65, 128, 1000])
def test_heads_of_128_columns_are_as_near_to_fp64_as_torch(
    window_op, forward_plans, tokens, window
):
    tensors = draw(window_op, tokens, width=128)
    window_op.check(tensors, window=window, prefix=0, scale=0.125)
    assert forward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("width", [64, 128])
def test_outputs_are_the_same_whatever_else_is_asked_for(window_op, forward_plans, width):
    q, k, v = draw(window_op, 1000, width=width)
    band = launch.Band(300, 0)
    results = [
        launch.attention_forward(q, k, v, None, None, band, 0.125, lse, keep)
        for lse in (True, False)
        for keep in (True, False)
    ]
    for each in zip(*results, strict=True):
        first, *others = [x for x in each if x is not None]
        assert all(torch.equal(first, x) for x in others)
    assert len(forward_plans) == 4


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 33, 300, 699])
@pytest.mark.parametrize("width", [64, 128])
def test_strange_token_reaches_no_row_that_does_not_see_it(
    window_op, forward_plans, width, token, value
):
    """The rows of its tiles are computed again, which changes their bits."""
    clean = draw(window_op, 700, width=width)
    expected = window_op.kernels(*clean, window=130, prefix=0, scale=0.125)
    for place in range(3):
        # An infinite query or key may have scores of -inf alone.
        if place < 2 and value == float("inf"):
            continue
        tensors = [x.clone() for x in clean]
        tensors[place][1, token, 2, 5] = value
        o, lse = window_op.kernels(*tensors, window=130, prefix=0, scale=0.125)
        reached = torch.zeros(2, 700, 3, dtype=torch.bool, device="cuda")
        reached[1, token : token + (1 if place == 0 else 130), 2] = True
        assert not o[reached].isfinite().all(-1).any()
        near = ~reached
        assert (o - expected[0])[near].abs().max() <= 8 * torch.finfo(BF16).eps
        assert (lse - expected[1]).mT[near].abs().max() <= 256 * torch.finfo(torch.float32).eps
        near[1, :, 2] = False
        assert torch.equal(o[near], expected[0][near])
    assert forward_plans


@pytest.mark.gpu
@on_hopper
def test_more_pieces_than_programs_are_as_near_to_fp64_as_torch(window_op, plans):
    window_op.check(draw(window_op, 1500, 1, 17), window=512, prefix=0, scale=0.125)
    assert plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("factor", [5.0, 20.0, 60.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_great_scores_are_as_near_to_fp64_as_torch(window_op, plans, factor, dtype):
    """A score that is not seen may lie far above those that are."""
    q, k, v = draw(window_op, 700, dtype=dtype)
    k[:, 300:400] *= factor
    window_op.check([q, k, v], window=130, prefix=0, scale=0.125)
    assert plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values(window_op, plans, size):
    q, k, v = draw(window_op, 700)
    window_op.check([q, k, v * size], window=130, prefix=0, scale=0.125)
    assert plans


@pytest.mark.gpu
@on_hopper
def test_strided_operands_are_read_by_their_strides(window_op, plans):
    joint = torch.randn(2, 700, 3, 4, 64, device="cuda", dtype=BF16)
    strided = [joint[:, :, i] for i in range(3)]
    results = [
        everything(
            lambda *xs: window_op.kernels(*xs, window=130, prefix=0),
            [x.detach().requires_grad_() for x in xs],
        )
        for xs in (strided, [x.contiguous() for x in strided])
    ]
    assert same_bits(*results)
    assert plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("axis", range(3), ids=["sequences", "tokens", "heads"])
def test_operands_may_be_expanded(window_op, forward_plans, plans, axis):
    expanded = [x.narrow(axis, 0, 1).expand_as(x) for x in draw(window_op, 700)]
    results = [
        everything(
            lambda *xs: window_op.kernels(*xs, window=130, prefix=0),
            [x.detach().requires_grad_() for x in xs],
        )
        for xs in (expanded, [x.contiguous() for x in expanded])
    ]
    assert same_bits(*results)
    assert len(forward_plans) == 2
    assert len(plans) == 2


@pytest.mark.gpu
@on_hopper
def test_gradients_have_the_same_bits_in_a_graph_and_twice(window_op, plans):
    leaves = [x.requires_grad_() for x in draw(window_op, 4000, 2, 8)]

    def call():
        return everything(lambda *xs: window_op.kernels(*xs, window=512, prefix=0), leaves)

    expected = call()
    graph, captured = capture(call)
    for _ in range(20):
        graph.replay()
        assert same_bits(captured, expected)
        assert same_bits(call(), expected)
    assert plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "band",
    [
        dict(window=63, prefix=0),
        dict(window=130, prefix=3),
        dict(window=130, prefix=0, every=2),
    ],
    ids=str,
)
def test_other_bands_take_the_other_kernels(window_op, forward_plans, plans, band):
    q, k, v = draw(window_op, 700)
    rows = q[:, -350:] if "every" in band else q
    window_op.check([rows, k, v], **band)
    assert not plans
    assert not forward_plans


@pytest.mark.gpu
@on_hopper
def test_packed_documents_take_the_other_kernels(window_op, forward_plans, plans):
    bounds = torch.tensor([[0, 300, 700], [50, 51, 690]], device="cuda")
    window_op.check(draw(window_op, 700), window=130, prefix=0, cu_seqlens=bounds)
    assert not plans
    assert not forward_plans


@pytest.mark.gpu
@on_hopper
def test_shared_heads_and_sinks_take_the_other_kernels(window_op, forward_plans, plans):
    q, k, v = draw(window_op, 700, heads=4)
    window_op.check([q, k[:, :, :2], v[:, :, :2]], window=130, prefix=0)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, window=130, prefix=0, sinks=sinks)

    tensors = [q, k, v, torch.randn(4, device="cuda")]
    Yardstick(with_sinks(window_op.reference), tensors).check(with_sinks(window_op.kernels))
    assert not plans
    assert not forward_plans
