"""The reversible stack: states come back to the bit, gradients are those of plain autograd."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from fusewright.reversible import MidpointStack, Tape
from fusewright.reversible.midpoint.midpoint_stack import MODES, Run
from fusewright.reversible.midpoint.reference import midpoint_rule
from fusewright.reversible.midpoint.replay import GPU, Generators
from fusewright_testkit import Yardstick
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

WIDTH = 6


@pytest.fixture
def uncollected():
    """What is let go of is let go of at once, not by the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Layer(nn.Module):
    """x -> W2 tanh(W1 x) with what a layer may have besides: a choice, dropout, a mean that it
    keeps, and something to add to the loss.
    """

    def __init__(self, *, drop: float = 0.0, keeps: bool = False, chooses: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(drop)
        self.keeps, self.chooses = keeps, chooses
        self.calls: list[bool] = []
        if keeps:
            self.register_buffer("mean", torch.ones(()))
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)

    def force(
        self, x: Tensor, *, tape: Tape | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(torch.is_grad_enabled())
        y = self.outer(self.dropout(torch.tanh(self.inner(x * self.table))))
        if self.keeps:
            y = y * self.mean.clone()
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * x.detach().abs().mean())
        if self.chooses:
            columns = None if tape is None else tape.replayed()
            if columns is None:
                columns = torch.randint(0, WIDTH, (WIDTH,))
            if tape is not None:
                tape.record(columns)
            y = y[..., columns]
        return scale * y, y.square().mean()


def make(mode="exact", layers=5, backend="auto", **options):
    torch.manual_seed(3)
    return MidpointStack([Layer(**options) for _ in range(layers)], mode=mode, backend=backend)


def results(stack: MidpointStack, x: Tensor, **context: object) -> list[Tensor]:
    """Last state, aux, and the gradients of x and of the parameters."""
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    passed = stack(x, **context)
    loss = (passed.x * torch.cos(passed.x.detach())).sum() + 0.3 * passed.aux
    grads = torch.autograd.grad(loss, [x, *stack.parameters()])
    assert not passed.saturated.item()
    return [passed.x.detach(), passed.aux.detach(), *grads]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("layers", [1, 2, 3, 32])
def test_states_come_back_to_the_bit(layers):
    """Gradients from states recomputed are those from states that were stored."""
    x = torch.randn(4, 7, WIDTH)
    exact, stored = (results(make(mode, layers), x) for mode in ("exact", "stored"))
    assert same_bits(exact, stored)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_gradients_are_those_of_plain_autograd(mode):
    stacks = {name: make(name, 8) for name in (mode, "plain")}
    names = [name for name, _ in stacks[mode].named_parameters()]

    def through(name):
        def op(x, *parameters):
            given = dict(zip(names, parameters, strict=True))
            passed = functional_call(stacks[name], {**given, **tables(stacks[name], x.dtype)}, (x,))
            return passed.x, passed.aux

        return op

    inputs = [torch.randn(3, 5, WIDTH), *(p.detach() for p in stacks[mode].parameters())]
    Yardstick(through("plain"), inputs).check(through(mode))


def tables(stack, dtype):
    return {name: x.to(dtype) for name, x in stack.named_buffers()}


def test_all_modes_have_the_same_states():
    x = torch.randn(2, 3, WIDTH)
    found = [results(make(mode, 6), x)[:2] for mode in MODES]
    with torch.no_grad():
        passed = make("exact", 6)(x)
    for state, aux in found:
        assert torch.equal(state, passed.x)
        assert torch.equal(aux, passed.aux)


def test_recurrence_is_the_midpoint_rule():
    stack = make("plain", 4)
    x = torch.randn(2, WIDTH)
    h, forces = stack.step, [lambda p, f=f: f.force(p, tape=None)[0] for f in stack.layers]
    before, after = x, x + h / 2 * forces[0](x)
    for force in forces[1:]:
        before, after = after, before + 2 * h * force(after)
    assert torch.equal(midpoint_rule(x, forces, h), after)
    # Half a unit of rounding a layer, and what the layers after make of it.
    bound = len(stack.layers) * 2 / stack.states.one
    assert (stack(x).x - after).abs().max() <= bound


@pytest.mark.parametrize("what", ["chooses", "keeps", "drop"])
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_layer_is_recomputed_as_it_was(mode, what):
    """Its choices, its random numbers, and the state that it keeps, which is not kept twice."""
    options = {what: 0.4 if what == "drop" else True}
    x = torch.randn(3, 4, WIDTH)
    stack, plain = make(mode, **options), make("plain", **options)
    found, expected = results(stack, x), results(plain, x)
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth)
    assert all(layer.calls == [False, True] for layer in stack.layers)
    assert same_bits(list(stack.buffers()), list(plain.buffers()))


