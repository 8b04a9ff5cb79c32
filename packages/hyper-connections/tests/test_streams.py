"""Reading streams and writing to them: values, gradients, and what the launches do for them."""

from __future__ import annotations

import warnings

import pytest
import torch
from fusewright.hyper_connections import stream_coefficients, stream_read, stream_write
from fusewright.hyper_connections._core import backends
from fusewright.hyper_connections.streams import launch, reference
from fusewright.hyper_connections.streams import stream_read as reading
from fusewright.hyper_connections.streams.launch import Tile, Tiles
from fusewright_testkit import Yardstick, capture, conformance, no_synchronisation
from fusewright_testkit.conformance import same_bits

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.fusewright_hyper_connections
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
def tiles(device, fresh_plans, monkeypatch) -> None:
    """Small ones where launches are interpreted."""
    if device == "cpu":
        monkeypatch.setattr(launch, "TILES", (SMALL,))


def parameters(streams, width, device="cpu"):
    """phi, alpha and bias, all of which matter, with logits of about 1."""
    torch.manual_seed(4)
    parts = streams * (streams + 2)
    phi = torch.randn(parts, streams * width) * (streams * width) ** -0.5
    return [x.to(device) for x in (phi, torch.full((3,), 0.7), torch.randn(parts))]


def operands(leading, streams, width, device="cpu", dtype=F32):
    """x, y in a dtype, and the parameters."""
    given = parameters(streams, width, device)
    x = torch.randn(*leading, streams, width, device=device)
    y = torch.randn(*leading, width, device=device).to(dtype)
    return [x, y, *given]


def mixing(logits):
    """Rows, then columns divided by their sums: a matrix whose every element has a gradient."""
    res = logits.softmax(-1)
    return res / res.sum(-2, keepdim=True)


def called(backend, autocast=None):
    """u, post, res, the streams after a writing, and less those before: of x, y and parameters."""

    def op(x, y, *given):
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            found = stream_read(x, *given, backend=backend)
            res = mixing(found.logits)
            of_write = found.mixed, res, found.post, y
            written = stream_write(*of_write, backend=backend)
            delta = stream_write(*of_write, origin=found.origin, backend=backend)
        return found.u, found.post, res, written, delta

    return op


def plain(dtype):
    """The same in plain torch, u in a dtype but for the truth."""
    call = called("reference")

    def op(x, y, *given):
        u, *others = call(x, y, *given)
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
def test_tiles_of_gpus_are_right_too(streams, device, monkeypatch):
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


