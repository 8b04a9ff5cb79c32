"""The scan of memories of three layers and more."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp._core import backends
from fusewright.memory_mlp.common.deep_weights import deep_shapes, pack_deep, unpack_deep
from fusewright.memory_mlp.scan import launch_deep_backward, reference
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan

from .compared import assert_same_but_for_rounding
from .operations_scan import DeepOp

F32, F16, F64 = torch.float32, torch.float16, torch.float64
RESTED = dict(rests=True, masked=True)

# Fields and options of the op; rows, tokens, heads, D, hidden units, dtype.
CASES = {
    "3-layers": (dict(chunk=4), (2, 6, 2, 3, 5), F32),
    "4-layers-before-gelu": (
        dict(layers=4, read="before", activation="gelu"),
        (1, 5, 1, 5, 7),
        F32,
    ),
    "5-layers-relu-masked": (dict(layers=5, activation="relu", masked=True), (1, 4, 1, 3, 4), F32),
    "one-token": (dict(chunk=64), (1, 1, 2, 3, 5), F32),
    "short-last-chunk-norm": (dict(chunk=4, residual_norm=True), (1, 6, 1, 6, 5), F32),
    "rest-norm-before": (
        dict(chunk=4, residual_norm=True, read="before", **RESTED),
        (2, 7, 2, 3, 5),
        F32,
    ),
    "several-tiles-rest": (dict(layers=4, chunk=32, rests=True), (1, 40, 1, 20, 40), F16),
    "several-tiles-norm": (dict(chunk=32, residual_norm=True, rests=True), (2, 40, 2, 20, 40), F16),
    "wider-than-hidden": (dict(chunk=20, masked=True), (1, 20, 1, 20, 10), F16),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(name, device):
    options, sizes, dtype = CASES[name]
    op = DeepOp().having(**options)
    op.check(op.draw(*sizes, dtype, device))


@pytest.mark.parametrize("residual_norm", [False, True])
def test_parts_of_the_backward_pass_make_one(residual_norm, device, monkeypatch):
    """The chunks of three parts, the last of them shorter."""
    op = DeepOp().having(chunk=2, residual_norm=residual_norm, rests=True)
    tensors = op.draw(1, 9, 1, 3, 5, F32, device)
    monkeypatch.setattr(launch_deep_backward, "PART_BYTES", 2 * 3 * 2 * 5 * 5 * 8)
    launch_deep_backward.backward_plan.cache_clear()
    op.check(tensors)
    launch_deep_backward.backward_plan.cache_clear()


@pytest.mark.parametrize("residual_norm", [False, True])
@pytest.mark.parametrize("read", ["after", "before"])
def test_scan_is_the_recurrence_token_by_token(read, residual_norm):
    """In fp64, with tokens that are not written, a rest, and gates of 0 and 1; and the loss."""
    op = DeepOp().having(layers=4, **RESTED)
    q, k, v, *others = op.draw(2, 7, 2, 3, 5, F64, rate=0.2)
    halves, gates, rest = (tuple(others[:8]), tuple(others[8:16])), others[16:19], others[19:]
    gates[0][0, ::3], gates[1][1, 1::4] = 1.0, 0.0
    written = torch.rand(2, 7, 2) < 0.6
    options = dict(chunk=3, read=read, residual_norm=residual_norm)
    y, *ends, _, loss = deep_memory_scan(
        *(q, k, v, *halves, *gates, written, tuple(rest)), **options, backend="reference"
    )
    rows = (x.transpose(1, 2) for x in (q, k, v))
    numbers = (x.mT for x in (*gates, written))
    truth = reference.memory_scan_by_token(*rows, *halves, *numbers, tuple(rest), **options)
    found = [y, *(x for end in ends for x in end), loss]
    expected = [truth[0].transpose(1, 2), *truth[1], *truth[2], truth[4].mT]
    assert_same_but_for_rounding(found, expected)


@pytest.mark.parametrize("residual_norm", [False, True])
def test_loss_is_that_of_each_token_at_its_chunks_start(residual_norm, backend, device):
    op = DeepOp().having(chunk=3, residual_norm=residual_norm, rests=True)
    q, k, v, *others = op.draw(2, 7, 2, 3, 5, F32, device)
    written = torch.rand(2, 7, 2, device=device) < 0.6
    halves, gates, rest = (tuple(others[:6]), tuple(others[6:12])), others[12:15], others[15:]

    def losses(dtype: torch.dtype, backend: str) -> torch.Tensor:
        tensors = [[x.to(dtype) for x in group] for group in ((q, k, v), *halves, gates, rest)]
        rows, weights, momentum, own, resting = tensors
        done = deep_memory_scan(
            *(*rows, tuple(weights), tuple(momentum), *own, written, tuple(resting)),
            **dict(chunk=3, residual_norm=residual_norm, backend=backend),
        )
        return done[4]

    found, eager, truth = losses(F32, backend), losses(F32, "reference"), losses(F64, "reference")
    assert not found.requires_grad
    assert (found[~written] == 0.0).all()
    error, allowed = ((x - truth).abs().max() for x in (found, eager))
    assert error <= 2.0 * allowed + 2.0 * torch.finfo(F32).eps * truth.abs().max()


def test_memory_is_packed_and_unpacked():
    halves = [tuple(torch.randn(x) for x in deep_shapes((2, 3), 4, 5, 4)) for _ in range(2)]
    state = pack_deep(*halves)
    for half, found in zip(halves, unpack_deep(state, 4, 5, 4), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(half, found, strict=True))


def test_clip_is_plain_torchs(device, backend):
    """A clip is refused by the kernels, which "auto" says once."""
    op = DeepOp()
    tensors = op.draw(1, 3, 1, 2, 3, F32, device)
    if backend == "triton":
        with pytest.raises(RuntimeError, match="max_grad_norm"):
            op.public(*tensors, max_grad_norm=1.0, backend="triton")
    else:
        assert op.public(*tensors, max_grad_norm=1.0, backend="auto")[0].isfinite().all()


def test_sizes_that_the_kernels_do_not_have_are_refused(device):
    if not backends.interpreted() and device == "cpu":
        pytest.skip("needs the kernels")
    op = DeepOp()
    with pytest.raises(RuntimeError, match="64 columns"):
        op.public(*op.draw(1, 2, 1, 65, 3, F32, device), backend="triton")
