"""Every kind of parameter, gradient, number and state: a right result, or an error that says what
was wanted and what came, before anything has changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fusewright.optimizer import (
    M3,
    AdamW,
    DeepMomentum,
    DeepNestedOptimizer,
    DeltaMomentum,
    LearnedOptimizer,
    Muon,
    NestedController,
    UpdateMLP,
    VeLO,
    VeLONetworks,
)
from fusewright.optimizer.common.checks import check_gradient

from .compared import assert_near

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")


def ramp(*shape, device="cpu"):
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 2.0, count, device=device).view(shape)


def pair(x, device):
    """A number for each element, and another as its imaginary part."""
    return torch.complex(x, x.flip(0) + 1).to(device)


# Parameters and gradients by what their memory is like.
KINDS = {
    "channels-last": (
        lambda: ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: ramp(2, 3, 4, 5).cos(),
    ),
    "contiguous-with-channels-last-gradient": (
        lambda: ramp(2, 3, 4, 5),
        lambda: ramp(2, 3, 4, 5).cos().to(memory_format=torch.channels_last),
    ),
    "transposed": (lambda: ramp(6, 5).T, lambda: ramp(5, 6).sin()),
    "transposed-with-its-gradient": (lambda: ramp(6, 5).T, lambda: ramp(6, 5).sin().T),
    "with-gaps": (lambda: ramp(8, 9)[::2, 1::3], lambda: ramp(4, 3).sin()),
    "unaligned": (lambda: ramp(9)[1:], lambda: ramp(9).sin()[1:]),
    "expanded-gradient": (lambda: ramp(4, 5), lambda: torch.tensor(0.5).expand(4, 5)),
    "negated-gradient": (lambda: ramp(7), lambda: pair(ramp(7), "cpu").conj().imag),
    "complex": (lambda: pair(ramp(7), "cpu"), lambda: pair(ramp(7).cos(), "cpu")),
    "single": (lambda: ramp(1, 5)[:, 2:3], lambda: ramp(1, 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=["", "amsgrad"])
def test_memory_of_any_order_is_moved_as_torch_moves_it(kind, options, backend, device):
    draw_p, draw_g = KINDS[kind]
    if kind == "with-gaps" and backend == "triton":
        # The kernels refuse it; on a GPU "auto" is not "reference" either.
        backend = "auto"
    memory = [draw_p().to(device) for _ in range(2)]
    ps = [torch.nn.Parameter(x) for x in memory]
    assert ps[0].data_ptr() == memory[0].data_ptr()
    makers = (
        lambda p: AdamW([p], lr=0.1, backend=backend, **options),
        lambda p: torch.optim.AdamW([p], lr=0.1, foreach=False, **options),
    )
    for p, make in zip(ps, makers, strict=True):
        optimizer = make(p)
        for step in range(3):
            # The memory's order stays through this.
            p.grad = draw_g().to(device)
            with torch.no_grad():
                p.grad = p.grad if step == 0 else p.grad * (1 - step)
            optimizer.step()
    assert_near([ps[0]], [ps[1]])
    assert (ps[0].stride(), ps[0].data_ptr()) == (memory[0].stride(), memory[0].data_ptr())


def test_what_lies_between_a_parameters_elements_stays(device):
    whole = torch.ones(8, 9, device=device)
    p = torch.nn.Parameter(whole[::2, 1::3])
    p.grad = torch.ones_like(p)
    AdamW([p], lr=0.5, betas=(0.0, 0.0), weight_decay=0.0).step()
    assert whole[::2, 1::3].eq(0.5).all()
    assert whole.sum().item() == 72 - 0.5 * 12


@pytest.mark.parametrize("gradient", [F32, F64])
def test_gradients_of_a_wider_dtype_count_in_full(gradient, device):
    p = torch.nn.Parameter(torch.ones(5, dtype=BF16, device=device))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch gives every gradient its parameter's dtype")
    p.grad_dtype = gradient
    # Of 16 bits, of which bf16 has the first 8.
    p.grad = torch.full_like(p, 1 + 2**-15, dtype=gradient)
    optimizer = AdamW([p], state_dtype=F32, betas=(0.5, 0.5))
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].eq(0.5 + 2**-16).all()


OTHERS = {
    "elsewhere": lambda x: x.clone(),
    "channels-last": lambda x: x.clone(memory_format=torch.channels_last),
    "transposed": lambda x: x.movedim(0, 3).contiguous().movedim(3, 0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_parameter_that_gets_other_memory_goes_on_with_its_state(other, backend, device):
    def run(make):
        p = torch.nn.Parameter(ramp(2, 3, 4, 5, device=device))
        optimizer = make([p])
        for step in range(4):
            if step == 2:
                p.data = OTHERS[other](p.data)
            p.grad = torch.sin(p.detach() * (5 + step))
            optimizer.step()
        return p

    found = run(lambda ps: AdamW(ps, lr=0.1, backend=backend))
    expected = run(lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False))
    assert_near([found], [expected])


def test_parameter_that_gets_another_dtype_takes_its_state_along(backend, device):
    layer = torch.nn.Linear(4, 3, device=device)
    optimizer = AdamW(layer.parameters(), lr=0.5, amsgrad=True, backend=backend)
    for dtype in (F32, BF16):
        layer.to(dtype)
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        before = [p.detach().clone().float() for p in layer.parameters()]
        optimizer.step()
        for p, q in zip(layer.parameters(), before, strict=True):
            # The gradients are equal in all steps: each goes by lr.
            # Rounded, or cut off by the interpreter, and so are both moments, which divide one
            # another.
            unit, expected = torch.finfo(dtype).eps, q * 0.995 - 0.5
            bound = unit * (expected.abs() + 0.5 * 2)
            assert ((p.float() - expected).abs() <= bound).all()
            state = optimizer.state[p]
            assert {name: x.dtype for name, x in state.items()} == {
                "step": F32,
                "exp_avg": dtype,
                "exp_avg_sq": dtype,
                "max_exp_avg_sq": dtype,
            }


def test_parameter_that_takes_anothers_place_is_the_one_that_moves(backend, device):
    old, new = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = AdamW([old], lr=0.5, betas=(0.0, 0.0), weight_decay=0.0, backend=backend)
    for p in (old, new):
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = state
    optimizer.step()
    assert (old.tolist(), new.tolist()) == ([0.5] * 3, [0.5] * 3)
    assert state["step"].item() == 2


def test_cleared_state_begins_again(training, backend):
    ps, twin = training.parameters(), training.parameters()
    optimizer = training.run(AdamW, ps, 2, backend=backend, lr=0.0)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.1
    training.run(lambda _: optimizer, ps, 1)
    expected = training.run(AdamW, twin, 1, backend=backend, lr=0.1)
    for p, q in zip(ps, twin, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p]["step"] == expected.state[q]["step"] == 1


def test_state_of_another_layout_is_taken_in_the_parameters_order(backend, device):
    p, q = (torch.nn.Parameter(ramp(3, 4, device=device)) for _ in range(2))
    states = [
        dict(step=torch.tensor(3.0), exp_avg=ramp(3, 4).sin(), exp_avg_sq=ramp(3, 4).square())
        for _ in range(2)
    ]
    ours = AdamW([p], backend=backend, lr=0.1)
    theirs = torch.optim.AdamW([q], lr=0.1, foreach=False)
    for name in ("exp_avg", "exp_avg_sq"):
        # Another dtype, another order of axes.
        states[0][name] = states[0][name].to(device, F64).T.contiguous().T
        states[1][name] = states[1][name].to(device)
    ours.state[p], theirs.state[q] = states
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours.step()
    theirs.step()
    torch.testing.assert_close(p, q)
    assert ours.state[p]["step"].item() == 4
    assert ours.state[p]["exp_avg"].stride() == p.stride()


@pytest.fixture
def torchs_defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(F32)
    torch.set_default_device(None)


@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_defaults_of_torch_change_nothing(training, backend, device, default, torchs_defaults):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    gradients = []
    for step in range(2):
        training.give_gradients(ps, step)
        gradients.append([p.grad for p in ps])

    def run(ps):
        optimizer = AdamW(ps, max_grad_norm=0.5, capturable=True, backend=backend)
        found = [optimizer.grad_norm.clone()]
        for some in gradients:
            for p, g in zip(ps, some, strict=True):
                p.grad = g
            optimizer.step()
            found.append(optimizer.grad_norm.clone())
        return [*found, *(x for p in ps for x in (p.detach(), *optimizer.state[p].values()))]

    expected = run(ps)
    if default == "meta":
        torch.set_default_device(default)
    else:
        torch.set_default_dtype(getattr(torch, default))
    for found, truth in zip(run(twin), expected, strict=True):
        assert (found.dtype, found.device) == (truth.dtype, truth.device)
        assert torch.equal(found.nan_to_num(), truth.nan_to_num())


@pytest.mark.parametrize(
    "rate", [torch.tensor(1), torch.tensor([0.5], dtype=BF16), torch.tensor([[0.5]])], ids=str
)
def test_any_tensor_of_one_number_that_a_group_is_given_is_read(rate, backend, device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamW([p], betas=(0.0, 0.0), weight_decay=0.0, backend=backend)
    optimizer.param_groups[0]["lr"] = rate.to(device)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.tolist(), [1.0 - rate.item()] * 3)


def test_one_beta_may_be_a_number_and_the_other_a_tensor(training, backend, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    betas = (0.5, torch.tensor([[0.75]], device=device))
    training.run(AdamW, ps, betas=betas, backend=backend)
    training.run(AdamW, twin, betas=(0.5, 0.75), backend=backend)
    assert all(map(torch.equal, ps, twin))


def test_gradients_on_another_device_are_refused():
    p = parameter()
    # By torch, where it sees them.
    with pytest.raises(RuntimeError, match="device"):
        p.grad = torch.zeros(5, device="meta")
    with pytest.raises(ValueError, match=r"\[5\] on cpu has a gradient of \[5\] on meta"):
        check_gradient(p, torch.zeros(5, device="meta"))


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    (group,) = AdamW([torch.ones(3)], lr=numpy.float32(0.5), eps=numpy.float64(0)).param_groups
    assert (group["lr"], group["eps"]) == (0.5, 0.0)


def parameter(dtype=F32):
    return torch.nn.Parameter(torch.zeros(5, dtype=dtype))


def adamw(*params, **options):
    return AdamW(list(params) or [parameter()], **options)


BAD = [
    (lambda: AdamW([]), ValueError, "empty parameter list"),
    (lambda: AdamW(parameter()), TypeError, "should be an iterable"),
    (lambda: adamw(parameter() * 1), ValueError, "non-leaf"),
    (
        lambda: adamw(torch.zeros(2, dtype=torch.int64)),
        TypeError,
        "floating or complex, got torch.int64",
    ),
    (lambda: adamw(torch.zeros(2).to_sparse()), TypeError, "strided .* torch.sparse_coo"),
    (lambda: adamw(lr=-1.0), ValueError, "lr must be at least 0, got -1.0"),
    (lambda: adamw(lr=NAN), ValueError, "lr must be at least 0, got nan"),
    (lambda: adamw(lr="1"), ValueError, "lr must be at least 0, got '1'"),
    (lambda: adamw(lr=True), ValueError, "got True"),
    (lambda: adamw(lr=torch.ones(2)), ValueError, r"lr must be a number or a tensor of one.*\[2\]"),
    (lambda: adamw(lr=torch.tensor(1)), ValueError, "got .* of torch.int64"),
    (lambda: adamw(eps=-1e-8), ValueError, "eps must be at least 0, got -1e-08"),
    (lambda: adamw(weight_decay=INF), ValueError, "weight_decay must be at least 0, got inf"),
    (lambda: adamw(betas=(0.9, 1.0)), ValueError, r"betas\[1\] must be from 0 to below 1, got 1.0"),
    (lambda: adamw(betas=(-0.1, 0.9)), ValueError, r"betas\[0\] must be from 0 to below 1"),
    (lambda: adamw(betas=0.9), ValueError, "betas must be two numbers, got 0.9"),
    (lambda: adamw(betas=(0.9,)), ValueError, r"betas must be two numbers, got \(0.9,\)"),
    (lambda: adamw(max_grad_norm=0.0), ValueError, "finite number above 0, got 0.0"),
    (lambda: adamw(max_grad_norm=INF), ValueError, "finite number above 0, got inf"),
    (lambda: adamw(max_grad_norm="1"), ValueError, "finite number above 0, got '1'"),
    (lambda: adamw(max_grad_norm=True), ValueError, "finite number above 0, got True"),
    (
        lambda: adamw(max_grad_norm=1.0, skip_nonfinite=False),
        ValueError,
        "skip_nonfinite must be True or left out .* got False",
    ),
    (
        lambda: adamw(state_dtype=torch.float16),
        ValueError,
        "float32 or bfloat16, got torch.float16",
    ),
    (lambda: adamw(rounding="up"), ValueError, '"stochastic" or "remainder", got \'up\''),
    (lambda: adamw(seed=-1), ValueError, "seed must be at least 0, got -1"),
    (lambda: adamw(seed=2**31), ValueError, "got 2147483648"),
    (lambda: adamw(seed=1.0), TypeError, "seed must be a whole number, got float"),
    (lambda: adamw(backend="cuda"), ValueError, "backend must be .* got 'cuda'"),
    (lambda: adamw(fused=True), TypeError, "fused"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_options_are_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def of_matrix(make):
    return lambda **options: make([torch.nn.Parameter(torch.ones(2, 3))], **options)


muon, m3, delta, deep = map(of_matrix, (Muon, M3, DeltaMomentum, DeepMomentum))


def learned(**options):
    return LearnedOptimizer([parameter()], UpdateMLP(), **options)


def velo(**options):
    given = dict(params=[parameter()], networks=VeLONetworks(8, 4), num_steps=20)
    return VeLO(**(given | options))


def nested(**options):
    return DeepNestedOptimizer([("core", parameter())], **options)


BAD_OPTIONS = [
    (muon, dict(lr=-1.0), "lr must be at least 0, got -1.0"),
    (muon, dict(momentum=1.0), "momentum must be from 0 to below 1, got 1.0"),
    (muon, dict(momentum=torch.tensor(0.9)), "momentum must be a number, got a tensor"),
    (muon, dict(nesterov=1), "nesterov must be True or False, got 1"),
    (muon, dict(scale="wide"), "scale must be \"output_rms\" or .* got 'wide'"),
    (muon, dict(ns_steps=0), "at least 1, got 0"),
    (muon, dict(ns_coefficients=(1.0,)), "three numbers"),
    (muon, dict(ns_dtype=torch.int8), "dtype must be floating"),
    (muon, dict(matrix="yes"), "matrix must be True or False"),
    (muon, dict(adam_betas=(0.9,)), "adam_betas must be two numbers"),
    (muon, dict(adam_betas=(0.9, 1.5)), r"adam_betas\[1\] must be from 0 to below 1"),
    (m3, dict(betas=(0.9, 0.999)), "betas must be three numbers"),
    (m3, dict(betas=(0.0, 0.9, 0.9)), r"betas\[0\] must be above 0 and at most 1, got 0.0"),
    (m3, dict(retain=(1.0, 1.0, 1.1)), r"retain\[2\] must be from 0 to 1, got 1.1"),
    (m3, dict(alpha=-0.1), "alpha must be at least 0"),
    (m3, dict(frequency=0), "frequency must be at least 1, got 0"),
    (m3, dict(frequency=2.0), "frequency must be a whole number, got float"),
    (m3, dict(eps=-1.0), "eps must be at least 0"),
    (m3, dict(relative=None), "relative must be True or False"),
    (delta, dict(alpha=1.0), "alpha must be from 0 to below 1, got 1.0"),
    (delta, dict(delta=2.0), "delta must be at most 1 . alpha = 1.9, got 2.0"),
    (delta, dict(normalize=1), "normalize must be True or False"),
    (delta, dict(weight_decay=-0.1), "weight_decay must be at least 0"),
    (deep, dict(alpha=-0.1), "alpha must be from 0"),
    (deep, dict(inner_lr=-1.0), "inner_lr must be at least 0"),
    (deep, dict(hidden=0), "hidden must be at least 1, got 0"),
    (deep, dict(seed=-1), "seed must be at least 0, got -1"),
    (deep, dict(objective="l2"), 'objective must be "dot" or "regression", got \'l2\''),
    (deep, dict(orthogonal="yes"), "orthogonal must be True or False"),
    (learned, dict(lr=-1.0), "lr must be at least 0"),
    (learned, dict(weight_decay=NAN), "weight_decay must be"),
    (learned, dict(max_grad_norm=0.0), "max_grad_norm must be"),
    (learned, dict(backend="cuda"), "backend must be"),
    (learned, dict(extra_features=torch.ones(1)), "extra_features must be given"),
    (velo, dict(lr=-1.0), "lr must be at least 0"),
    (velo, dict(weight_decay=NAN), "weight_decay must be"),
    (velo, dict(num_steps=0), "num_steps must be at least 1, got 0"),
    (velo, dict(num_steps=1.5), "num_steps must be a whole number, got float"),
    (velo, dict(max_grad_norm=0.0), "max_grad_norm must be"),
    (velo, dict(backend="cuda"), "backend must be"),
    (velo, dict(networks=torch.nn.Linear(2, 2)), "networks must be VeLONetworks"),
    (velo, dict(params=[]), "empty parameter list"),
    (NestedController, dict(hidden=0), "hidden must be at least 1, got 0"),
    (NestedController, dict(hidden=True), "hidden must be a whole number, got bool"),
    (NestedController, dict(layers=1.0), "layers must be a whole number, got float"),
    (NestedController, dict(features="sqrt"), 'features must be "log" or "raw"'),
    (nested, dict(base_lr=-1.0), "lr must be at least 0"),
    (nested, dict(meta_lr=-1.0), "meta_lr must be at least 0"),
    (nested, dict(mode="never"), 'mode must be "simple" or "explicit"'),
    (nested, dict(meta="guess"), 'meta must be "hypergradient" or "proxy"'),
    (nested, dict(features="square"), 'features must be "log" or "raw"'),
    (nested, dict(update="sgd"), 'update must be "adamw" or "continuum"'),
    (nested, dict(meta_update_freq=0), "meta_update_freq must be at least 1, got 0"),
    (
        nested,
        dict(controller_update_freq=1.5),
        "controller_update_freq must be a whole number, got float",
    ),
    (
        nested,
        dict(controller_hidden_dim=True),
        "controller_hidden_dim must be a whole number, got bool",
    ),
    (nested, dict(frequencies=()), "frequencies must be of one level"),
    (nested, dict(frequencies=(1, 0)), "frequencies must be at least 1, got 0"),
    (nested, dict(momentum_hidden_dim=1), "momentum_hidden_dim must be at least 2"),
    (nested, dict(max_grad_norm=0.0), "max_grad_norm must be a finite number above 0"),
    (nested, dict(update="continuum", rounding="stochastic"), "rounding and state_dtype are of"),
    (nested, dict(betas=(0.9, 1.0)), "betas"),
    (nested, dict(backend="cuda"), "backend must be"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), BAD_OPTIONS, ids=[m for *_, m in BAD_OPTIONS]
)
def test_bad_options_of_the_others_are_told_so_too(make, options, message):
    a_type = any(word in message for word in ("whole number", "dtype must", "VeLONetworks"))
    with pytest.raises(TypeError if a_type else ValueError, match=message):
        make(**options)


def test_refused_group_leaves_the_optimizer_as_it_was(training, backend):
    ps, twin = training.parameters(), training.parameters()
    optimizer = training.run(AdamW, ps, 1, backend=backend)
    with pytest.raises(ValueError, match=r"lr must be at least 0, got -1\.0"):
        optimizer.add_param_group(dict(params=[parameter()], lr=-1.0))
    with pytest.raises(TypeError, match="int64"):
        optimizer.add_param_group(dict(params=[torch.zeros(3, dtype=torch.int64)]))
    assert len(optimizer.param_groups) == 1
    training.run(lambda _: optimizer, ps, 1, first=1)
    training.run(AdamW, twin, 2, backend=backend)
    assert all(map(torch.equal, ps, twin))


def sparse_gradient(p, state):
    p.grad = torch.ones(5).to_sparse()


def gradient_of_another_shape(p, state):
    p.data = torch.zeros(7)


def state_of_another_shape(p, state):
    p.data = torch.zeros(7)
    p.grad = torch.ones(7)


def two_counts_of_steps(p, state):
    state["step"] = torch.ones(2)
    # Plans are made again.
    p.data = p.data.clone()


STRANGE = [
    (
        sparse_gradient,
        TypeError,
        "a gradient must be a strided tensor, got layout torch.sparse_coo",
    ),
    (gradient_of_another_shape, ValueError, r"shape \[7\] on cpu has a gradient of \[5\] on cpu"),
    (
        state_of_another_shape,
        ValueError,
        r"exp_avg of parameter 1 must have shape \[7\], got \[5\]",
    ),
    (two_counts_of_steps, ValueError, "step of parameter 1 must be one number, got 2"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), STRANGE, ids=[m for *_, m in STRANGE])
def test_refused_step_changes_nothing(spoil, error, message, backend):
    ps = [parameter(), parameter()]
    optimizer = AdamW(ps, backend=backend)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    spoil(ps[1], optimizer.state[ps[1]])
    before = [x.clone() for p in ps for x in (p.detach(), *optimizer.state[p].values())]
    with pytest.raises(error, match=message):
        optimizer.step()
    after = [x for p in ps for x in (p.detach(), *optimizer.state[p].values())]
    assert all(map(torch.equal, after, before))


def wide(device):
    ones = torch.ones(4, dtype=F64, device=device)
    return torch.nn.Parameter(0 * ones), ones


def with_gaps(device):
    zeros = torch.zeros(8, device=device)
    return torch.nn.Parameter(zeros[::2]), torch.ones(4, device=device)


def with_wide_gradient(device):
    p = torch.nn.Parameter(torch.zeros(4, device=device))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch gives every gradient its parameter's dtype")
    p.grad_dtype = F64
    return p, torch.ones(4, dtype=F64, device=device)


REFUSED = [
    (wide, r"not torch\.float64"),
    (with_gaps, "gaps"),
    (with_wide_gradient, r"gradients .* not torch\.float64"),
]


@pytest.mark.parametrize(("draw", "message"), REFUSED, ids=[x.__name__ for x, _ in REFUSED])
def test_kernels_refuse_what_they_cannot_serve(draw, message, device):
    p, g = draw(device)
    optimizer = AdamW([p], backend="triton")
    p.grad = g
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert p.eq(0).all()
    AdamW([p], lr=0.5, eps=0.0).step()
    torch.testing.assert_close(p, torch.full_like(p, -0.5))


def test_the_rest_of_a_group_is_served_beside_what_kernels_do_not_take(device):
    ps = [torch.nn.Parameter(ramp(6, device=device).to(dtype)) for dtype in (F32, F64)]
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    ours = AdamW(ps, lr=0.1, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(twin, lr=0.1, foreach=False)
    for step in range(3):
        for p, q in zip(ps, twin, strict=True):
            p.grad = torch.cos(p.detach() * (5 + step))
            q.grad = p.grad.clone()
        ours.step()
        norm = torch.nn.utils.clip_grad_norm_(twin, 0.5)
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm.to(F32))
    for p, q in zip(ps, twin, strict=True):
        # The norm is one of fp32.
        assert_near([p.float()], [q.float()])


@pytest.mark.parametrize(
    "make",
    [
        AdamW,
        Muon,
        lambda ps: LearnedOptimizer(ps, UpdateMLP()),
        lambda ps: DeepNestedOptimizer([("core", ps[0])]),
    ],
    ids=["adamw", "muon", "learned", "nested"],
)
@pytest.mark.parametrize(("name", "value"), [("lr", -5.0), ("weight_decay", "x")])
def test_options_of_a_state_dict_are_held_to_their_range(make, name, value):
    optimizer = make([torch.nn.Parameter(torch.ones(2, 3))])
    saved = optimizer.state_dict()
    before = {k: x for k, x in optimizer.param_groups[0].items() if k != "params"}
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(saved)
    assert {k: x for k, x in optimizer.param_groups[0].items() if k != "params"} == before
