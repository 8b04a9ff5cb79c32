"""Residual streams: doubly stochastic mixing, near the identity at the start."""

from __future__ import annotations

import pytest
import torch
from fusewright.reversible import MidpointStack
from fusewright_models.models.hybrid.streams import StreamMixer, replicated
from fusewright_testkit import Yardstick
from torch import nn
from torch.func import functional_call

DIM = 6


def mixer(streams=4, **options):
    """One whose every parameter matters."""
    made = StreamMixer(streams, DIM, **options)
    torch.manual_seed(4)
    with torch.no_grad():
        made.phi.normal_()
        made.alpha.fill_(0.7)
        made.bias.normal_()
    return made


def by_the_formula(x, phi, alpha, bias):
    n, t = x.shape[-2], 20
    v = x.flatten(-2)
    s = v @ phi.T / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    s = s * alpha.repeat_interleave(torch.tensor([n, n, n * n])) + bias
    pre, post = s[..., :n].sigmoid(), 2 * s[..., n : 2 * n].sigmoid()
    res = s[..., 2 * n :].unflatten(-1, (n, n)).softmax(-1)
    for step in range(t):
        res = res / res.sum(-1, keepdim=True) if step else res
        res = res / res.sum(-2, keepdim=True)
    u = torch.einsum("...i,...ic->...c", pre, x)
    mixed = torch.einsum("...ij,...jc->...ic", res, x)
    return mixed + torch.einsum("...i,...c->...ic", post, torch.tanh(u))


@pytest.mark.sampled
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_streams_are_mixed_by_the_formula(streams, backend):
    made = mixer(streams, backend=backend)
    names = [name for name, _ in made.named_parameters()]

    def op(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return functional_call(made, given, (x, lambda u: (torch.tanh(u), None)))[0]

    inputs = [torch.randn(2, 3, streams, DIM), *(p.detach() for p in made.parameters())]
    order = [names.index(name) for name in ("phi", "alpha", "bias")]
    reference = lambda x, *given: by_the_formula(x, *(given[k] for k in order))  # noqa: E731
    Yardstick(reference, inputs).check(op)


def test_mixing_keeps_the_sum_of_streams():
    *_, res = mixer().coefficients(torch.randn(5, 4, DIM))
    # Columns are divided last: the quotients, the sums that divide and the one here are rounded.
    bound = 3 * 4 * torch.finfo(res.dtype).eps
    assert (res.sum(-2) - 1).abs().max() <= bound
    assert (res >= 0).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("deviation", [30.0, 100.0])
def test_no_stream_is_lost_to_logits_of_any_size(deviation, backend):
    """A column of zeros would take its stream out of all others."""
    made = mixer(backend=backend)
    with torch.no_grad():
        made.phi.mul_(deviation / made.phi.shape[1] ** 0.5)
        made.alpha.fill_(1.0)
    x = torch.randn(96, 4, DIM, requires_grad=True)
    reading = made.read(x)
    bound = 3 * 4 * torch.finfo(x.dtype).eps
    assert (reading.res.sum(-2) - 1).abs().max() <= bound
    # As documented of the iterations: half of the matrices have rows within 0.05 of one.
    assert (reading.res.sum(-1) - 1).abs().amax(-1).median() < 0.1
    y = made.write(reading, torch.tanh(reading.u))
    grads = torch.autograd.grad(y, [x, *made.parameters()], torch.randn_like(y))
    assert all(grad.isfinite().all() for grad in grads)
    assert all(grad.any() for grad in grads)


@pytest.mark.parametrize("place", [0, 1, 5])
def test_streams_start_apart_and_each_layer_with_its_own(place):
    made = StreamMixer(4, DIM, place=place)
    x = torch.randn(3, 4, DIM)
    pre, post, res = made.coefficients(x)
    assert (res.diagonal(dim1=-2, dim2=-1) > 0.99).all()
    assert (pre.argmax(-1) == place % 4).all()
    assert (post.argmax(-1) == place % 4).all()
    # After thirty-two of them no stream is another's copy.
    mixed = torch.linalg.matrix_power(res[0], 32)
    assert torch.linalg.svdvals(mixed)[-1] > 0.9


def test_replicated_streams_have_the_same_mean():
    x = torch.randn(2, 3, DIM)
    streams = replicated(x, 4)
    assert streams.shape == (2, 3, 4, DIM)
    # Of four equal numbers only the sum of three is rounded.
    assert (streams.mean(-2) - x).abs().le(torch.finfo(x.dtype).eps * x.abs()).all()


def test_mixing_is_fp32_under_autocast_and_the_layer_is_not():
    made = mixer()
    x = torch.randn(2, 4, DIM)
    seen = []

    def layer(u):
        y = u @ torch.eye(DIM)
        seen.append(y.dtype)
        return y, "besides"

    with torch.autocast("cpu", torch.bfloat16):
        y, besides = made(x, layer)
    assert (y.dtype, besides, seen) == (torch.float32, "besides", [torch.bfloat16])
    plain, _ = made(x, lambda u: (u.bfloat16(), None))
    assert torch.equal(y, plain)


def test_every_parameter_learns_from_the_second_step_on():
    made = StreamMixer(4, DIM)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        y, _ = made(torch.randn(5, 4, DIM), lambda u: (torch.tanh(u), None))
        (y * torch.randn(4, 1)).square().sum().backward()
        # alpha multiplies what starts at nothing.
        assert made.alpha.grad.any() == bool(step)
        assert made.phi.grad.any()
        assert made.bias.grad.any()
        optimizer.step()


class Layer(nn.Module):
    """Two readings and writings, as HybridLM's layers have."""

    def __init__(self, streams):
        super().__init__()
        options = dict(iterations=3, backend="triton")
        self.first, self.second = (mixer(streams, **options) for _ in range(2))
        self.linear = nn.Linear(DIM, DIM)

    def force(self, x, *, tape):
        reading = self.first.read(x)
        mixed = self.second.read(self.first.write(reading, torch.tanh(self.linear(reading.u))))
        return self.second.write(mixed, self.linear(mixed.u), origin=reading.origin), None


def stack_of(layers, streams, mode):
    torch.manual_seed(3)
    return MidpointStack([Layer(streams) for _ in range(layers)], mode=mode)


def trained_once(stack, x):
    passed = stack(x)
    loss = passed.x.square().mean()
    return [passed.x.detach(), *torch.autograd.grad(loss, [x, *stack.parameters()])]


def test_reversible_stack_finds_its_states_again(device):
    x = torch.randn(3, 3, DIM, device=device, requires_grad=True)
    exact, stored = (
        trained_once(stack_of(2, 3, mode).to(device), x) for mode in ("exact", "stored")
    )
    assert all(map(torch.equal, exact, stored))