def test_choices_are_counted_and_kept_once():
    stack = make(chooses=True)
    passed = stack(torch.randn(2, WIDTH, requires_grad=True))
    assert passed.tape_bytes == 5 * WIDTH * 8
    assert make()(torch.randn(2, WIDTH, requires_grad=True)).tape_bytes == 0
    with torch.no_grad():
        assert stack(torch.randn(2, WIDTH)).tape_bytes == 0


def test_what_is_kept_in_several_places_is_counted_once():
    chosen = torch.randperm(WIDTH)
    stack = make(chooses=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_: chosen)
        assert stack(torch.randn(2, WIDTH, requires_grad=True)).tape_bytes == WIDTH * 8


def test_what_is_kept_goes_with_the_backward_pass(uncollected):
    """While the loss is still held, and with all the rest once it is not."""
    stack = make(chooses=True)
    kept = []
    record = Tape.record

    def recorded(tape, choice):
        kept.append(weakref.ref(choice))
        record(tape, choice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "record", recorded)
        for _ in range(2):
            kept.clear()
            loss = stack(torch.randn(2, WIDTH)).x.sum()
            here = weakref.ref(loss.grad_fn.next_functions[0][0])
            assert all(choice() is not None for choice in kept)
            loss.backward()
            assert all(choice() is None for choice in kept)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        del loss
        assert here() is None


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_autocast_of_the_forward_pass_is_that_of_the_backward_pass(mode):
    found = []
    for each in (mode, "plain"):
        stack = make(each)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = stack(x).x.square().sum()
        found.append(torch.autograd.grad(loss, [x, *stack.parameters()]))
    for value, truth in zip(*found, strict=True):
        assert value.dtype == truth.dtype == torch.float32
        torch.testing.assert_close(value, truth)


def test_states_that_are_kept_do_not_grow_with_depth():
    def kept(mode, layers):
        sizes: list[int] = []
        stack = make(mode, layers)

        def size(x):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(size, lambda x: x):
            stack(torch.randn(50, WIDTH, requires_grad=True))
        return sum(n for n in sizes if n >= 50 * WIDTH) / (50 * WIDTH)

    assert [kept("exact", layers) for layers in (8, 16, 32)] == [2.0] * 3
    assert [kept("stored", layers) for layers in (8, 16)] == [9.0, 17.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [1e4, float("nan"), float("inf")])
def test_state_out_of_range_spoils_the_loss_and_every_gradient(mode, bad):
    stack = make(mode)
    x = torch.randn(3, WIDTH)
    x[1, 2] = bad
    x.requires_grad_()
    passed = stack(x)
    assert passed.saturated.item()
    assert passed.x.isnan().all()
    passed.x.sum().backward()
    for p in stack.parameters():
        assert p.grad.isnan().all()


@pytest.mark.parametrize("mode", MODES)
def test_force_out_of_range_sets_the_flag_too(mode):
    for factor in (1e6, float("nan")):
        stack = make(mode)
        with torch.no_grad():
            stack.layers[2].outer.bias.mul_(factor)
        assert stack(torch.randn(3, WIDTH, requires_grad=True)).saturated.item()


def test_layers_that_share_parameters_add_their_gradients():
    found = []
    for mode in MODES:
        torch.manual_seed(5)
        layer = Layer()
        found.append(
            results(MidpointStack([layer, Layer(), layer], mode=mode), torch.ones(2, WIDTH))
        )
    assert same_bits(found[0], found[1])
    for value, truth in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(value, truth)


def test_every_parameter_has_a_gradient_and_frozen_ones_none():
    stack = make()
    stack.layers[1].inner.weight.requires_grad_(False)
    stack(torch.randn(3, WIDTH), scale=2.0).x.sum().backward()
    for name, p in stack.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) == (name != "layers.1.inner.weight")


def test_numbers_of_every_kind_of_dropout_are_drawn_once():
    found = []
    for mode in MODES:
        stack = make(mode, drop=0.4)
        for layer in stack.layers:
            layer.dropout = nn.Dropout1d(0.4)
        found.append(results(stack, torch.randn(3, 4, WIDTH, generator=torch.manual_seed(2))))
    assert same_bits(found[0], found[1])
    for value, truth in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(value, truth)


