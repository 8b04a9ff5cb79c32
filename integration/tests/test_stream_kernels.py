"""The launches around a layer on streams; what they are for, test_streams has."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch
from fusewright_models import _stream_launches as launches
from fusewright_models._stream_launches import Tile, Tiles
from fusewright_models._stream_ops import OPS
from fusewright_models.midpoint import MidpointStack
from fusewright_models.streams import StreamMixer
from fusewright_testkit import Yardstick, capture, no_synchronisation
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process
from torch import nn
from torch.func import functional_call

HERE = pathlib.Path(__file__).parent
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = ("phi", "alpha", "bias")
# Of the mixing, whose launch has tests of its own: in the interpreter each takes as long as a read.
FEW = 3
# Several programs of each launch for few tokens, several steps for few columns.
SMALL = Tiles(
    streams=8,
    read=Tile(16, 32, warps=1),
    write=Tile(16, 32, warps=1),
    write_backward=Tile(16, 32, warps=1),
    gates_backward=Tile(8, 32, warps=1, programs=1),
    read_backward=Tile(16, 32, warps=1, programs=8),
)


@pytest.fixture(autouse=True)
def tiles(device, monkeypatch) -> None:
    """Small ones where launches are interpreted."""
    if device == "cpu":
        monkeypatch.setattr(launches, "TILES", (SMALL,))


def drawn(streams, width, device="cpu", backend="triton"):
    """A mixer of which every parameter matters, with logits of about 1."""
    made = StreamMixer(streams, width, iterations=FEW, backend=backend)
    torch.manual_seed(4)
    with torch.no_grad():
        made.phi.normal_(std=(streams * width) ** -0.5)
        made.alpha.fill_(0.7)
        made.bias.normal_()
    return made.to(device)


def operands(leading, streams, width, device="cpu", dtype=F32):
    """x, y in a dtype, and the parameters."""
    made = drawn(streams, width, device)
    x = torch.randn(*leading, streams, width, device=device)
    y = torch.randn(*leading, width, device=device).to(dtype)
    return [x, y, *(getattr(made, name).detach() for name in NAMES)]


def called(backend, autocast=None):
    """u, post, res, the streams after a writing, and less those before: of x, y and parameters."""

    def op(x, y, *parameters):
        made = StreamMixer(x.shape[-2], x.shape[-1], iterations=FEW, backend=backend)
        given = dict(zip(NAMES, parameters, strict=True))

        def around(x, y):
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                reading = made.read(x)
                written = made.write(reading, y)
                delta = made.write(reading, y, origin=reading.origin)
            return reading.u, reading.post, reading.res, written, delta

        made.forward = around
        return functional_call(made, given, (x, y))

    return op


def plain(dtype):
    """The same by the module's own plain torch, u in a dtype but for the truth."""
    call = called("reference")

    def op(x, y, *parameters):
        u, *others = call(x, y, *parameters)
        return u if x.dtype == F64 else u.to(dtype), *others

    return op


SIZES = [
    ((3,), 1, 6),
    ((2, 3), 2, 33),
    ((5,), 3, 20),
    ((37,), 4, 40),
    ((3, 1, 2), 4, 32),
    ((), 4, 16),
    ((9,), 5, 17),
    ((7,), 8, 34),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("leading", "streams", "width"), SIZES, ids=str)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(leading, streams, width, device):
    inputs = operands(leading, streams, width, device)
    Yardstick(plain(F32), inputs).check(called("triton"))


@pytest.mark.parametrize("streams", [3, 5])
def test_tiles_of_cards_are_right_too(streams, device, monkeypatch):
    monkeypatch.undo()
    Yardstick(plain(F32), operands((5,), streams, 20, device)).check(called("triton"))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_layer_in_half_precision(dtype, device):
    inputs = operands((2, 9), 4, 40, device, dtype)
    Yardstick(plain(BF16), inputs, dtype=F32).check(called("triton", autocast=BF16))


@pytest.mark.sampled
@pytest.mark.parametrize("used", range(5), ids=["u", "post", "res", "written", "delta"])
def test_gradient_of_one_result_alone(used, device):
    inputs = operands((7,), 3, 20, device)
    results = called("reference")(*inputs)
    grads = [torch.randn_like(y) if k == used else None for k, y in enumerate(results)]
    Yardstick(plain(F32), inputs, grads).check(called("triton"))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e15])
