"""Lists of queries that are cut into segments: how, and what their sums are."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from fusewright.gsa import available_backends
from fusewright.gsa._core.launches import cdiv
from fusewright.gsa.sparse import launch, launch_backward, launch_segments, launch_unions
from fusewright.gsa.sparse.launch_problem import SparseProblem, UnionConfig
from fusewright_testkit.conformance import everything, same_bits

from .operations import drawn, named_several_times

F32, BF16 = torch.float32, torch.bfloat16
TILES = dict(path="tiles")
needs_kernels = pytest.mark.skipif("triton" not in available_backends(), reason="needs the kernels")


def with_sinks(shape, keys, device):
    """Selections of which every query has the first key."""
    indices = 1 + drawn(shape, keys - 1, device)
    indices[..., 0] = 0
    return indices


@needs_kernels
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("lists", [1, 2])
def test_segments_hold_every_entry_once(lists, key_heads, device, monkeypatch):
    for name, value in dict(SEGMENTS=24, SHORTEST=16, TILES_AT_A_TIME=2).items():
        monkeypatch.setattr(launch_segments, name, value)
    part, tile = 400, 16
    config = UnionConfig(256, 4, rows=tile, columns=16, num_warps=4, num_stages=1)
    sizes = (lists, part, 100, 12, key_heads, 8, 1, 4)
    problem = SparseProblem(*sizes, F32, torch.device(device), (), (), (), "ieee")
    planned = launch_segments.plan_segments(problem, config, part, tile, adds=False)
    tiles = cdiv(100, tile)
    kinds = (
        torch.zeros(lists, tiles),
        torch.full((lists, tiles), float(part)),
        torch.rand(lists, tiles) * part,
        (torch.arange(tiles) == 0).expand(lists, -1) * float(part) + 1.0,
    )
    for lengths in (kind.int().clamp(max=part).to(device) for kind in kinds):
        cut, parts = planned.of(lengths)
        for own, row in zip(lengths.tolist(), cut.tolist(), strict=True):
            size, row = row[0], row[1:]
            tile_of, row = row[: planned.most], row[planned.most :]
            begins, first_parts = row[: tiles + 1], row[tiles + 1 :]
            assert size % (16 // config.stacked(12 // key_heads)) == 0
            counts = [max(cdiv(length, size), 1) for length in own]
            expected = [number for number, count in enumerate(counts) for _ in range(count)]
            assert tile_of == expected + [-1] * (planned.most - len(expected))
            assert begins == [sum(counts[:number]) for number in range(tiles + 1)]
            several = 0
            for count, first_part in zip(counts, first_parts, strict=True):
                assert first_part == (several if count > 1 else -1)
                several += count if count > 1 else 0
            assert several <= planned.most_parts == parts.shape[2]
    # Lists that are no longer than the shortest segment are left whole.
    assert launch_segments.plan_segments(problem, config, 1, tile, adds=False) is None


@needs_kernels
@pytest.mark.parametrize("batches", [1, 31, 64, 65, 4096])
def test_partial_sums_have_a_bound_whatever_the_batch(batches, device, monkeypatch):
    """Of so many heads of keys that each has one segment for all its lists, none is cut."""
    monkeypatch.setattr(launch_segments, "SEGMENTS", 1024)
    config = UnionConfig(256, 4, rows=16, columns=16, num_warps=4, num_stages=1)
    sizes = (batches, 32768, 32768, 8, 8, 64, 1, 4)
    problem = SparseProblem(*sizes, F32, torch.device(device), (), (), (), "ieee")
    planned = launch_segments.plan_segments(problem, config, 32768, 16, adds=False)
    assert (planned is None) == (batches * 8 > launch_segments.SEGMENTS // 2)
    if planned is not None:
        assert batches * 8 * planned.most_parts <= 2 * launch_segments.SEGMENTS


@pytest.mark.sampled
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_gradients_of_keys_that_every_query_selects_are_right(
    sparse, transposed, key_heads, again, device, monkeypatch
):
    lines = tuple(line._replace(transposed=transposed) for line in launch_backward.UNION_DKDV)
    monkeypatch.setattr(launch_backward, "UNION_DKDV", lines)
    op = dataclasses.replace(sparse, key_heads=key_heads)
    tensors = op.draw((2, 90, 40, 4, 8), F32, device)
    indices = with_sinks((2, 90, 5), 40, device)
    if again:
        indices = torch.cat([indices, named_several_times((2, 90), 3, 40, device)], -1)
    op.check(tensors, indices=indices, count=None, **TILES)


@pytest.mark.parametrize("per_head", [False, True], ids=["one", "per-head"])
def test_gradients_of_heads_beyond_a_stack_are_right(sparse, per_head, device):
    """Eight heads on a head of keys, of which four are stacked; with selections of their own, of
    which two heads have one head of keys.
    """
    op = dataclasses.replace(sparse, key_heads=4 if per_head else 1)
    tensors = op.draw((1, 60, 40, 8, 4), F32, device)
    shape = (1, 8, 60, 5) if per_head else (1, 60, 5)
    op.check(tensors, indices=with_sinks(shape, 40, device), count=None, **TILES)


def test_stretches_of_queries_are_cut_too(sparse, monkeypatch, device):
    tensors = sparse.draw((1, 90, 40, 4, 8), F32, device)
    monkeypatch.setattr(launch_unions, "MEMBERS_AT_A_TIME", 40 * 40)
    launch.forward_plan.cache_clear()
    launch_backward.backward_plan.cache_clear()
    sparse.check(tensors, indices=with_sinks((1, 90, 5), 40, device), count=None, **TILES)


def test_same_inputs_same_bits(sparse, device):
    leaves = [x.requires_grad_() for x in sparse.draw((1, 90, 40, 4, 8), BF16, device)]
    options = dict(TILES, indices=with_sinks((1, 90, 5), 40, device), count=None)
    one, other = (everything(partial(sparse.kernels, **options), leaves) for _ in range(2))
    assert same_bits(one, other)
