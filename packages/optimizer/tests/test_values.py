"""AdamW's values: kernels and reference against torch's in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright.optimizer import AdamW
from fusewright_testkit import Yardstick
from torch.utils._python_dispatch import TorchDispatchMode

from .compared import assert_equal, assert_near

OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.3},
    {"betas": (0.0, 0.95), "eps": 1e-3},
    {"betas": (0.7, 0.0), "weight_decay": 0.0},
]


def spelled(options: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "plain"


@pytest.mark.sampled
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("options", OPTIONS, ids=spelled)
def test_parameters_are_as_near_to_fp64_as_torchs(training, backend, device, options, decoupled):
    twin = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"weight_decay": 0.01, **options}

    def torchs(*tensors):
        return stepped(twin, tensors, foreach=False, **options)

    def ours(*tensors):
        return stepped(AdamW, tensors, decoupled_weight_decay=decoupled, backend=backend, **options)

    ps = training.parameters(device=device)
    Yardstick(torchs, [p.detach() for p in ps], [None] * len(ps)).check(ours)


KEPT = [
    *(dict(state_dtype=dtype) for dtype in (None, torch.float32, torch.bfloat16)),
    dict(rounding="stochastic"),
    dict(rounding="remainder", state_dtype=torch.float32),
]


@pytest.mark.sampled
@pytest.mark.parametrize("clips", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("kept", KEPT, ids=spelled)
@pytest.mark.parametrize("options", [*OPTIONS, {"decoupled_weight_decay": False}], ids=spelled)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_reference_on_a_cpu_is_the_formula(training, request, dtype, options, kept, clips):
    """Of dense parameters, one in another order of axes, and one with gaps."""
    options = {**options, **kept, "max_grad_norm": 0.9} if clips else {**options, **kept}

    def run():
        ps = training.parameters(dtype)
        memory = torch.ones(6, 10, dtype=dtype)
        more = memory[::2, ::3], ps[1].detach().clone().T
        ps += [torch.nn.Parameter(x) for x in more]
        optimizer = training.run(AdamW, ps, 3, backend="reference", **options)
        assert memory[1::2].eq(1.0).all()
        gradients = [p.grad for p in ps]
        state = [optimizer.state[p][name] for p in ps for name in sorted(optimizer.state[p])]
        return [*ps, *state], gradients

    found, gradients = run()
    request.getfixturevalue("formula")
    expected, same_gradients = run()
    assert all(map(torch.equal, gradients, same_gradients))
    # What is rounded to the narrowest of all may be rounded the other way in each step.
    narrow = max({dtype, kept.get("state_dtype") or dtype}, key=lambda x: torch.finfo(x).eps)
    for x, y in zip(found, expected, strict=True):
        if x.dtype != torch.int16:
            assert_near([x.to(narrow)], [y.to(narrow)])


def test_steps_on_a_cpu_are_few_calls_of_torch_for_any_number_of_tensors():
    """By one for all tensors that are updated alike."""
    counts = []
    for tensors in (4, 40):
        ps = [torch.nn.Parameter(torch.ones(3)) for _ in range(tensors)]
        ps += [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in ps]
        optimizer = AdamW(ps, backend="reference")
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        counts.append(len(calls.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kept", KEPT, ids=spelled)
@pytest.mark.parametrize("options", [*OPTIONS, {"capturable": True}, {"max_grad_norm": 0.5}])
def test_reference_asks_for_no_value(training, options, kept):
    """On a CPU too, where tests of whole trainings look for it."""
    ps = training.parameters(torch.bfloat16)
    optimizer = AdamW(ps, backend="reference", **options, **kept)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    training.give_gradients(ps, 0)
    with Calls() as calls:
        optimizer.step()
    assert calls.names
    assert not any("_local_scalar_dense" in name for name in calls.names)


@pytest.mark.parametrize("length", [3, 5000])
def test_amsgrad_keeps_nan(backend, device, length):
    p = torch.nn.Parameter(torch.ones(length, device=device))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], amsgrad=True, backend=backend)
    optimizer.step()
    state = optimizer.state[p]
    state["exp_avg_sq"][1] = state["max_exp_avg_sq"][2] = torch.nan
    optimizer.step()
    strange = p.isnan().nonzero().flatten().tolist()
    assert strange == state["max_exp_avg_sq"].isnan().nonzero().flatten().tolist() == [1, 2]


class Calls(TorchDispatchMode):
    """Names of torch's operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **kwargs or {})


