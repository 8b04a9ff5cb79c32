"""The backward pass of a window by warp groups on Hopper, by a GPU; its shares of work and its
order of sums, by the source of its kernel with Python's numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest
import torch
from fusewright.attention._core.launches import cdiv
from fusewright.attention.window import kernels_hopper_backward as kernels
from fusewright.attention.window import launch, launch_hopper_backward
from fusewright.attention.window.launch_hopper_backward import KEYS, QUERIES, ROWS, TILES
from fusewright_testkit import capture
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.yardstick import Yardstick

from .ordered import Ordered
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
        self.work_of = FunctionType(kernels.work_of.fn.__code__, names | dict(QUERIES=QUERIES))

    def steps(self, program: int) -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
        for piece in range(program, self.pieces, self.programs):
            head, key_tile, tiles, _, _ = self.work_of(piece, self.sizes)
            for step in range(tiles):
                number, ends = step // TILES, step == tiles - 1
                block, tile = key_tile + number, key_tile * TILES + step
                yield head, block, tile, key_tile, number, step % TILES == 0, ends


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


@pytest.fixture
def plans(fresh_plans, monkeypatch) -> list[launch_hopper_backward.HopperBackwardPlan]:
    """The plans of backward passes that tests make, whatever the size."""
    return counted_plans(monkeypatch, launch_hopper_backward, launch)


def draw(op, tokens, batches=2, heads=3, dtype=BF16):
    return op.draw((batches, tokens, tokens, heads, 64), dtype, "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [64, 65, 127, 129, 200, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(window_op, plans, tokens, window, dtype):
    tensors = draw(window_op, tokens, dtype=dtype)
    window_op.check(tensors, window=window, prefix=0, scale=0.125)
    assert plans


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
def test_other_bands_take_the_other_kernels(window_op, plans, band):
    q, k, v = draw(window_op, 700)
    rows = q[:, -350:] if "every" in band else q
    window_op.check([rows, k, v], **band)
    assert not plans


@pytest.mark.gpu
@on_hopper
def test_shared_heads_and_sinks_take_the_other_kernels(window_op, plans):
    q, k, v = draw(window_op, 700, heads=4)
    window_op.check([q, k[:, :, :2], v[:, :, :2]], window=130, prefix=0)

    def with_sinks(call):
        return lambda q, k, v, sinks: call(q, k, v, window=130, prefix=0, sinks=sinks)

    tensors = [q, k, v, torch.randn(4, device="cuda")]
    Yardstick(with_sinks(window_op.reference), tensors).check(with_sinks(window_op.kernels))
    assert not plans