def test_compiled_stack_equals_the_eager_one():
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        stack = make(layers=2, chooses=True)
        call = torch.compile(stack, backend="aot_eager") if compiles else stack
        x = torch.ones(2, WIDTH, requires_grad=True)
        torch.manual_seed(4)
        passed = call(x)
        loss = passed.x.square().sum() + passed.aux
        found.append([loss, *torch.autograd.grad(loss, [x, *stack.parameters()])])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_frozen_parameters_are_those_of_the_forward_pass(mode):
    """Others' for one call, as of an average; and none that have changed meanwhile."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    found = []
    for each in (mode, "plain"):
        stack = make(each)
        drawn = torch.Generator().manual_seed(8)
        given = {
            name: torch.randn(p.shape, generator=drawn) for name, p in stack.named_parameters()
        }
        found.append(torch.autograd.grad(functional_call(stack, given, (x,)).x.sum(), x)[0])
    torch.testing.assert_close(*found)
    stack = make(mode).requires_grad_(False)
    passed = stack(x)
    stack.layers[1].outer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.x.sum().backward()


def test_bad_options_are_refused():
    layers = [Layer()]
    for options, message in (
        (dict(step=float("nan")), "step must be a finite number, got nan"),
        (dict(mode="fast"), 'mode must be "exact" or "stored" or "plain", got \'fast\''),
        (dict(fraction_bits=30), "fraction_bits must be from 1 to 29, got 30"),
        (dict(backend="torch"), 'backend must be "auto", "triton" or "reference"'),
    ):
        with pytest.raises(ValueError, match=message):
            MidpointStack(layers, **options)
    with pytest.raises(ValueError, match="layers must be at least one"):
        MidpointStack([])
    with pytest.raises(TypeError, match="layers must have a method force, got Linear"):
        MidpointStack([nn.Linear(2, 2)])


class Force(nn.Module):
    """A layer of one function of x and of what else the stack passes."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def force(self, x, *, tape, **context):
        return self.function(self, x, **context)