def test_tiny_and_huge_streams(scale, device):
    inputs = operands((7,), 4, 20, device)
    inputs[0] *= scale
    Yardstick(plain(F32), inputs).check(called("triton"))


def everything(op, inputs, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = op(*leaves)
    loss = sum((y.float() * y.float().cos()).sum() for y in results)
    return [*(y.detach() for y in results), *torch.autograd.grad(loss, leaves)]


def same_bits(some, others):
    return all(map(torch.equal, some, others))


def test_same_bits_twice_and_without_gradients(device):
    inputs = operands((21,), 4, 20, device)
    first, second = (everything(called("triton"), inputs) for _ in range(2))
    assert same_bits(first, second)
    with torch.no_grad():
        assert same_bits(called("triton")(*inputs), first[:5])


def test_no_tokens(device):
    inputs = operands((2, 0), 4, 20, device)
    found, expected = (everything(called(backend), inputs) for backend in ("triton", "reference"))
    for value, other in zip(found, expected, strict=True):
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert not value.any()


def test_streams_of_any_stride(device):
    x, y, *parameters = operands((6,), 4, 20, device)
    expected = everything(called("triton"), [x, y, *parameters])
    for strided in (x.mT.contiguous().mT, x.repeat(2, 1, 1)[::2].copy_(x)):
        assert not strided.is_contiguous()
        assert same_bits(everything(called("triton"), [strided, y, *parameters]), expected)
    spread = x[:, :1].expand(6, 4, 20)
    first, second = (called("triton")(t, y, *parameters) for t in (spread, spread.contiguous()))
    assert same_bits(first, second)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_strange_number_stays_with_its_token(strange, device):
    inputs = operands((40,), 4, 20, device)
    usual = called("triton")(*inputs)
    inputs[0][3, 2, 7] = strange
    others = torch.arange(40, device=device) != 3
    for found, before, wanted in zip(
        called("triton")(*inputs), usual, called("reference")(*inputs), strict=True
    ):
        assert torch.equal(found[others], before[others])
        assert torch.equal(found.isfinite(), wanted.isfinite())


def test_gradients_of_streams_meet_in_one_pass(device, monkeypatch):
    """What arrives at the streams that are mixed and at those that are subtracted is added by the
    launch, the latter as it is, its sign told.
    """
    x, y, *parameters = operands((6,), 2, 20, device)
    seen = []
    launch = launches.launch_read_backward

    def spied(du, dpost, dlogits, dmixed, dorigin, negated, *rest):
        seen.append((dmixed is not None, dorigin.data_ptr(), negated))
        return launch(du, dpost, dlogits, dmixed, dorigin, negated, *rest)

    monkeypatch.setattr(launches, "launch_read_backward", spied)
    x.requires_grad_()
    delta = called("triton")(x, y, *parameters)[-1]
    g = torch.randn_like(delta)
    delta.backward(g)
    assert seen == [(True, g.data_ptr(), True)]


def test_reference_is_differentiable_as_it_says():
    inputs = [x.double().requires_grad_() for x in operands((2,), 2, 3)]
    assert torch.autograd.gradcheck(called("reference"), inputs)


def test_registered_ops_pass_opcheck(device):
    x, y, phi, alpha, bias = operands((5,), 2, 20, device)
    read = (x, phi, alpha, bias, BF16)
    u, post, logits, s_hat, scale = OPS.stream_read(*read)
    of_write = x, logits, post, y
    of_read = u, post, logits, x, x, True, *read[:4], s_hat, scale
    for op, given in (
        (OPS.stream_read, read),
        (OPS.stream_write, (*of_write, x)),
        (OPS.stream_write_backward, (x, *of_write)),
        (OPS.stream_read_backward, of_read),
    ):
        torch.library.opcheck(op.default, given)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_full_graph_compilation_gives_eager_results(compiler, device):
    torch._dynamo.reset()
    x = torch.randn(5, 2, 20, device=device)

    def around(backend):
        made = drawn(2, 20, device, backend)

        def call(x):
            # Of the module's parameters in x's dtype.
            reading = made.to(x.dtype).read(x) if backend == "reference" else made.read(x)
            return made.write(reading, torch.tanh(reading.u), origin=reading.origin)

        return call

    compiled = torch.compile(around("triton"), fullgraph=True, backend=compiler)
    Yardstick(around("reference"), [x]).check(compiled)


class Layer(nn.Module):
    """Two readings and writings, as HybridLM's layers have."""

    def __init__(self, streams, width):
        super().__init__()
        self.first, self.second = (drawn(streams, width) for _ in range(2))
        self.linear = nn.Linear(width, width)

    def force(self, x, *, tape):
        reading = self.first.read(x)
        mixed = self.second.read(self.first.write(reading, torch.tanh(self.linear(reading.u))))
        return self.second.write(mixed, self.linear(mixed.u), origin=reading.origin), None


def stack_of(layers, streams, width, mode):
    torch.manual_seed(3)
    return MidpointStack([Layer(streams, width) for _ in range(layers)], mode=mode)


def trained_once(stack, x):
    passed = stack(x)
    loss = passed.x.square().mean()
    return [passed.x.detach(), *torch.autograd.grad(loss, [x, *stack.parameters()])]


def test_reversible_stack_finds_its_states_again(device):
    x = torch.randn(3, 3, 20, device=device, requires_grad=True)
    exact, stored = (
        trained_once(stack_of(2, 3, 20, mode).to(device), x) for mode in ("exact", "stored")
    )
    assert same_bits(exact, stored)


def test_more_streams_or_bits_than_the_kernels_take(device):
    x = torch.randn(2, 9, 20, device=device)
    with pytest.raises(RuntimeError, match="cannot serve this call: the kernels serve up to 8 str"):
        drawn(9, 20, device).read(x)
    with pytest.raises(RuntimeError, match=r"the kernels take fp32, not torch.float64"):
        drawn(4, 20, device).double().read(x[:, :4].double())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = drawn(9, 20, device, "auto").read(x)
    assert any("up to 8 streams, not 9" in str(one.message) for one in told) == (device == "cuda")
    assert torch.equal(found.u, drawn(9, 20, device, "reference").read(x).u)


@pytest.mark.parametrize("capability", QUICK)
def test_launches_of_the_presets_compile_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "streams_of_hybrids", capability)
    for kernel in ("read", "write", "write_backward", "gates_backward", "read_backward"):
        assert printed.count(f"_{kernel}_kernel") == 3


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_launch_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "streams_of_all_numbers", capability)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16384, 4, 512), (4096, 4, 4096), (5001, 4, 1000)], ids=str)
def test_full_sizes_are_as_near_to_fp64_as_torch(size):
    inputs = operands(size[:1], *size[1:], "cuda", BF16)
    Yardstick(plain(BF16), inputs, dtype=F32).check(called("triton", autocast=BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("streams", range(1, 9))
def test_every_number_of_streams_is_as_near_to_fp64_as_torch(streams):
    Yardstick(plain(F32), operands((3001,), streams, 500, "cuda")).check(called("triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16384, 4, 512), (4096, 4, 4096)], ids=str)
def test_replayed_graph_gives_eager_bits(size):
    leaves = [x.requires_grad_() for x in operands(size[:1], *size[1:], "cuda", BF16)]

    def step():
        results = called("triton", autocast=BF16)(*leaves)
        return [*results, *torch.autograd.grad(results, leaves, [y.detach() for y in results])]

    graph, captured = capture(step)
    with torch.no_grad():
        leaves[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, step())


@pytest.mark.gpu
def test_no_call_waits_for_the_card():
    inputs = operands((300,), 4, 500, "cuda")
    everything(called("auto"), inputs)
    with no_synchronisation():
        everything(called("auto"), inputs)


@pytest.mark.gpu
def test_streams_past_31_bits_of_elements():
    tokens = 2**31 // (4 * 1024) + 2
    made = drawn(4, 1024, "cuda")
    x = torch.randn(tokens, 4, 1024, device="cuda")
    y = torch.randn(tokens, 1024, device="cuda", dtype=BF16)
    with torch.no_grad():
        last = made.read(x[-2:])
        found = made.read(x)
        assert torch.equal(found.u[-2:], last.u)
        written = made.write(found, y)
        assert torch.equal(written[-2:], made.write(last, y[-2:]))