def everything(op, inputs):
    return conformance.everything(op, [x.detach().requires_grad_() for x in inputs])


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
    launch, the latter as it is, with its sign as an argument.
    """
    x, y, *parameters = operands((6,), 2, 20, device)
    seen = []
    backward = reading._read_backward

    def spied(du, dpost, dlogits, dmixed, dorigin, *rest):
        seen.append((dmixed is not None, dorigin.data_ptr(), rest[-1]))
        return backward(du, dpost, dlogits, dmixed, dorigin, *rest)

    monkeypatch.setattr(reading, "_read_backward", spied)
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
    read = (x, phi, alpha, bias, 1e-6, BF16)
    u, post, logits, s_hat, scale = OPS.stream_read(*read)
    of_write = x, logits, post, y
    of_read = u, post, logits, x, x, *read[:4], s_hat, scale, True
    for op, given in (
        (OPS.stream_read, read),
        (OPS.stream_write, (*of_write, x)),
        (OPS.stream_write_backward, (x, *of_write)),
        (OPS.stream_read_backward, of_read),
    ):
        torch.library.opcheck(op.default, given)


@pytest.mark.parametrize("arrived", ["both", "neither", "negated"])
def test_gradients_that_are_written_out_are_those_of_autograd(arrived):
    """What a CPU runs of the registered ops, where no interpreter is."""
    x, y, *given = (t.double().requires_grad_() for t in operands((5,), 3, 4))
    found = reference.stream_read(x, *given, eps=1e-6, dtype=F64)
    grads = [torch.randn_like(t) for t in found[:3]]
    handed = [None if arrived == "neither" else torch.randn_like(x) for _ in range(2)]
    sign = -1.0 if arrived == "negated" else 1.0
    loss = sum((t * g).sum() for t, g in zip(found[:3], grads, strict=True))
    if arrived != "neither":
        loss = loss + (x * (handed[0] + sign * handed[1])).sum()
    expected = torch.autograd.grad(loss, [x, *given])
    of_read = *grads, *handed, x, *given, *found[3:], arrived == "negated"
    for value, truth in zip(reference.stream_read_backward(*of_read), expected, strict=True):
        torch.testing.assert_close(value, truth)
    of_write = [t.detach().requires_grad_() for t in (x, found[2], found[1], y)]
    g = torch.randn_like(x)
    expected = torch.autograd.grad(reference.stream_write(*of_write, None), of_write, g)
    for value, truth in zip(reference.stream_write_backward(g, *of_write), expected, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_full_graph_compilation_gives_eager_results(compiler, device):
    torch._dynamo.reset()
    given = parameters(2, 20, device)

    def around(backend):
        def call(x):
            found = stream_read(x, *given, backend=backend)
            return stream_write(
                *(found.mixed, mixing(found.logits), found.post, torch.tanh(found.u)),
                origin=found.origin,
                backend=backend,
            )

        return call

    compiled = torch.compile(around("triton"), fullgraph=True, backend=compiler)
    x = torch.randn(5, 2, 20, device=device)
    Yardstick(around("reference"), [x]).check(compiled)


def test_more_streams_or_bits_than_the_kernels_take(device, monkeypatch):
    monkeypatch.setattr(backends, "WARNED", set())
    x, given = torch.randn(2, 9, 20, device=device), parameters(9, 20, device)
    with pytest.raises(RuntimeError, match="cannot serve this call: the kernels serve up to 8 str"):
        stream_read(x, *given, backend="triton")
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        stream_read(x[:, :4].double(), *parameters(4, 20, device), backend="triton")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = stream_read(x, *given)
    assert any("up to 8 streams, not 9" in str(one.message) for one in caught) == (device == "cuda")
    assert torch.equal(found.u, stream_read(x, *given, backend="reference").u)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_precision_streams_are_taken_in_fp32(dtype, device):
    x, y, *given = operands((5,), 2, 20, device)
    x = x.to(dtype)
    for backend in ("triton", "reference"):
        found = called(backend)(x, y, *given)
        assert {t.dtype for t in found} == {F32}
        assert same_bits(found, called(backend)(x.float(), y, *given))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_is_for_the_layer_alone(backend, device):
    x, y, *given = operands((5,), 2, 20, device)
    u, *others = called(backend, autocast=BF16)(x, y, *given)
    assert u.dtype == BF16
    expected = called(backend)(x, y, *given)
    assert same_bits(others, expected[1:])
    # The interpreter cuts off what bf16 has no bits for; a GPU rounds.
    assert backend == "triton" or torch.equal(u, expected[0].to(BF16))


@pytest.mark.parametrize("streams", [1, 4])
def test_coefficients_are_those_of_the_reading(streams):
    x, _, *given = operands((5,), streams, 20)
    pre, post, logits = stream_coefficients(x, *given)
    found = stream_read(x, *given)
    assert torch.equal(post, found.post)
    assert torch.equal(logits, found.logits)
    torch.testing.assert_close((pre.unsqueeze(-1) * x).sum(-2), found.u)
    assert ((pre > 0) & (pre < 1) & (post > 0) & (post < 2)).all()


def bad(**changed):
    """What stream_read and stream_write take of three tokens of 2 x 4, but for what is changed."""
    x, y, phi, alpha, bias = operands((3,), 2, 4)
    good = dict(x=x, y=y, phi=phi, alpha=alpha, bias=bias, res=torch.ones(3, 2, 2))
    return good | dict(post=torch.ones(3, 2), origin=x) | changed


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(x=3.0), TypeError, "x must be a tensor, got float"),
        (dict(x=torch.ones(3, 2, 4).long()), TypeError, r"x must be float32.* got torch\.int64"),
        (dict(x=torch.ones(4)), ValueError, r"x must be streams \[\.\.\., n, C\].* got \[4\]"),
        (dict(x=torch.ones(3, 0, 4)), ValueError, r"n and C at least 1, got \[3, 0, 4\]"),
        (dict(x=torch.ones(3, 2, 0)), ValueError, r"n and C at least 1, got \[3, 2, 0\]"),
        (
            dict(phi=torch.ones(8, 4)),
            ValueError,
            r"phi must be \[8, 8\] for .* got \[8, 4\]",
        ),
        (dict(alpha=torch.ones(1)), ValueError, r"alpha must be \[3\] .* got \[1\]"),
        (dict(bias=torch.ones(4)), ValueError, r"bias must be \[8\] .* got \[4\]"),
        (dict(phi=torch.ones(8, 8, device="meta")), ValueError, "phi must be on x's device cpu"),
        (dict(res=torch.ones(2, 2)), ValueError, r"res must be \[3, 2, 2\] .* got \[2, 2\]"),
        (dict(post=torch.ones(3, 1)), ValueError, r"post must be \[3, 2\] .* got \[3, 1\]"),
        (dict(y=torch.ones(3, 5)), ValueError, r"y must be \[3, 4\] .* got \[3, 5\]"),
        (dict(origin=torch.ones(3, 4)), ValueError, r"origin must be \[3, 2, 4\] .* got \[3, 4\]"),
        (dict(eps=-1.0), ValueError, "eps must be a finite number >= 0, got -1"),
        (dict(backend="torch"), ValueError, 'backend must be "auto", "triton" or "reference"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_by_what_was_wanted_and_what_came(changed, error, message):
    given = bad(**changed)
    options = {name: given[name] for name in ("eps", "backend") if name in given}

    def call():
        if set(changed) & {"y", "res", "post", "origin"}:
            of_write = (given[name] for name in ("x", "res", "post", "y"))
            return stream_write(*of_write, origin=given["origin"])
        return stream_read(*(given[name] for name in ("x", "phi", "alpha", "bias")), **options)

    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.large
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
def test_no_call_waits_for_the_gpu():
    inputs = operands((300,), 4, 500, "cuda")
    everything(called("auto"), inputs)
    with no_synchronisation():
        everything(called("auto"), inputs)


@pytest.mark.gpu
@pytest.mark.large
def test_streams_past_31_bits_of_elements():
    tokens = 2**31 // (4 * 1024) + 2
    given = parameters(4, 1024, "cuda")
    x = torch.randn(tokens, 4, 1024, device="cuda")
    y = torch.randn(tokens, 1024, device="cuda", dtype=BF16)
    with torch.no_grad():
        last = stream_read(x[-2:], *given)
        found = stream_read(x, *given)
        assert torch.equal(found.u[-2:], last.u)
        written = stream_write(x, found.logits, found.post, y)
        assert torch.equal(written[-2:], stream_write(x[-2:], last.logits, last.post, y[-2:]))
