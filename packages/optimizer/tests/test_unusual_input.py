"""Parameters, gradients, numbers and state of every kind that is served: layouts, dtypes, devices,
numbers of NumPy, tensors for options, torch's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fusewright.optimizer import AdamW

from .compared import assert_near

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


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


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    (group,) = AdamW([torch.ones(3)], lr=numpy.float32(0.5), eps=numpy.float64(0)).param_groups
    assert (group["lr"], group["eps"]) == (0.5, 0.0)


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
