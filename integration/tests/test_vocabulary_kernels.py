"""The launch that turns logits into their gradient; what it is for, test_vocabulary_loss has."""

from __future__ import annotations

import pathlib

import pytest
import torch
from fusewright_models import vocabulary_loss as module
from fusewright_models._vocabulary_kernels import softmax_gradient_
from fusewright_models.vocabulary_loss import vocabulary_loss
from fusewright_testkit.compiled import GPUS, compiled_in_a_process

HERE = pathlib.Path(__file__).parent
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def softmax_gradient(logits, targets):
    """The same by torch, in the dtype of the logits' logarithms."""
    wide = torch.promote_types(logits.dtype, F32)
    log_p = torch.log_softmax(logits, -1, dtype=wide).gather(-1, targets.unsqueeze(-1))
    g = torch.softmax(logits, -1).scatter(-1, targets.unsqueeze(-1), log_p.expm1().to(logits.dtype))
    return log_p.squeeze(-1), g


def assert_no_worse_than_torch(logits, targets) -> None:
    """Both held against fp64: at most twice torch's error and two units in the last place."""
    truth = softmax_gradient(logits.double(), targets)
    plain = softmax_gradient(logits, targets)
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
    x = torch.randn(33, 8, device=device, requires_grad=True)
    weight = torch.randn(50, 8, device=device, requires_grad=True)
    targets = torch.randint(50, (33,), device=device)
    targets[4:9] = -100
    truth = vocabulary_loss(x.double(), weight.double(), targets)
    exact = [truth, *torch.autograd.grad(truth, (x, weight))]
    errors = []
    for serves in (True, False):
        monkeypatch.setattr(module, "_kernel_serves", lambda logits, serves=serves: serves)
        loss = vocabulary_loss(x, weight, targets)
        found = [loss, *torch.autograd.grad(loss, (x, weight))]
        errors.append([(y - z).detach().abs().max() for y, z in zip(found, exact, strict=True)])
    ulps = [2 * torch.finfo(F32).eps * z.detach().abs().max() for z in exact]
    for ours, eager, unit in zip(*errors, ulps, strict=True):
        assert ours <= 2 * eager + unit


@pytest.mark.parametrize("capability", GPUS)
def test_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "softmax_gradients", capability)
    assert printed.count("_softmax_gradient_kernel") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("vocabulary", [257, 32000, 49152, 151936])
def test_full_vocabularies_are_as_near_to_fp64_as_torch(vocabulary, dtype):
    assert_no_worse_than_torch(*drawn(300, vocabulary, dtype, "cuda"))


@pytest.mark.gpu
def test_logits_past_31_bits_of_elements():
    logits = torch.randn(2**31 // 32000 + 2, 32000, device="cuda", dtype=BF16)
    targets = torch.randint(32000, (len(logits),), device="cuda")
    last = logits[-2:].clone()
    log_p = softmax_gradient_(logits, targets, with_gradient=True)
    assert torch.equal(log_p[-2:], softmax_gradient_(last, targets[-2:], with_gradient=True))
    assert torch.equal(logits[-2:], last)


@pytest.mark.gpu
def test_loss_takes_the_launch_on_a_card_and_compiles_without_it(monkeypatch):
    asked = []
    serves = module._kernel_serves
    monkeypatch.setattr(module, "_kernel_serves", lambda x: asked.append(serves(x)) or asked[-1])
    x = torch.randn(300, 64, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(5000, 64, device="cuda", dtype=BF16, requires_grad=True)
    targets = torch.randint(5000, (300,), device="cuda")
    loss = vocabulary_loss(x, weight, targets)
    assert asked
    assert all(asked)
    monkeypatch.undo()
    truth = vocabulary_loss(x.double(), weight.double(), targets)
    compiled = torch.compile(vocabulary_loss, fullgraph=True)(x, weight, targets)
    unit = torch.finfo(F32).eps * truth
    assert abs(compiled - truth) <= 2 * abs(loss - truth) + 2 * unit
    assert abs(loss - truth) <= 2 * abs(compiled - truth) + 2 * unit