@pytest.mark.parametrize("mode", MODES)
def test_bad_input_is_refused(mode):
    stack = make(mode, 2)
    with pytest.raises(ValueError, match="context must be without gradients"):
        stack(torch.ones(WIDTH), scale=torch.ones((), requires_grad=True))
    for x, message in ((torch.ones(WIDTH).int(), "int32"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"x must be .*, got .*{message}"):
            stack(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("of", [lambda x: x.expand(2, *x.shape), lambda x: x.mean(0, keepdim=True)])
def test_force_of_another_shape_is_refused(of, backend, mode):
    stack = MidpointStack([Force(lambda self, x: (of(x), None))], mode=mode, backend=backend)
    with pytest.raises(ValueError, match=r"delta must have the state's shape \(3, 6\), got"):
        stack(torch.ones(3, WIDTH))


@pytest.mark.parametrize("aux", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_aux_may_be_without_a_graph_and_a_force_transposed(aux):
    def force(self, x):
        return torch.tanh(self.weight * x).t().contiguous().t(), aux

    x, found = torch.randn(7, WIDTH), []
    for mode in MODES:
        for backend in ("triton", "reference"):
            stack = MidpointStack([Force(force) for _ in range(3)], mode=mode, backend=backend)
            found.append(results(stack, x))
    assert found[0][1] == 3 * 0.25
    assert all(same_bits(found[0][:2], other[:2]) for other in found)
    assert all(same_bits(found[0], other) for other in found[:4])


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_second_backward_pass_has_the_gradients_of_the_first(mode):
    """Where a force changes a buffer of its own, too."""

    def force(self, x):
        self.calls += 1
        return torch.tanh(self.weight * x) * self.calls, None

    stack = MidpointStack([Force(force) for _ in range(4)], mode=mode)
    x = torch.ones(3, WIDTH, requires_grad=True)
    loss, leaves = stack(x).x.square().sum(), [x, *stack.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert same_bits(first, torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("mode", MODES)
def test_context_that_changes_before_the_backward_pass_is_noticed(mode):
    def force(self, x, mask):
        return torch.tanh(self.weight * x) * mask, None

    mask = torch.ones(WIDTH)
    passed = MidpointStack([Force(force) for _ in range(2)], mode=mode)(
        torch.ones(3, WIDTH), mask=mask
    )
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.x.sum().backward()


def test_one_launch_a_step_passes_a_stack():
    x = torch.randn(3, 5, WIDTH)
    found = []
    for backend in ("triton", "reference"):
        found.append(results(make(layers=4, backend=backend), x))
    assert same_bits(*found)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_those_of_a_start_laid_out_otherwise(mode):
    """Columns of a table, the same row again and again: the launches take states as they lie."""
    for x in (torch.randn(WIDTH, 7).t(), torch.randn(1, WIDTH).expand(7, WIDTH)):
        found = []
        for backend in ("triton", "reference"):
            for start in (x, x.contiguous()):
                found.append(results(make(mode, 3, backend), start))
        assert all(same_bits(found[0], other) for other in found[1:])


class Random(nn.Module):
    """A layer of one function of x and of numbers that it draws itself."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Linear(WIDTH, WIDTH)

    def force(self, x, *, tape):
        return self.draw(torch.tanh(self.linear(x))), None


DRAWS = {
    "dropout": lambda y: F.dropout(y, 0.4),
    "noise": lambda y: y * torch.randn_like(y),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.5),
    "relu": lambda y: F.rrelu(y, training=True),
    "switch": lambda y: y if torch.rand(()) < 0.5 else 2.0 * y.sin(),
    "gumbel": lambda y: F.gumbel_softmax(y),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_random_numbers_of_any_function_are_drawn_again(mode, draw):
    """And the backward pass leaves what is drawn after it as it was."""
    x, found = torch.randn(3, 5, WIDTH), []
    for each in (mode, "plain"):
        torch.manual_seed(5)
        stack = MidpointStack([Random(DRAWS[draw]) for _ in range(6)], mode=each)
        found.append([*results(stack, x), torch.rand(4)])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_states_of_random_numbers_are_kept_where_a_layer_draws(mode):
    layers = [Random(DRAWS["noise"] if number % 2 else torch.sin) for number in range(4)]
    run = Run(MidpointStack(layers, mode=mode), {})
    run.forward(torch.randn(2, WIDTH))
    assert [len(around.random) for around in run.surroundings] == [0, 1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", [False, True], ids=["between", "last"])
def test_force_may_be_without_a_graph(mode, last):
    """Of a layer that is skipped: zeros, or x itself, detached."""

    def skipped(self, x):
        return (torch.zeros_like(x) if last else 0.5 * x.detach()), None

    def force(self, x):
        return torch.tanh(self.weight * x), None

    x, found = torch.randn(3, WIDTH), []
    skip = {0, 1, 4} if last else {0, 2}
    for each in (mode, "plain"):
        layers = [Force(skipped if number in skip else force) for number in range(5)]
        stack = MidpointStack(layers, mode=each)
        start = x.clone().requires_grad_()
        stack(start).x.square().sum().backward()
        found.append([start.grad, *(p.grad for p in stack.parameters())])
    for value, truth in zip(*found, strict=True):
        assert (value is None) == (truth is None)
        if truth is not None:
            torch.testing.assert_close(value, truth)
    # The last state is a sum of every other force: skipping the last layer skips the one before.
    assert sum(value is None for value in found[0]) == (4 if last else 2)


@pytest.mark.parametrize("mode", MODES)
def test_layers_dropped_by_chance_are_dropped_again(mode):
    def draw(y):
        return torch.zeros_like(y) if torch.rand(()) < 0.5 else y

    x, found = torch.randn(3, WIDTH), []
    for each in (mode, "plain"):
        torch.manual_seed(5)
        stack = MidpointStack([Random(draw) for _ in range(8)], mode=each)
        start = x.clone().requires_grad_()
        stack(start).x.square().sum().backward()
        found.append([start.grad, *(p.grad for p in stack.parameters())])
    dropped = [value is None or not value.any() for value in found[0]]
    assert any(dropped)
    assert not all(dropped)
    for value, truth in zip(*found, strict=True):
        if truth is not None:
            torch.testing.assert_close(value, truth)
        else:
            assert value is None


def test_second_backward_pass_draws_the_same_numbers():
    stack = MidpointStack([Random(DRAWS["noise"]) for _ in range(4)])
    x = torch.randn(3, WIDTH, requires_grad=True)
    loss = stack(x).x.square().sum()
    leaves = [x, *stack.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.rand(7)
    assert same_bits(first, torch.autograd.grad(loss, leaves))


def test_gpu_numbers_are_drawn_again_in_the_graph_that_drew_them_alone(monkeypatch):
    """By what torch says of a capture: seed and place in the graph, both on the host."""
    places, capturing = [0], [True]

    class Generator:
        def get_state(self):
            return torch.tensor([7, places[0]]).view(torch.uint8)

    def backward_after(captured, end, now, captures):
        capturing[0], places[0] = captured, 0
        generators = Generators(torch.device("cuda", 0))
        places[0] = end
        assert set(generators.drawn()) == ({GPU} if end else set())
        capturing[0], places[0] = captures, now
        generators.check_graph()

    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    backward_after(True, 8, 8, True)
    backward_after(True, 2**40, 2**40 + 4, True)
    backward_after(True, 0, 0, True)
    backward_after(False, 8, 0, False)
    for apart in ((True, 8, 4, True), (True, 8, 8, False), (False, 8, 8, True)):
        with pytest.raises(RuntimeError, match="in the CUDA graph of its forward pass"):
            backward_after(*apart)


def test_layers_of_fake_tensors_draw_nothing():
    with FakeTensorMode():
        stack = MidpointStack([Random(DRAWS["noise"]) for _ in range(3)])
        x = torch.randn(2, WIDTH, requires_grad=True)
        stack(x).x.sum().backward()
        assert x.grad.shape == (2, WIDTH)
