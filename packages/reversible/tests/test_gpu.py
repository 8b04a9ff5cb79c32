"""What only a GPU shows of the reversible stack: memory, no synchronisation, replays."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from fusewright.reversible import MidpointStack
from fusewright_testkit import capture, no_synchronisation
from torch import nn

pytestmark = pytest.mark.gpu

DIM, STREAMS = 256, 4


class Layer(nn.Module):
    """Two layers with residuals, the first with a choice of columns that is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.project = nn.Linear(DIM, DIM)

    def force(self, x, *, tape):
        found = self.project(x)
        places = None if tape is None else tape.replayed()
        if places is None:
            places = found.detach().topk(8, -1).indices
        if tape is not None:
            tape.record(places)
        y = found.gather(-1, places).mean(-1, keepdim=True) * found
        z = self.outer(torch.relu(self.inner(x + y)))
        return y + z, z.square().mean()


def make(layers, mode="exact"):
    torch.manual_seed(0)
    return MidpointStack([Layer() for _ in range(layers)], mode=mode).cuda()


def stepped(stack, x):
    passed = stack(x)
    loss = passed.x.square().mean() + 0.1 * passed.aux
    return [loss.detach(), passed.saturated, *torch.autograd.grad(loss, [x, *stack.parameters()])]


def peak_mib(mode, layers):
    """Of a step, gradients and choices apart."""
    stack = make(layers, mode)
    x = torch.randn(4, 512, STREAMS, DIM, device="cuda", requires_grad=True)
    tape = stack(x).tape_bytes
    stepped(stack, x)
    # What an earlier stack left would be counted off.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = stepped(stack, x)
    gradients = sum(g.nbytes for g in found)
    peak = torch.cuda.max_memory_allocated() - before - gradients - tape
    print(f"{mode} {layers} layers: {peak / 2**20:.1f} MiB, choices {tape / 2**20:.1f} MiB")
    return peak / 2**20


def test_peak_memory_of_states_is_flat_in_depth():
    peaks = [peak_mib("exact", layers) for layers in (8, 16, 32)]
    state = 4 * 512 * STREAMS * DIM * 4 / 2**20
    assert max(peaks) - min(peaks) < 0.5 * state
    # And where states are stored it grows by each.
    stored = [peak_mib("stored", layers) for layers in (8, 16)]
    assert stored[1] - stored[0] > 7 * state


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_steps_wait_for_nothing_and_have_the_same_bits_in_a_graph(mode):
    stack = make(4, mode)
    x = torch.randn(2, 64, STREAMS, DIM, device="cuda", requires_grad=True)
    expected = stepped(stack, x)
    with no_synchronisation():
        again = stepped(stack, x)
    assert all(map(torch.equal, expected, again))
    del expected, again
    graph, captured = capture(lambda: stepped(stack, x))
    with torch.no_grad():
        x.normal_()
    graph.replay()
    found = [value.clone() for value in captured]
    assert not found[1].item()
    assert all(map(torch.equal, found, stepped(stack, x)))


DRAWS = {
    "module": nn.Dropout(0.5),
    "function": lambda y: F.dropout(y, 0.5),
    "noise": lambda y: y + torch.randn_like(y),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.5),
}


class Drawing(nn.Sequential):
    """What a layer draws, behind its linear part."""

    def __init__(self, inner, draw) -> None:
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, x):
        return self.draw(self.inner(x))


def make_drawing(mode, draw):
    stack = make(4, mode)
    for layer in stack.layers:
        layer.inner = Drawing(layer.inner, DRAWS[draw])
    return stack


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_random_numbers_of_the_gpu_are_drawn_again(mode, draw):
    """With others in the backward pass gradients would be of other columns."""
    x = torch.randn(2, 64, STREAMS, DIM, device="cuda", requires_grad=True)

    def stepped_from_a_seed(mode):
        stack = make_drawing(mode, draw)
        torch.cuda.manual_seed(1)
        loss, _, *gradients = stepped(stack, x)
        # What is drawn after the step is what it left.
        return [loss, *gradients, torch.rand(8, device="cuda")]

    for found, expected in zip(
        stepped_from_a_seed(mode), stepped_from_a_seed("plain"), strict=True
    ):
        # Sums of fewer than 2^10 terms, of states that are whole numbers of 2^-20.
        bound = 2**10 / make(4).states.one * expected.double().norm()
        assert (found - expected).double().norm() <= bound


@pytest.mark.parametrize("draw", ["module", "function", "noise"])
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_a_graph_draws_again_what_it_drew(mode, draw):
    """Two replays from a seed have the bits of two eager steps from it, and their own numbers."""
    stack = make_drawing(mode, draw)
    x = torch.randn(2, 64, STREAMS, DIM, device="cuda", requires_grad=True)
    stepped(stack, x)
    torch.cuda.manual_seed(3)
    eager = [stepped(stack, x) for _ in range(2)]
    after = torch.rand(8, device="cuda")
    graph, captured = capture(lambda: stepped(stack, x))
    torch.cuda.manual_seed(3)
    for expected in eager:
        graph.replay()
        assert all(map(torch.equal, captured, expected))
    assert torch.equal(torch.rand(8, device="cuda"), after)
    assert not any(map(torch.equal, eager[0][2:], eager[1][2:]))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_backward_pass_that_is_captured_apart_is_refused_where_layers_draw():
    class Last(nn.Module):
        def __init__(self, stack) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, x):
            return self.stack(x).x

    x = torch.randn(2, 64, STREAMS, DIM, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(Last(make(2)), (x,))
    with pytest.raises(RuntimeError, match="in the CUDA graph of its forward pass"):
        torch.cuda.make_graphed_callables(Last(make_drawing("exact", "noise")), (x,))


def test_exact_gradients_are_those_of_stored_states_to_the_bit():
    x = torch.randn(2, 128, STREAMS, DIM, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        found = [stepped(make(12, mode), x) for mode in ("exact", "stored")]
    assert all(map(torch.equal, *found))
