"""Scale, alpha, the residual of gated_delta_rule, its input errors, and which backend serves."""

from __future__ import annotations

import math
import sys
import types
import warnings

import pytest
import torch
from fusewright.deltanet import available_backends, gated_delta_rule
from fusewright.deltanet.rule import fla, reference
from fusewright.deltanet.rule import gated_delta_rule as operation

q, k = torch.randn(2, 2, 5, 2, 4)
v = torch.randn(2, 5, 4, 3)
g, beta = -torch.rand(2, 5, 4), torch.rand(2, 5, 4)
state = torch.randn(2, 4, 4, 3)
one_row = dict(q=q[:1], k=k[:1], v=v[:1], g=g[:1], beta=beta[:1])
lengths = torch.tensor([0, 2, 5])


def rule(**changed):
    return gated_delta_rule(**dict(q=q, k=k, v=v, g=g, beta=beta) | changed)


def test_scale_is_a_factor_of_the_output(backend, device):
    tensors = dict(one_row, backend=backend)
    tensors = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in tensors.items()}
    default, twice = (rule(**tensors, scale=scale).o for scale in (None, 2 * q.shape[-1] ** -0.5))
    torch.testing.assert_close(twice, 2.0 * default)


def test_alpha_is_the_decay_itself_down_to_its_floor():
    alpha = g.exp()
    torch.testing.assert_close(rule(g=None, alpha=alpha).o, rule().o)
    alpha[0, 2] = 0.0
    alpha.requires_grad_()
    o = rule(g=None, alpha=alpha).o
    torch.testing.assert_close(o, rule(g=alpha.detach().clamp(min=1e-6).log()).o)
    o.sum().backward()
    assert alpha.grad.isfinite().all()
    assert not alpha.grad[0, 2].any()


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kind", ["qk", "v"])
def test_residual_is_added_to_the_output(kind, weighed):
    weight = torch.randn(4, requires_grad=True) if weighed else None
    plain, found = rule().o, rule(d_residual=kind, d_weight=weight).o
    d = torch.ones(4) if weight is None else weight
    times = d.expand(2, 5, 4)
    if kind == "qk":
        times = times * (q * k).sum(-1).repeat_interleave(2, 2)
    torch.testing.assert_close(found, plain + times.unsqueeze(-1) * v)
    if weighed:
        found.sum().backward()
        assert weight.grad.all()


def test_final_state_is_given_where_it_is_asked_for():
    assert rule().state is None
    assert rule(output_final_state=True).state.shape == (2, 4, 4, 3)
    o, end = rule(initial_state=state, output_final_state=True)
    expected = reference.gated_delta_rule(q, k, v, g, beta, state, scale=0.5)
    assert torch.equal(o, expected[0])
    assert torch.equal(end, expected[1])


