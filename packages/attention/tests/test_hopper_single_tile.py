"""Few keys on Hopper: the passes of warp groups, by a GPU; their shares of work, by the kernels'
own functions with Python's numbers.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import pytest
import torch
from fusewright.attention._core.launches import cdiv
from fusewright.attention.rectangular import kernels_hopper_single_tile as kernels
from fusewright.attention.rectangular import launch, launch_backward, launch_hopper_single_tile
from fusewright_testkit import capture
from fusewright_testkit.conformance import everything, same_bits

from .test_hopper import counted_plans, on_hopper

BF16, FP16 = torch.bfloat16, torch.float16
KEYS = [1, 3, 16, 47, 63, 64, 65, 127, 128]


@pytest.mark.parametrize("whole", [False, True], ids=["ranges", "whole heads"])
@pytest.mark.parametrize(
    ("heads", "query_tiles", "programs"),
    [(1, 1, 1), (1, 9, 9), (17, 9, 132), (132, 3, 132), (133, 9, 132), (2048, 9, 132), (5, 1, 5)],
)
def test_every_tile_of_every_head_is_taken_once(heads, query_tiles, programs, whole):
    programs = min(programs, heads) if whole else programs
    sizes = *launch_hopper_single_tile.shares(heads, query_tiles, programs, whole), query_tiles
    taken = []
    for program in range(programs):
        gl = SimpleNamespace(
            minimum=min,
            maximum=max,
            where=lambda condition, x, y: x if condition else y,
            program_id=lambda axis, program=program: program,
            num_programs=lambda axis: programs,
        )
        parts_of, part_of = (
            FunctionType(f.fn.__code__, dict(gl=gl)) for f in (kernels.parts_of, kernels.part_of)
        )
        for number in range(parts_of(sizes)):
            head, first, count = part_of(number, sizes)
            assert count > 0
            assert not whole or count == query_tiles
            taken += [(head, tile) for tile in range(first, first + count)]
    assert sorted(taken) == [(h, tile) for h in range(heads) for tile in range(query_tiles)]


def test_tables_say_how_many_keys_they_serve():
    lines = launch_hopper_single_tile.HOPPER_SINGLE_TILE_FORWARD
    assert all(cdiv(line.max_keys, 64) * 64 == line.max_keys for line in lines)
    lines = launch_hopper_single_tile.HOPPER_SINGLE_TILE_BACKWARD
    assert all(cdiv(line.max_keys, 64) * 64 == line.max_keys for line in lines)
    # Of more than 64 keys, p and dp take the registers of two groups with tiles.
    assert all(line.groups == (2 if line.max_keys <= 64 else 1) for line in lines)


@pytest.fixture
def forward_plans(fresh_plans, monkeypatch) -> list:
    """The plans of forward passes that tests make, whatever the size."""
    names = "HOPPER_SINGLE_TILE_FORWARD", "plan_hopper_single_tile"
    return counted_plans(monkeypatch, launch_hopper_single_tile, launch, *names)


@pytest.fixture
def backward_plans(forward_plans, monkeypatch) -> list:
    """Those of backward passes, too."""
    names = "HOPPER_SINGLE_TILE_BACKWARD", "plan_hopper_single_tile_backward"
    return counted_plans(monkeypatch, launch_hopper_single_tile, launch_backward, *names)


def served(keys, forward_plans, backward_plans) -> bool:
    return bool(backward_plans) and bool(forward_plans) == (keys > 64)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("targets", [0, 1, 500])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(
    lse_op, forward_plans, backward_plans, keys, targets, dtype
):
    lse_op.check(lse_op.draw((3, keys + targets, keys, 5, 64), dtype, "cuda"))
    assert served(keys, forward_plans, backward_plans)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [64, 128])
def test_more_heads_than_programs_are_as_near_to_fp64_as_torch(op, backward_plans, keys):
    op.check(op.draw((40, 150, keys, 7, 64), BF16, "cuda"))
    assert backward_plans


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [47, 64, 128])
@pytest.mark.parametrize("behind", [0.0, float("nan"), 6e4])
def test_what_lies_behind_the_keys_of_a_task_is_not_seen(
    lse_op, forward_plans, backward_plans, keys, behind
):
    lengths = torch.tensor([keys, 0, 1, keys // 2], device="cuda")
    q, k, v = lse_op.draw((4, 300, keys, 3, 64), BF16, "cuda")
    seen = (torch.arange(keys, device="cuda") < lengths[:, None])[:, :, None, None]
    clean = [q, *(torch.where(seen, x, 0.0) for x in (k, v))]
    other = [q, *(torch.where(seen, x, behind) for x in (k, v))]
    results = [
        everything(lse_op.kernels, [*(x.detach().requires_grad_() for x in xs), lengths])
        for xs in (clean, other)
    ]
    assert same_bits(*results)
    lse_op.check(clean, [keys, 0, 1, keys // 2])
    assert served(keys, forward_plans, backward_plans)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [47, 64, 128])
@pytest.mark.parametrize("place", range(3))
def test_nan_stays_in_its_rows(lse_op, forward_plans, backward_plans, keys, place):
    clean = lse_op.draw((2, 300, keys, 3, 64), BF16, "cuda")
    expected = lse_op.kernels(*clean)[0]
    clean[place][1, 33, 2, 5] = float("nan")
    o = lse_op.kernels(*clean)[0]
    assert forward_plans or keys <= 64
    reached = torch.zeros_like(o, dtype=torch.bool)
    reached[1, 33 if place == 0 else slice(None), 2] = True
    assert o[reached].isnan().any()
    assert torch.equal(o[~reached], expected[~reached])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("factor", [20.0, 60.0, 1e-20])
def test_huge_and_tiny_scores_are_as_near_to_fp64_as_torch(
    lse_op, forward_plans, backward_plans, factor, keys
):
    q, k, v = lse_op.draw((2, 300, keys, 3, 64), BF16, "cuda")
    lse_op.check([q * factor, k, v])
    assert served(keys, forward_plans, backward_plans)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [64, 128])
def test_strided_operands_are_read_by_their_strides(op, forward_plans, backward_plans, keys):
    joint = torch.randn(2, keys, 3, 4, 64, device="cuda", dtype=BF16)
    strided = [joint[:, :, i] for i in range(3)]
    whole = [x.contiguous() for x in strided]
    assert same_bits(
        *(
            everything(op.kernels, [x.detach().requires_grad_() for x in xs])
            for xs in (strided, whole)
        )
    )
    assert served(keys, forward_plans, backward_plans)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("axis", range(3), ids=["tasks", "rows", "heads"])
def test_operands_may_be_expanded(op, forward_plans, backward_plans, keys, axis):
    tensors = op.draw((2, 500, keys, 4, 64), BF16, "cuda")
    expanded = [x.narrow(axis, 0, 1).expand_as(x) for x in tensors]
    whole = [x.contiguous() for x in expanded]
    assert same_bits(
        *(
            everything(op.kernels, [x.detach().requires_grad_() for x in xs])
            for xs in (expanded, whole)
        )
    )
    assert served(keys, forward_plans, backward_plans)
    assert len(backward_plans) == 2


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("keys", [20, 64, 128])
def test_replays_have_the_same_bits(lse_op, forward_plans, backward_plans, keys):
    tensors = [x.requires_grad_() for x in lse_op.draw((64, 564, keys, 8, 64), BF16, "cuda")]
    first = everything(lse_op.kernels, tensors)
    graph, captured = capture(lambda: everything(lse_op.kernels, tensors))
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, first)
    assert served(keys, forward_plans, backward_plans)