def stepped(make, tensors, **options):
    """Parameters after three steps against their own sines."""
    ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
    optimizer = make(ps, lr=0.02, **options)
    for step in range(3):
        for p, x in zip(ps, tensors, strict=True):
            p.grad = torch.sin(x.detach() * (5 + step))
        optimizer.step()
    return tuple(p.detach() for p in ps)


def test_many_programs_give_the_bits_of_one(training, device, request):
    expected = training.parameters(device=device)
    training.run(AdamW, expected, max_grad_norm=1e6, backend="triton")
    request.getfixturevalue("many_programs")
    found = training.parameters(device=device)
    training.run(AdamW, found, max_grad_norm=1e6, backend="triton")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=spelled)
def test_remainder_holds_the_bits_of_fp32_parameters(training, device, backend, options):
    check_remainder(training, device, backend, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=spelled)
def test_kernels_remainder_holds_the_bits_of_fp32_parameters(training, device, options):
    check_remainder(training, device, "triton", options)


def check_remainder(training, device, backend, options):
    narrow = training.parameters(torch.bfloat16, device)
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    kept = dict(rounding="remainder", state_dtype=torch.float32)
    optimizer = training.run(AdamW, narrow, 20, backend=backend, **kept, **options)
    training.run(AdamW, wide, 20, backend=backend, **options)
    for p, q in zip(narrow, wide, strict=True):
        low = optimizer.state[p]["remainder"].to(torch.int32)
        whole = (p.detach().float().view(torch.int32) + low).view(torch.float32)
        assert torch.equal(whole, q.detach())
        # To the nearest: within half a unit of bf16.
        assert (p.detach().float() - q).abs().le(q.abs() * 2**-8).all()


def test_stochastic_rounding_keeps_the_mean_and_lands_on_neighbours(device):
    check_chance("reference", device)


@pytest.mark.gpu
def test_kernels_stochastic_rounding_keeps_the_mean_and_lands_on_neighbours(device):
    check_chance("triton", device)


