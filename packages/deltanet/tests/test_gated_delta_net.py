"""GatedDeltaNet: FLA's layer, causal, the same in one call and token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.deltanet import GatedDeltaNet
from fusewright.deltanet.rule import reference

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAN = float("nan")


@torch.no_grad()
def layer_of(device="cpu", **options):
    """A small layer whose parameters are all drawn, so that no gate stands at its start."""
    sizes = dict(hidden_size=7, head_dim=4, num_heads=2, expand_v=1.5, dtype=F64, device=device)
    layer = GatedDeltaNet(**sizes | options)
    for parameter in layer.parameters():
        parameter.normal_(std=0.5)
    return layer


OPTIONS = {
    "plain": {},
    "values-heads-share": dict(num_v_heads=4),
    "no-gate": dict(use_gate=False),
    "no-convolution": dict(use_short_conv=False),
    "bias": dict(conv_bias=True, conv_size=3),
    "one-tap": dict(conv_size=1),
    "negative-eigenvalues": dict(allow_neg_eigval=True),
    "rotary": dict(rope_theta=100.0),
    "residual-qk": dict(d_residual="qk"),
    "residual-v": dict(d_residual="v"),
}


@pytest.fixture(params=OPTIONS)
def layer(request):
    return layer_of(**OPTIONS[request.param])


def test_state_dict_has_flas_names_and_shapes():
    """Of GatedDeltaNet(hidden_size=64, head_dim=16, num_heads=3, num_v_heads=6, expand_v=2)."""
    layer = GatedDeltaNet(64, 2.0, 16, 3, 6)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "A_log": (6,),
        "dt_bias": (6,),
        "q_proj.weight": (48, 64),
        "k_proj.weight": (48, 64),
        "v_proj.weight": (192, 64),
        "a_proj.weight": (6, 64),
        "b_proj.weight": (6, 64),
        "q_conv1d.weight": (48, 1, 4),
        "k_conv1d.weight": (48, 1, 4),
        "v_conv1d.weight": (192, 1, 4),
        "g_proj.weight": (192, 64),
        "o_norm.weight": (32,),
        "o_proj.weight": (64, 192),
    }
    with_bias = GatedDeltaNet(8, head_dim=4, num_heads=1, conv_bias=True, use_gate=False)
    assert with_bias.q_conv1d.bias.shape == (4,)
    assert "g_proj.weight" not in with_bias.state_dict()


def test_decays_start_between_none_and_a_fifth():
    """exp(-16 * 0.1) at the least; and they carry no weight decay."""
    layer = GatedDeltaNet(8, head_dim=4, num_heads=512, d_residual="v")
    dt = F.softplus(layer.dt_bias)
    assert bool(((dt > 0.99e-3) & (dt < 0.101)).all())
    assert dt.log().std() > 1.0
    assert bool((layer.A_log.exp() <= 16.0).all())
    assert layer.A_log.isfinite().all()
    alpha = (-layer.A_log.exp() * dt).exp()
    assert bool((alpha >= 0.2).all())
    assert bool((layer.D == 1).all())
    for parameter in (layer.A_log, layer.dt_bias, layer.D, layer.o_norm.weight):
        assert parameter._no_weight_decay


def by_hand(layer, x):
    """The docstring's formula, token by token, with torch's own convolution."""
    rows = []
    for name in "qkv":
        z = getattr(layer, f"{name}_proj")(x)
        conv = getattr(layer, f"{name}_conv1d")
        z = F.conv1d(F.pad(z.mT, (3, 0)), conv.weight, groups=z.shape[-1]).mT
        rows.append(F.silu(z).unflatten(-1, (2, -1)))
    q, k, v = rows
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = layer.b_proj(x).sigmoid()
    o, _ = reference.gated_delta_rule_by_token(q, k, v, g, beta, scale=0.5)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    return layer.o_proj((o * F.silu(layer.g_proj(x).view(o.shape))).flatten(2))


def test_it_computes_its_formula():
    layer, x = layer_of(), torch.randn(2, 9, 7, dtype=F64)
    torch.testing.assert_close(layer(x), by_hand(layer, x))


def test_every_parameter_and_the_input_get_a_gradient(layer):
    x = torch.randn(2, 5, 7, dtype=F64, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(bool(p.grad.any()) for p in [*layer.parameters(), x])


def test_gradients_are_the_derivatives():
    layer = layer_of(num_heads=1)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(1, 3, 7, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


@pytest.mark.parametrize("parts", [(1,) * 7, (3, 4), (5, 1, 1), (0, 7)], ids=str)
def test_decoding_is_the_whole(layer, parts):
    x, cache, found = torch.randn(2, 7, 7, dtype=F64), None, []
    with torch.no_grad():
        for piece in x.split(parts, 1):
            y, cache = layer.decode(piece, cache)
            found.append(y)
        torch.testing.assert_close(torch.cat(found, 1), layer(x))
    assert cache.tokens == 7


def test_padding_before_a_row_changes_nothing_of_it(layer):
    if layer.rope_theta:
        pytest.skip("positions count padding, too")
    x = torch.randn(2, 6, 7, dtype=F64)
    padded = torch.cat((torch.full((2, 3, 7), NAN, dtype=F64), x), 1)
    mask = torch.arange(9).expand(2, 9) >= 3
    y = layer(padded, mask)
    torch.testing.assert_close(y[:, 3:], layer(x))
    assert not y[:, :3].any()
    found, cache = layer.decode(padded, None, mask)
    _, expected = layer.decode(x)
    torch.testing.assert_close(found[:, 3:], layer(x))
    torch.testing.assert_close(cache.state, expected.state)


def test_padded_token_passes_the_state_through():
    layer, x = layer_of(use_short_conv=False), torch.randn(1, 5, 7, dtype=F64)
    mask = torch.tensor([[True, True, False, True, True]])
    padded = torch.where(mask.unsqueeze(-1), x, NAN)
    torch.testing.assert_close(layer(padded, mask)[mask], layer(x[mask][None])[0])


def test_sequences_in_one_row_are_sequences_apart(layer):
    x = torch.randn(1, 9, 7, dtype=F64)
    y = layer(x, cu_seqlens=torch.tensor([0, 2, 3, 9]))
    for first, last in ((0, 2), (2, 3), (3, 9)):
        torch.testing.assert_close(y[:, first:last], layer(x[:, first:last]))


def test_lengths_out_of_order_are_those_that_are_nearest(layer):
    x = torch.randn(1, 9, 7, dtype=F64)
    found, expected = (
        layer(x, cu_seqlens=torch.tensor(bounds)) for bounds in ([-9, 4, 99, 2], [0, 4, 9, 9])
    )
    assert torch.equal(found, expected)


def test_future_token_changes_no_past_output(layer):
    x = torch.randn(1, 6, 7, dtype=F64)
    y, later = layer(x), x.clone()
    later[:, 3] += 1.0
    changed = layer(later)
    assert torch.equal(changed[:, :3], y[:, :3])
    assert bool((changed[:, 3] != y[:, 3]).any())


def test_kernels_and_reference_agree(device):
    layer = layer_of(device, dtype=F32, num_v_heads=4)
    x = torch.randn(2, 5, 7, device=device)
    expected = layer(x)
    layer.backend = "triton"
    torch.testing.assert_close(layer(x), expected)
    y, cache = layer.decode(x[:, :4])
    last, _ = layer.decode(x[:, 4:], cache)
    torch.testing.assert_close(torch.cat((y, last), 1), expected)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    layer, x = layer_of(dtype=F32), torch.randn(2, 5, 7)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, layer(x))


def test_low_precision_keeps_decays_and_autocast_casts_the_rest():
    layer = GatedDeltaNet(8, head_dim=4, num_heads=2, dtype=BF16)
    assert layer.A_log.dtype == layer.dt_bias.dtype == F32
    assert layer(torch.randn(1, 3, 8, dtype=BF16)).dtype == BF16
    layer = GatedDeltaNet(8, head_dim=4, num_heads=2)
    with torch.autocast("cpu", BF16):
        y = layer(torch.randn(1, 3, 8))
    assert y.dtype == BF16
    y.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {F32}


def test_decays_are_as_exact_as_their_parameters_in_low_precision():
    """A_log that was cast to bf16 with everything else is taken to the exponent in fp32."""
    layer, exact = layer_of(dtype=BF16), layer_of()
    layer.to(BF16)
    exact.load_state_dict(layer.state_dict())
    x = torch.zeros(1, 1, 7, dtype=BF16)
    found, expected = (
        each.gates(each.b_proj(rows), each.a_proj(rows))[1]
        for each, rows in ((layer, x), (exact, x.double()))
    )
    torch.testing.assert_close(found, expected.float())


x = torch.randn(2, 5, 8)
layer_8 = GatedDeltaNet(8, head_dim=4, num_heads=2)
BAD = {
    "rows": (lambda: layer_8(x[0]), ValueError, r"x must be \[B, T, 8\], got \(5, 8\)"),
    "list": (lambda: layer_8(x.tolist()), TypeError, "x must be a tensor, got list"),
    "mask of numbers": (
        *(lambda: layer_8(x, torch.ones(2, 5)), TypeError),
        "mask must be a bool tensor, got torch.float32",
    ),
    "mask of rows": (
        *(lambda: layer_8(x, torch.ones(2, dtype=torch.bool)), ValueError),
        r"mask must be \[B, T\] = \(2, 5\), got \(2,\)",
    ),
    "lengths": (
        *(lambda: layer_8(x, cu_seqlens=torch.tensor([0, 5])), ValueError),
        "with cu_seqlens q must have one row",
    ),
    "half a column": (
        *(lambda: GatedDeltaNet(8, 1.3, 4), ValueError),
        r"expand_v \* head_dim must be a whole number, at least 1, got 1.3 \* 4",
    ),
    "value heads": (
        *(lambda: GatedDeltaNet(8, num_heads=4, num_v_heads=6), ValueError),
        "num_v_heads must be a multiple of num_heads 4, got 6",
    ),
    "no value": (lambda: GatedDeltaNet(8, 0, 4), ValueError, r"at least 1, got 0 \* 4"),
    "no head": (
        *(lambda: GatedDeltaNet(8, num_heads=0), ValueError),
        "num_heads must be at least 1, got 0",
    ),
    "mask elsewhere": (
        *(lambda: layer_8(x, torch.ones(2, 5, dtype=torch.bool, device="meta")), ValueError),
        "mask must be on x's device cpu, got meta",
    ),
    "cache of one row": (
        *(lambda: layer_8.decode(x, layer_8.decode(x[:1])[1]), ValueError),
        "cache must be of x's 2 rows, got one of 1",
    ),
    "no tap": (lambda: GatedDeltaNet(8, conv_size=0), ValueError, "conv_size must be at least 1"),
    "odd rotary": (
        *(lambda: GatedDeltaNet(8, 1, 3, 1, rope_theta=1e4), ValueError),
        "rotary positions need an even head_dim, got 3",
    ),
    "residual": (lambda: GatedDeltaNet(8, d_residual="k"), ValueError, "d_residual must be"),
    "backend": (lambda: GatedDeltaNet(8, backend="cuda"), ValueError, "backend must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
