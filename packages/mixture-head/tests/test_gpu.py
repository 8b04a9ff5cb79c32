"""What only a GPU can show: questions to a head, great sizes, the launch tables."""

from __future__ import annotations

import pytest
import torch
from fusewright.mixture_head import GaussianMixtureHead, mixture_log_likelihood
from fusewright.mixture_head.heads import launch as heads_launch
from fusewright.mixture_head.heads import recomputed_heads
from fusewright.mixture_head.mixture import launch
from fusewright_testkit import no_synchronisation
from fusewright_testkit.conformance import everything, same_bits

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def no_wait():
    """Fail where the host waits for the GPU; what a first call does has been done before."""

    def check(call):
        call()
        with no_synchronisation():
            call()

    return check


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_question_to_a_head_waits_for_the_gpu(backend, scale, no_wait):
    head = GaussianMixtureHead(8, 40, 10, outputs=2, scale=scale, backend=backend, device="cuda")
    t, y = torch.randn(64, 8, device="cuda"), torch.randn(64, 2, device="cuda")
    mask = y > 0

    def everything():
        params = head(t)
        answers = (
            head.quantiles(params, (0.1, 0.9)),
            head.log_likelihood(params, y),
            head.cdf(params, y),
            head.mean(params),
            head.variance(params),
            head.sample(params),
        )
        (head.loss(params, y, mask) + sum(answer.sum() for answer in answers)).backward()

    no_wait(everything)


@pytest.mark.parametrize(
    "components", [int(config.max_components) for config in launch.FORWARD[:-1]] + [17, 1500]
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_every_line_of_the_table_is_as_near_to_fp64_as_torch(
    mixture, scale, components, dtype, draw_mixtures
):
    mixture.check(draw_mixtures((1000, components), dtype, "cuda"), scale=scale)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_heads_of_the_model_are_as_near_to_fp64_as_torch(heads, dtype, draw_heads):
    heads.check(draw_heads((3000, 512), dtype, "cuda", stored=1376, heads=10))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_chunks_of_the_model_are_as_near_to_fp64_as_torch(
    recomputing_heads, dtype, draw_heads, monkeypatch
):
    monkeypatch.setattr(recomputed_heads, "CHUNK_UNITS", 1024 * 10 * 1376)
    leaves = draw_heads((3000, 512), dtype, "cuda", stored=1376, heads=10)
    recomputing_heads.check(leaves)


def test_a_call_of_the_model_keeps_half_a_gigabyte(recomputing_heads, draw_heads):
    leaves = draw_heads((128000, 512), BF16, "cuda", stored=1376, heads=10)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(recomputing_heads.kernels(*leaves).sum(), leaves)
    assert torch.cuda.max_memory_allocated() - before < 5e8


def test_more_heads_than_two_axes_of_a_grid_hold(heads, draw_heads):
    heads.check(draw_heads((40, 3), F32, "cuda", stored=2, heads=70_000))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_loss_of_the_model_is_as_near_to_fp64_as_torch(nll, scale, dtype, draw_mixtures):
    nll.check(draw_mixtures((128000, 10), dtype, "cuda"), scale=scale)


def test_same_inputs_same_bits_at_full_size(op):
    leaves = op.leaves((128000, 10), BF16, "cuda")
    assert same_bits(everything(op.kernels, leaves), everything(op.kernels, leaves))


@pytest.mark.large
def test_hidden_units_past_31_bits_of_elements():
    rows = 2**31 // (10 * 1376) + 300
    u = torch.randn(rows, 10, 1376, device="cuda", dtype=BF16)
    weight = torch.randn(10, 1376, 3, device="cuda")
    chosen = torch.tensor([0, 1, rows // 2, rows - 1], device="cuda")

    def value_and_gradient(u):
        out = heads_launch.silu_heads(u, weight)
        return out, heads_launch.silu_heads_backward(torch.ones_like(out), u, weight)[0]

    few = value_and_gradient(u[chosen])
    for found, expected in zip(value_and_gradient(u), few, strict=True):
        assert torch.equal(found[chosen], expected)


@pytest.mark.large
def test_parameters_past_31_bits_of_elements():
    rows = 2**31 // 30 + 300
    params = torch.randn(rows, 10, 3, device="cuda", dtype=BF16)
    y = torch.randn(rows, device="cuda")
    chosen = torch.tensor([0, 1, rows // 2, rows - 1], device="cuda")

    def value_and_gradients(params, y):
        leaves = [t.detach().requires_grad_() for t in (params, y)]
        log_p = mixture_log_likelihood(*leaves, backend="triton")
        return log_p.detach(), *torch.autograd.grad(log_p, leaves, torch.ones_like(log_p))

    few = value_and_gradients(params[chosen], y[chosen])
    for found, expected in zip(value_and_gradients(params, y), few, strict=True):
        assert torch.equal(found[chosen], expected)