def check_chance(backend, device):
    """Steps that are a tenth of what separates bf16 numbers: the nearest would never move."""
    count, lr = 20000, 0.1 * 2**-8
    p = torch.nn.Parameter(torch.full((count,), 1.25, dtype=torch.bfloat16, device=device))
    options = dict(lr=lr, weight_decay=0.0, rounding="stochastic", state_dtype=torch.float32)
    optimizer = AdamW([p], backend=backend, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(p.detach().float().unique().tolist()) == {1.25, 1.25 - 2**-7}
    for _ in range(9):
        optimizer.step()
    moved = 1.25 - p.detach().double()
    # Each step moves by a unit with a chance of a twentieth.
    deviation = 2**-7 * (10 * 0.05 * 0.95 / count) ** 0.5
    assert abs(moved.mean().item() - 10 * lr) < 5 * deviation
    # Elements and steps draw apart: the spread is that of ten draws each.
    assert moved.std().item() == pytest.approx(2**-7 * (10 * 0.05 * 0.95) ** 0.5, rel=0.05)


def test_state_of_fp64_parameters_is_rounded_by_chance_as_that_of_fp32(device):
    """The numbers are those that both dtypes hold."""
    found = []
    for dtype in (torch.float32, torch.float64):
        p = torch.nn.Parameter(torch.ones(5, 7, dtype=dtype, device=device))
        options = dict(betas=(0.5, 0.5), rounding="stochastic", state_dtype=torch.bfloat16)
        optimizer = AdamW([p], backend="reference", **options)
        p.grad = torch.full_like(p, 1.0 + 2**-9)
        for _ in range(3):
            optimizer.step()
        found.append([optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")])
    assert_equal(*found)
    assert len(found[1][0].unique()) > 1


def test_stochastic_rounding_draws_apart_for_all_that_it_rounds(backend, device):
    """p, m and v of two parameters, and those of another seed, all halfway between two numbers of
    bf16: how often two go the same way is how often two coins fall alike.
    """
    count, half = 20000, 0.5 + 2**-9
    options = dict(lr=2**-8, betas=(1 - half, 1 - half), eps=1e-30, weight_decay=0.0)
    ups = []
    for seed in (0, 1):
        ps = [
            torch.nn.Parameter(torch.full((count,), 1.25, device=device).bfloat16()) for _ in "ab"
        ]
        optimizer = AdamW(ps, backend=backend, rounding="stochastic", seed=seed, **options)
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p in ps:
            state = optimizer.state[p]
            assert set(p.detach().float().unique().tolist()) == {1.25, 1.25 - 2**-7}
            ups.append(p.detach() == 1.25)
            for kept in (state["exp_avg"], state["exp_avg_sq"]):
                assert set(kept.float().unique().tolist()) == {0.5, 0.5 + 2**-8}
                ups.append(kept > half)
    for one, other in itertools.combinations(ups, 2):
        alike = (one == other).sum().item()
        assert abs(alike - count / 2) < 5 * (count / 4) ** 0.5


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e18])
def test_gradients_of_any_size_move_as_in_fp64(training, backend, device, scale):
    ps = training.parameters(device=device)
    training.run(AdamW, ps, scale=scale, backend=backend, lr=0.1, eps=0.0)
    wide = training.parameters(torch.float64, device)
    training.run(torch.optim.AdamW, wide, scale=scale, lr=0.1, eps=0.0)
    if scale == 1e-30:
        # Squares are below fp32's smallest number: elements divide by zero or stay, as torch's do.
        twin = training.parameters(device=device)
        training.run(torch.optim.AdamW, twin, scale=scale, lr=0.1, eps=0.0, foreach=False)
        wide = twin
    for p, q in zip(ps, wide, strict=True):
        assert_near([p], [q.float()])


def test_clipping_scales_all_gradients_to_the_norm(training, backend, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    ours = AdamW(ps, max_grad_norm=0.7, backend=backend)
    theirs = torch.optim.AdamW(twin, foreach=False)
    for step in range(4):
        # Below the norm in the last step.
        for some in (ps, twin):
            training.give_gradients(some, step, 1e-3 if step == 3 else 1.0)
        before = [p.grad.clone() for p in ps]
        ours.step()
        norm = torch.nn.utils.clip_grad_norm_(twin, 0.7)
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm)
        assert all(map(torch.equal, before, (p.grad for p in ps)))
    assert_near(ps, twin)


def test_groups_have_numbers_of_their_own(training, backend, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))

    def groups(some):
        return [
            dict(params=some[:2], lr=0.1, betas=(0.5, 0.6), amsgrad=True),
            dict(params=some[2:], weight_decay=0.5, maximize=True),
        ]

    training.run(AdamW, groups(ps), 0, backend=backend)
    ours, theirs = AdamW(groups(ps), backend=backend), torch.optim.AdamW(groups(twin))
    for step in range(4):
        for some, optimizer in ((ps, ours), (twin, theirs)):
            training.give_gradients(some, step)
            # A schedule.
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
    assert_near(ps, twin)


def test_numbers_may_be_tensors_that_others_write(training, backend, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    lr = torch.tensor(0.1, device=device)
    decay = torch.tensor(0.2, dtype=torch.float64, device=device)
    ours = AdamW(ps, lr=lr, weight_decay=decay, backend=backend)
    theirs = torch.optim.AdamW(twin, lr=0.1, weight_decay=0.2)
    for step in range(4):
        training.give_gradients(ps, step)
        training.give_gradients(twin, step)
        lr.fill_(0.1 / (1 + step))
        decay.fill_(0.2 * step)
        group = theirs.param_groups[0]
        group["lr"], group["weight_decay"] = lr.item(), decay.item()
        ours.step()
        theirs.step()
    assert_near(ps, twin)
