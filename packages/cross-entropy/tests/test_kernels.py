"""The launch that turns logits into their gradient; its use is in test_linear_cross_entropy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.cross_entropy.linear import launch, reference
from fusewright.cross_entropy.linear import linear_cross_entropy as module
from fusewright.cross_entropy.linear.launch import softmax_gradient_
from fusewright_testkit import Yardstick

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def assert_no_worse_than_torch(logits, targets) -> None:
    """Both held against fp64: at most twice torch's error and two units in the last place."""
    truth = reference.softmax_gradient(logits.double(), targets, with_gradient=True)
    plain = reference.softmax_gradient(logits, targets, with_gradient=True)
    ours = logits.clone()
    found = softmax_gradient_(ours, targets, with_gradient=True), ours
    for value, eager, wanted in zip(found, plain, truth, strict=True):
        # The dtype that fp32 and the logits' own one give.
        unit = torch.finfo(value.dtype).eps * wanted.abs().amax(-1, keepdim=True)
        allowed = 2 * (eager.double() - wanted).abs().amax(-1, keepdim=True) + 2 * unit
        assert value.dtype == eager.dtype
        assert ((value.double() - wanted).abs() <= allowed).all()


def drawn(rows, vocabulary, dtype, device, scale=3.0):
    logits = scale * torch.randn(rows, vocabulary, device=device)
    return logits.to(dtype), torch.randint(vocabulary, (rows,), device=device)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("size", [(5, 1), (7, 33), (3, 256), (2, 9001)], ids=str)
def test_logarithm_and_gradient_are_those_of_torch(device, size, dtype):
    assert_no_worse_than_torch(*drawn(*size, dtype, device))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4, 1e30])
def test_tiny_and_huge_logits(device, scale):
    assert_no_worse_than_torch(*drawn(4, 300, F32, device, scale))


def test_without_a_gradient_the_logits_stay(device):
    logits, targets = drawn(4, 300, F32, device)
    kept = logits.clone()
    found = softmax_gradient_(logits, targets, with_gradient=False)
    assert torch.equal(logits, kept)
    assert torch.equal(found, softmax_gradient_(logits, targets, with_gradient=True))


def test_impossible_tokens_have_no_share(device):
    """Some at -inf, a whole block of them too; rows of nothing else are NaN, as torch's."""
    logits, targets = drawn(3, 9000, F32, device)
    logits[:, 10:8500] = -torch.inf
    targets[:] = 3
    assert_no_worse_than_torch(logits, targets)
    logits[1] = -torch.inf
    log_p = softmax_gradient_(logits, targets, with_gradient=True)
    assert log_p.isnan().tolist() == [False, True, False]
    assert logits.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_strange_logit_stays_in_its_row(device, strange):
    logits, targets = drawn(3, 9000, F32, device)
    logits[1, 7000] = strange
    log_p = softmax_gradient_(logits, targets, with_gradient=True)
    assert log_p.isnan().tolist() == [False, True, False]
    assert logits.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("target", [-1, 300, 2**40])
def test_target_that_is_no_token_makes_its_row_nan_and_reads_nothing(device, target):
    logits, targets = drawn(3, 300, F32, device)
    targets[1] = target
    log_p = softmax_gradient_(logits, targets, with_gradient=True)
    assert log_p.isnan().tolist() == [False, True, False]
    assert logits.isnan().all(-1).tolist() == [False, True, False]


def test_targets_of_any_stride(device):
    logits, targets = drawn(4, 300, F32, device)
    spread = torch.stack([targets, 0 * targets], 1)[:, 0]
    found = softmax_gradient_(logits.clone(), spread, with_gradient=True)
    assert torch.equal(found, softmax_gradient_(logits, targets, with_gradient=True))


def test_no_rows(device):
    logits, targets = drawn(0, 300, F32, device)
    assert softmax_gradient_(logits, targets, with_gradient=True).shape == (0,)


def test_loss_by_the_launch_is_the_loss_by_torch(device, monkeypatch):
    """Chunks of a few rows, some of them ignored."""
    monkeypatch.setattr(module, "_torchs_is_exact", lambda dtype: False)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 400)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    x = torch.randn(33, 8, device=device, requires_grad=True)
    weight = torch.randn(50, 8, device=device, requires_grad=True)
    targets = torch.randint(50, (33,), device=device)
    targets[4:9] = -100
    truth = linear_cross_entropy(x.double(), weight.double(), targets)
    exact = [truth, *torch.autograd.grad(truth, (x, weight))]
    errors = []
    for backend in ("triton", "reference"):
        loss = linear_cross_entropy(x, weight, targets, backend=backend)
        found = [loss, *torch.autograd.grad(loss, (x, weight))]
        errors.append([(y - z).detach().abs().max() for y, z in zip(found, exact, strict=True)])
    ulps = [2 * torch.finfo(F32).eps * z.detach().abs().max() for z in exact]
    for ours, eager, unit in zip(*errors, ulps, strict=True):
        assert ours <= 2 * eager + unit


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_loss_and_gradients_are_as_near_to_fp64_as_torch(dtype, backend, device):
    x = torch.randn(33, 8, device=device, dtype=dtype)
    weight = torch.randn(50, 8, device=device, dtype=dtype)
    targets = torch.randint(50, (33,), device=device)
    Yardstick(reference.linear_cross_entropy, [x, weight, targets]).check(
        partial(linear_cross_entropy, backend=backend)
    )


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("rows", "width"), [(5000, 320), (4400, 2560)])
def test_full_sizes_are_as_near_to_fp64_as_torch(rows, width, dtype):
    """In two chunks; the second size in bf16 as a whole."""
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    weight = (torch.randn(32000, width, device="cuda") * width**-0.5).to(dtype)
    targets = torch.randint(32000, (rows,), device="cuda")
    Yardstick(reference.linear_cross_entropy, [x, weight, targets]).check(
        partial(linear_cross_entropy, backend="triton")
    )


