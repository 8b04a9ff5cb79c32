"""The selection's kernel on made-up rows of scores: exact whatever the scores, where a guess of the
bound from mean and deviation, or from evenly spread scores, goes wrong.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.gsa.selection import launch, reference

KEYS = 64
NOISE = torch.rand(KEYS, generator=torch.Generator().manual_seed(0))
NUMBER = torch.arange(KEYS)
ROWS = {
    "equal": torch.full((KEYS,), 0.7),
    "zeros": torch.zeros(KEYS),
    "two values": torch.where(NOISE < 0.1, 2.0, 0.5),
    "few values": (NOISE * 5).floor() / 5,
    "outliers": torch.where(NUMBER % 29 == 5, 1e30, NOISE),
    "one as great as can be": torch.where(NUMBER == 31, torch.finfo(torch.float32).max, NOISE),
    "infinite": torch.where(NUMBER % 40 == 7, math.inf, NOISE),
    "denormals": torch.where(NOISE < 0.5, 1e-44 * (NUMBER % 9), 1e-39 * NOISE),
    "decades": 10.0 ** (-40 * NOISE),
    "ascending": NUMBER / KEYS,
    "descending": 1 - NUMBER / KEYS,
    "neighbours in their last bit": 1 + (NOISE * 30).floor() * 2.0**-23,
    "some NaN": torch.where(NOISE < 0.3, math.nan, NOISE),
    "all NaN": torch.full((KEYS,), math.nan),
    "one above zeros": torch.where(NUMBER == KEYS - 2, 1.0, 0.0),
    "far from even": torch.where(NOISE < 0.05, 1 + NOISE, 1e-6 * NOISE),
}


def select(
    scores: torch.Tensor, count: int, sinks: int = 0, window: int = 0, signed: bool = False
) -> torch.Tensor:
    """What the kernel selects of rows ``[R, N]`` that are seen whole."""
    from fusewright.gsa._core.launches import layouts
    from fusewright.gsa.indexer.launch import indexer_problem

    rows, keys = scores.shape
    operands = [scores.new_empty(s) for s in ((1, rows, 1, 16), (1, keys, 16), (1, rows, 1), (1,))]
    problem = indexer_problem(
        *(operands[0].shape, keys, False, 0, layouts(*operands), "ieee", scores.device),
        gated=not signed,
    )
    law = launch.SelectionLaw("fixed", count, max(sinks + window, 1), count, sinks, window)
    select = launch.plan_select(problem, 0, rows, keys, law, few_registers=False)
    listed = scores.new_empty(rows * select.constants["CONFIG"].BLOCK, dtype=torch.int32)
    indices = scores.new_empty((1, rows, count), dtype=torch.int32)
    counts, variance = indices[..., 0].clone(), scores.new_empty(1, rows)
    listed = listed if select.constants["CONFIG"].LISTED else None
    select((scores, None, listed, None, indices, counts, variance, None))
    assert torch.equal(counts, torch.full_like(counts, min(count, keys)))
    return indices


def hold(
    scores: torch.Tensor, count: int, sinks: int = 0, window: int = 0, signed: bool = False
) -> None:
    """The kernel's selection is that of a stable sort."""
    scores = scores.float()
    seen = torch.ones_like(scores, dtype=torch.bool)[None]
    counts = torch.full(seen.shape[:2], min(count, scores.shape[1]), device=scores.device)
    clean = torch.where(scores.isnan(), 0.0, scores)[None]
    expected = reference.greatest(clean, seen, counts, count, sinks, window)
    found = select(scores, count, sinks, window, signed)
    for row, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        assert torch.equal(one, other.to(one)), list(ROWS)[row]


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "sinks", "window"), [(1, 0, 0), (13, 2, 0), (13, 2, 5)])
def test_any_scores_are_selected_from_exactly(search, count, sinks, window, device):
    hold(torch.stack(list(ROWS.values())).to(device), count, sinks, window)


@pytest.mark.parametrize(("count", "sinks", "window"), [(1, 0, 0), (13, 2, 5)])
@pytest.mark.parametrize("signs", ["all", "some"])
def test_scores_of_either_sign_are_selected_from_exactly(
    search, count, sinks, window, signs, device
):
    rows = torch.stack(list(ROWS.values()))
    negated = torch.ones(KEYS) > 0 if signs == "all" else NUMBER % 3 == 1
    # Adding zero leaves no zero of its own sign, of which scores have none.
    hold(torch.where(negated, -rows, rows).to(device) + 0.0, count, sinks, window, signed=True)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [KEYS - 1, KEYS, KEYS + 3])
def test_nearly_all_keys_of_a_row(search, count, device):
    rows = ("few values", "decades", "some NaN", "infinite")
    hold(torch.stack([ROWS[row] for row in rows]).to(device), count)


@pytest.mark.parametrize("warps", [1, 2])
def test_places_are_those_of_all_runs_before(warps, device, monkeypatch):
    line = launch.SelectConfig(math.inf, 2048, num_warps=warps, max_registers=128)
    assert line.runs > 4
    monkeypatch.setattr(launch, "SELECT", (line,))
    generator = torch.Generator().manual_seed(1)
    hold(torch.rand(1, 1500, generator=generator).to(device), 1300, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [1024, 4096, 16384, 40960])
@pytest.mark.parametrize(
    ("count", "sinks", "window"), [(1, 0, 0), (1000, 4, 0), (1000, 4, 300), (9000, 0, 0)]
)
def test_long_rows_are_selected_from_exactly(keys, count, sinks, window):
    scores = torch.stack(list(ROWS.values())).to("cuda").repeat(1, keys // KEYS)
    hold(scores, count, sinks, window)
    # Hardly a score is that of another.
    hold(scores * torch.linspace(0.9, 1.0, keys, device="cuda"), count, sinks, window)


@pytest.mark.parametrize(
    ("version", "few"), [((3, 6, 0), 64), ((3, 7, 1), 64), ((3, 8, 0), 96)], ids=str
)
def test_lines_of_few_registers_have_what_this_triton_does_not_spill(monkeypatch, version, few):
    monkeypatch.setattr(launch, "triton_version", lambda: version)
    line = launch.SelectConfig(2048, 2048, num_warps=2, max_registers=64, few_registers=True)
    assert line.registers == few
    assert line._replace(few_registers=False).registers == 64
