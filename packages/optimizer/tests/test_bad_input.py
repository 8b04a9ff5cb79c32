"""What is refused: options, groups, gradients and state, by an error that says what was wanted and
what came, before anything has changed.
"""

from __future__ import annotations

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

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


def test_gradients_on_another_device_are_refused():
    p = parameter()
    # By torch, where it sees them.
    with pytest.raises(RuntimeError, match="device"):
        p.grad = torch.zeros(5, device="meta")
    with pytest.raises(ValueError, match=r"\[5\] on cpu has a gradient of \[5\] on meta"):
        check_gradient(p, torch.zeros(5, device="meta"))


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


@pytest.mark.parametrize(("damage", "error", "message"), STRANGE, ids=[m for *_, m in STRANGE])
def test_refused_step_changes_nothing(damage, error, message, backend):
    ps = [parameter(), parameter()]
    optimizer = AdamW(ps, backend=backend)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    damage(ps[1], optimizer.state[ps[1]])
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
