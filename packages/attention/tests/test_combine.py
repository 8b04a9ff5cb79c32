"""Parts of a tile whose keys were cut, added by the kernel itself, in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
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