@pytest.mark.parametrize("dtype", [F32, F16])
def test_auto_on_a_cpu_is_the_reference_to_the_bit(dtype):
    x, weight = torch.randn(9, 8).to(dtype), torch.randn(50, 8).to(dtype)
    targets = torch.randint(50, (9,))
    found, expected = (
        linear_cross_entropy(x, weight, targets, backend=backend)
        for backend in ("auto", "reference")
    )
    assert torch.equal(found, expected)


def test_triton_takes_the_launch_once_a_chunk_and_refuses_fp64(device, monkeypatch):
    calls = []

    def counted(logits, targets, **options):
        calls.append((len(logits), options["with_gradient"]))
        return softmax_gradient_(logits, targets, **options)

    monkeypatch.setattr(launch, "softmax_gradient_", counted)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    x = torch.randn(25, 8, device=device, requires_grad=True)
    weight, targets = torch.randn(50, 8, device=device), torch.zeros(25, dtype=torch.int64)
    targets = targets.to(device)
    linear_cross_entropy(x, weight, targets, backend="triton")
    assert calls == [(9, True), (9, True), (7, True)]
    linear_cross_entropy(x.detach(), weight, targets, backend="triton")
    assert calls[3:] == [(9, False), (9, False), (7, False)]
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        linear_cross_entropy(x.double(), weight.double(), targets, backend="triton")


@pytest.mark.parametrize("shape", [(3, 700), (1, 1), (70, 61), (0, 5)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F16), (F16, F16)])
def test_gradients_times_a_number_are_the_references_to_the_bit(dtypes, shape, device):
    x, factor = torch.randn(shape, device=device).to(dtypes[0]), torch.tensor(1 / 3, device=device)
    found = launch.scaled(x, factor, dtypes[1])
    assert torch.equal(found, reference.scaled(x, factor, dtypes[1]))
    assert found.dtype == dtypes[1]


def test_rows_are_cut_where_it_saves_memory():
    """All logits in bf16, 2 N V bytes, beside dw in fp32, 4 V d bytes."""
    large = dict(vocabulary=131072, width=4096)
    assert module._chunks(8192, **large, whole=True) == 1
    assert module._chunks(8193, **large, whole=True) == 3
    assert module._chunks(8192, **large, whole=False) == 2
    assert module._chunks(0, **large, whole=False) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("vocabulary", [257, 32000, 49152, 151936])
def test_full_vocabularies_are_as_near_to_fp64_as_torch(vocabulary, dtype):
    assert_no_worse_than_torch(*drawn(300, vocabulary, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.large
def test_logits_past_31_bits_of_elements():
    logits = torch.randn(2**31 // 32000 + 2, 32000, device="cuda", dtype=BF16)
    targets = torch.randint(32000, (len(logits),), device="cuda")
    last = logits[-2:].clone()
    log_p = softmax_gradient_(logits, targets, with_gradient=True)
    assert torch.equal(log_p[-2:], softmax_gradient_(last, targets[-2:], with_gradient=True))
    assert torch.equal(logits[-2:], last)


@pytest.mark.gpu
def test_loss_takes_the_launch_on_a_gpu_and_compiles_without_it(monkeypatch):
    calls = []

    def counted(*operands, **options):
        calls.append(operands)
        return softmax_gradient_(*operands, **options)

    monkeypatch.setattr(launch, "softmax_gradient_", counted)
    x = torch.randn(300, 64, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(5000, 64, device="cuda", dtype=BF16, requires_grad=True)
    targets = torch.randint(5000, (300,), device="cuda")
    loss = linear_cross_entropy(x, weight, targets)
    assert len(calls) == 1
    truth = linear_cross_entropy(x.double(), weight.double(), targets)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)(x, weight, targets)
    assert len(calls) == 1
    unit = torch.finfo(F32).eps * truth
    assert abs(compiled - truth) <= 2 * abs(loss - truth) + 2 * unit
    assert abs(loss - truth) <= 2 * abs(compiled - truth) + 2 * unit
