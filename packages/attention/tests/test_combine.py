"""What comes behind the passes of warp groups, by the kernels themselves, in the interpreter: parts
of a tile whose keys were cut are added, and sums of dq rounded.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from fusewright.attention.common import kernels_hopper_gradients
from fusewright.attention.rectangular import kernels_combine

ROWS, GROUPS, D = 64, 3, 64
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Hopper's own tests run it on a GPU"
)


def combined(
    partial_o: torch.Tensor, softmax: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """o, lse and flags of one tile of one head from its parts ``[parts, GROUPS, ROWS, ...]``."""
    parts, queries = len(partial_o), GROUPS * ROWS
    o = torch.empty(1, queries, 1, D, dtype=torch.bfloat16)
    lse, flags = torch.empty(1, 1, queries), torch.empty(1, GROUPS, dtype=torch.int32)
    kernels_combine.combine_parts_kernel[(GROUPS,)](
        *(partial_o, softmax, flags, sinks, o, lse, None, None),
        *(0, parts, 1, queries, 1, queries),
        D=D,
        ROWS=ROWS,
        GROUPS=GROUPS,
    )
    return o[0, :, 0], lse[0, 0], flags[0]


@interpreted
def test_parts_with_references_of_their_own_are_added():
    """In numbers that no dtype rounds: l = 8 / 2^3 + 3 = 4."""
    first, second = torch.randint(-8, 9, (2, GROUPS, ROWS, D)).float()
    softmax = torch.zeros(2, GROUPS, 3, ROWS)
    softmax[0, :, 1:] = 8.0
    softmax[1, :, 0], softmax[1, :, 1:] = 3.0, 3.0
    o, lse, flags = combined(torch.stack([8.0 * first, second]), softmax)
    assert torch.equal(o.float(), (first + second).flatten(0, 1) / 4.0)
    assert torch.equal(lse, torch.full_like(lse, 5.0) * torch.tensor(2.0).log())
    assert not flags.any()


@interpreted
def test_sink_is_one_score_more_of_no_part():
    """l = 8 / 2^3 + 3 + 2^(5 - 3) = 8."""
    first, second = torch.randint(-8, 9, (2, GROUPS, ROWS, D)).float()
    softmax = torch.zeros(2, GROUPS, 3, ROWS)
    softmax[0, :, 1:] = 8.0
    softmax[1, :, 0], softmax[1, :, 1:] = 3.0, 3.0
    sinks = torch.tensor([5.0]) * torch.tensor(2.0).log()
    o, lse, flags = combined(torch.stack([8.0 * first, second]), softmax, sinks)
    torch.testing.assert_close(o.float(), (first + second).flatten(0, 1) / 8.0)
    torch.testing.assert_close(lse, torch.full_like(lse, 6.0) * torch.tensor(2.0).log())
    assert not flags.any()


@interpreted
def test_parts_whose_sum_is_beyond_fp32_are_flagged():
    partial_o = torch.full((2, GROUPS, ROWS, D), 2.5e38)
    softmax = torch.zeros(2, GROUPS, 3, ROWS)
    softmax[:, :, 1:] = 2.0**27
    partial_o[:, 1] = 1.0
    assert combined(partial_o, softmax)[2].tolist() == [1, 0, 1]


class Constants(NamedTuple):
    """What the kernel that rounds dq reads as CONFIG."""

    D: int
    KEYS: int = 128


@interpreted
@pytest.mark.parametrize("width", [64, 128])
def test_dq_is_added_over_ranges_from_the_order_of_registers_and_rounded(width):
    """A lane has four numbers of a transposed tile of 64 columns next to one another: two halves of
    rows, two columns.
    """
    heads, queries, ranges = 2, 150, 3
    tiles = -(-queries // 64)
    sums = torch.randint(-8, 9, (heads, ranges, tiles * 64, width)).float()
    x = sums.reshape(heads, ranges, tiles, 64, width // 64, 64).permute(0, 1, 2, 4, 5, 3)
    x = x.reshape(heads, ranges, tiles, width // 64, 4, 2, 8, 8, 4, 2)
    x = x.permute(0, 1, 2, 3, 7, 4, 6, 8, 5, 9).contiguous()
    dq = torch.empty(1, queries, heads, width, dtype=torch.float16)
    kernels_hopper_gradients.round_dq_kernel[(heads * tiles,)](
        *(x, None, dq, 0.5),
        *(queries, 1000, heads, 1, tiles, 3, ranges),
        CONFIG=Constants(width),
    )
    expected = 0.5 * sums.sum(1)[:, :queries].transpose(0, 1)
    assert torch.equal(dq[0].float(), expected)