# The arguments that differ from a good call, the error, and its message.
BAD = {
    "list as q": (dict(q=q.tolist()), TypeError, "q must be a tensor, got list"),
    "integers": (dict(v=v.int()), TypeError, "float64, got torch.int32"),
    "sparse": (dict(k=k.to_sparse()), TypeError, "k must be a strided tensor"),
    "three axes": (dict(q=q[0]), ValueError, r"q must be \[B, T, H, K\] with a width of at least"),
    "no width": (dict(v=v[..., :0]), ValueError, r"v must be \[B, T, HV, V\] with a width"),
    "fewer keys": (
        *(dict(k=k[:, :4]), ValueError),
        r"k must have q's shape \(2, 5, 2, 4\), got \(2, 4, 2, 4\)",
    ),
    "dtypes": (dict(v=v.half()), ValueError, "v must have q's dtype torch.float32, got"),
    "devices": (dict(k=k.to("meta")), ValueError, "k must be on q's device cpu, got meta"),
    "three value heads": (
        *(dict(v=v[:, :, :3], g=g[..., :3], beta=beta[..., :3]), ValueError),
        "HV a multiple of its heads",
    ),
    "values of fewer tokens": (dict(v=v[:, :4]), ValueError, "v must be"),
    "neither gate": (dict(g=None), ValueError, "one of g and alpha must be given, got neither"),
    "both gates": (dict(alpha=g.exp()), ValueError, "one of g and alpha must be given, got both"),
    "number as alpha": (dict(g=None, alpha=0.5), TypeError, "alpha must be a tensor, got float"),
    "fewer tokens of alpha": (
        *(dict(g=None, alpha=g[:, :4].exp()), ValueError),
        r"alpha must be \[B, T, HV\] = \(2, 5, 4\), got \(2, 4, 4\)",
    ),
    "number as beta": (dict(beta=0.1), TypeError, "beta must be a tensor, got float"),
    "gates by head": (
        *(dict(g=g.mT), ValueError),
        r"g must be \[B, T, HV\] = \(2, 5, 4\), got \(2, 4, 5\)",
    ),
    "state of one row": (
        *(dict(initial_state=state[:1]), ValueError),
        r"initial_state must be \[N, HV, K, V\] = \(2, 4, 4, 3\), got \(1, 4, 4, 3\)",
    ),
    "half a state": (
        *(dict(initial_state=state.half()), ValueError),
        "initial_state must be torch.float32 for q of torch.float32, got torch.float16",
    ),
    "state elsewhere": (
        *(dict(initial_state=state.to("meta")), ValueError),
        "initial_state must be on q's device cpu, got meta",
    ),
    "lengths of two rows": (dict(cu_seqlens=lengths), ValueError, "q must have one row, B = 1"),
    "list as lengths": (one_row | dict(cu_seqlens=[0, 5]), TypeError, "must be a tensor, got list"),
    "real lengths": (
        *(one_row | dict(cu_seqlens=lengths.float()), TypeError),
        "cu_seqlens must be int32 or int64, got torch.float32",
    ),
    "sparse lengths": (
        *(one_row | dict(cu_seqlens=lengths.to_sparse()), TypeError),
        "cu_seqlens must be a strided tensor, got layout torch.sparse_coo",
    ),
    "no length": (one_row | dict(cu_seqlens=lengths[:1]), ValueError, "with N at least 1"),
    "states of rows": (
        *(one_row | dict(cu_seqlens=lengths, initial_state=state[:1]), ValueError),
        r"= \(2, 4, 4, 3\), got \(1, 4, 4, 3\)",
    ),
    "word as scale": (dict(scale="1"), TypeError, "scale must be a number, got str"),
    "scale without end": (
        dict(scale=math.inf),
        ValueError,
        "scale must be a finite number, got inf",
    ),
    "residual": (
        dict(d_residual="kv"),
        ValueError,
        'd_residual must be "none" or "qk" or "v", got',
    ),
    "weight alone": (dict(d_weight=torch.ones(4)), ValueError, 'd_weight needs d_residual="qk"'),
    "weight of keys": (
        *(dict(d_residual="v", d_weight=torch.ones(2)), ValueError),
        r"d_weight must be \[HV\]",
    ),
    "backend": (dict(backend="cuda"), ValueError, '"auto" or "fla" or "triton" or "reference"'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    with pytest.raises(error, match=message):
        rule(**changed)


def test_triton_says_which_widths_it_serves():
    wide = torch.randn(1, 1, 1, 257)
    one = torch.zeros(1, 1, 1)
    with pytest.raises(RuntimeError, match=r"up to 256 columns, not \(257, 257\)"):
        gated_delta_rule(wide, wide, wide, one, one, backend="triton")


def test_fla_says_why_it_cannot_serve(monkeypatch):
    monkeypatch.setattr(fla, "has_fla", lambda: False)
    with pytest.raises(RuntimeError, match=r"fla-core is not installed, which the extra \[fla\]"):
        rule(backend="fla")
    monkeypatch.setattr(fla, "has_fla", lambda: True)
    with pytest.raises(RuntimeError, match="fla needs CUDA"):
        rule(backend="fla")


class WithinSequences(torch.autograd.Function):
    """fla's rule as it treats memory: what lies outside of all sequences is allocated, and neither
    read nor written.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, start, cu_seqlens, scale):
        ctx.save_for_backward(q, k, v, g, beta, start, cu_seqlens)
        ctx.scale = scale
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta, start)]
            o, end = reference.gated_delta_rule(*leaves, cu_seqlens, scale=scale)
        ctx.graph = leaves, o, end
        return WithinSequences.unset(o.detach(), cu_seqlens), end.detach()

    @staticmethod
    def backward(ctx, do, dend):
        leaves, o, end = ctx.graph
        grads = torch.autograd.grad((o, end), leaves, (do, dend), materialize_grads=True)
        *of_tokens, dstart = grads
        cu_seqlens = ctx.saved_tensors[-1]
        of_tokens = [WithinSequences.unset(x, cu_seqlens) for x in of_tokens]
        return *of_tokens, dstart, None, None

    @staticmethod
    def unset(x, cu_seqlens):
        x = x.clone()
        x[:, : cu_seqlens[0]] = math.nan
        x[:, cu_seqlens[-1] :] = math.nan
        return x


@pytest.mark.parametrize("bounds", [(2, 5, 9), (0, 4, 9), (2, 2, 11), (0, 4, 11), (3, 3, 3)])
@pytest.mark.parametrize("frozen", [False, True], ids=["all-learn", "v-alone-learns"])
def test_tokens_of_no_sequence_are_zero_by_fla_too(monkeypatch, bounds, frozen):
    def rule_of_fla(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        assert output_final_state
        assert cu_seqlens.dtype == torch.int64
        return WithinSequences.apply(q, k, v, g, beta, initial_state, cu_seqlens, scale)

    module = types.SimpleNamespace(chunk_gated_delta_rule=rule_of_fla)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(operation, "fla_obstacle", lambda q, differentiates: None)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    tensors = [torch.randn(1, 11, 2, 4), torch.randn(1, 11, 2, 4), torch.randn(1, 11, 4, 3)]
    tensors += [-torch.rand(1, 11, 4), torch.rand(1, 11, 4), torch.randn(2, 4, 4, 3)]

    def everything(backend):
        leaves = [x.clone().requires_grad_(not frozen or x is tensors[2]) for x in tensors]
        *of_tokens, start = leaves
        options = dict(initial_state=start, output_final_state=True, cu_seqlens=cu_seqlens)
        o, end = gated_delta_rule(*of_tokens, **options, backend=backend)
        loss = (o * torch.arange(o.numel()).view(o.shape).sin()).sum() + end.sum()
        learning = [x for x in leaves if x.requires_grad]
        return o, end, *torch.autograd.grad(loss, learning, materialize_grads=True)

    for found, expected in zip(everything("fla"), everything("reference"), strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        found = gated_delta_rule(
            *tensors[:5], initial_state=tensors[5], cu_seqlens=cu_seqlens, backend="fla"
        )
    assert found.o.isfinite().all()


class OnAGPU:
    """The attributes of a tensor that the choice of a backend reads."""

    is_cuda, is_cpu, is_meta, dtype = True, False, False, torch.bfloat16
    device, shape, requires_grad = torch.device("cuda", 0), (1, 4, 1, 8), False


@pytest.fixture
def hopper_with(monkeypatch):
    """Makes a machine with fla, a Hopper GPU and a version of triton."""

    def make(version: str):
        monkeypatch.setattr(fla, "has_fla", lambda: True)
        monkeypatch.setattr(fla, "triton_version", lambda: tuple(map(int, version.split("."))))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(operation, "uses_triton", lambda q, backend: True)
        fla.refuses_backward.cache_clear()

    yield make
    fla.refuses_backward.cache_clear()


def served(backend="auto", training=False, **changed):
    tensor = OnAGPU()
    vars(tensor).update(requires_grad=training, **changed)
    return operation.served_by(tensor, tensor, (tensor,) * 5 + (None,), backend)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_auto_takes_the_kernels_where_fla_is_installed_too(hopper_with, version):
    """And says nothing of fla, whether it refuses its gradients or not."""
    hopper_with(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served() == served(training=True) == served(dtype=torch.float32) == "triton"


def test_fla_serves_where_it_is_asked_for_and_may(hopper_with):
    hopper_with("3.7.1")
    assert served(backend="fla") == served(backend="fla", training=True) == "fla"
    with pytest.raises(RuntimeError, match="fla takes bfloat16 and float16"):
        served(backend="fla", dtype=torch.float32)


def test_fla_says_where_it_refuses_its_gradients(hopper_with):
    hopper_with("3.6.0")
    with pytest.raises(RuntimeError, match=r"below 3\.7\.1"):
        served(backend="fla", training=True)
    with torch.no_grad():
        assert served(backend="fla", training=True) == "fla"
    assert served(backend="fla") == "fla"


@pytest.mark.parametrize(
    ("version", "refused"), [("3.3.1", False), ("3.4.0", True), ("3.7.0", True), ("3.7.1", False)]
)
def test_refusal_is_flas_own(hopper_with, version, refused, monkeypatch):
    hopper_with(version)
    assert fla.refuses_backward(torch.device("cuda", 0)) is refused
    fla.refuses_backward.cache_clear()
    monkeypatch.setattr(fla, "spec_of", lambda package: package == "tilelang")
    assert not fla.refuses_backward(torch.device("cuda", 0))


def test_version_of_triton_is_that_which_fla_sees(monkeypatch):
    """Not that of a distribution, which builds of torch call by other names."""
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.7.1+git0a1b"))
    assert fla.triton_version() == (3, 7, 1)


@pytest.mark.parametrize("parts", ["ops/gated_delta_rule", "", None], ids=str)
def test_only_a_package_that_has_the_rule_is_fla(parts, tmp_path, monkeypatch):
    """None: no package of the name at all."""
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if parts is not None:
        (tmp_path / "fla" / parts).mkdir(parents=True)
        (tmp_path / "fla" / "__init__.py").touch()
    fla.has_fla.cache_clear()
    assert fla.has_fla() is bool(parts)
    fla.has_fla.cache_clear()


def test_fla_is_called_with_its_own_names(monkeypatch):
    """A function with fla's signature, that computes by the reference."""

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens
    ):
        assert output_final_state
        assert cu_seqlens.dtype == torch.int64
        # Of -inf fla would take differences.
        assert g.isfinite().all()
        return reference.gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale=scale)

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(operation, "fla_obstacle", none)
    options = one_row | dict(cu_seqlens=lengths.int(), initial_state=state, output_final_state=True)
    options["g"] = options["g"].clone()
    options["g"][:, 1] = -math.inf
    found, expected = rule(**options, backend="fla"), rule(**options, backend="reference")
    assert torch.equal(found.o, expected.o)
    assert torch.equal(found.state, expected.state)


def none(*args, **kwargs):
    return None


def test_available_backends_are_told(monkeypatch):
    assert "reference" in available_backends()
    assert "fla" not in available_backends() or torch.cuda.is_available()
