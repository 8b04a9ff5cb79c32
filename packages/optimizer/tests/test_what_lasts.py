"""What a step leaves behind for the next, of any optimizer: results, plans, what graphs hold."""

from __future__ import annotations

import functools

import pytest
import torch
from fusewright.optimizer import AdamW, LearnedOptimizer, Muon, VeLO, clip_grad_norm_, grad_norm
from fusewright.optimizer.matrix.m3 import M3

MAKERS = ["adamw", "muon", "m3", "learned", "velo"]


@pytest.fixture(params=MAKERS)
def make(request, learned):
    """Makes one of the optimizers, which skips what is not finite, and says how it steps."""
    options = dict(skip_nonfinite=True)
    makers = {
        "adamw": functools.partial(AdamW, lr=0.1, **options),
        "muon": functools.partial(Muon, lr=0.1, **options),
        "m3": functools.partial(M3, lr=0.1, **options),
        "learned": functools.partial(LearnedOptimizer, mlp=learned.network(), lr=0.1, **options),
        "velo": lambda ps, **more: VeLO(ps, learned.velo_networks(), 20, lr=0.1, **options, **more),
    }

    def of(ps, backend):
        optimizer = makers[request.param](ps, backend=backend)
        takes = (torch.tensor(1.0),) if request.param == "velo" else ()
        return optimizer, functools.partial(optimizer.step, *takes)

    return of


def matrices():
    ps = [torch.nn.Parameter(torch.cos(torch.arange(30.0)).view(6, 5)) for _ in range(2)]
    for p in ps:
        p.grad = torch.sin(p.detach() * 3)
    return ps


def test_step_without_gradients_has_no_results_of_another(make, backend):
    ps = matrices()
    optimizer, step = make(ps, backend)
    ps[1].grad[2, 3] = float("nan")
    step()
    assert optimizer.skipped.item()
    for p in ps:
        p.grad = None
    step()
    assert not optimizer.skipped.item()
    assert optimizer.grad_norm.isnan().item()
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize("maker", [Muon, M3, AdamW])
def test_step_that_a_scaler_had_skipped_is_not_the_next_ones_result(maker, backend):
    ps = matrices()
    optimizer = maker(ps, backend=backend)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.skipped.item()
    del optimizer.found_inf
    optimizer.step()
    assert not optimizer.skipped.item()


def test_parameter_that_is_cut_is_not_moved_beyond_its_end(make, backend):
    ps = matrices()
    _, step = make(ps, backend)
    step()
    memory = ps[0].data
    ps[0].data = memory[:3]
    before = [memory.clone(), ps[1].detach().clone()]
    with pytest.raises(ValueError, match=r"shape \[3, 5\] .* gradient of \[6, 5\]"):
        step()
    assert torch.equal(memory, before[0])
    assert torch.equal(ps[1], before[1])
    # With a gradient of its own there is no state for it.
    ps[0].grad = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"3, 5\]"):
        step()
    assert torch.equal(memory, before[0])


def test_state_is_not_made_in_a_capture(make, capture):
    """Each replay would make it again, and take the first step for ever."""
    ps = matrices()
    _, step = make(ps, "reference")
    before = [p.detach().clone() for p in ps]
    capture(True)
    with pytest.raises(RuntimeError, match="take a step of the same parameters before"):
        step()
    assert all(map(torch.equal, ps, before))
    capture(False)
    step()
    capture(True)
    step()


def test_captured_steps_are_held_once_and_let_go_of(make, capture):
    ps = matrices()
    optimizer, step = make(ps, "reference")
    step()
    capture(True)
    for _ in range(3):
        step()
    assert len(optimizer._replayed) == 1
    optimizer.forget_captures()
    assert "_replayed" not in vars(optimizer)
    optimizer.forget_captures()


def test_remainder_keeps_nan(backend):
    """Of any bits: those of a GPU's round up to zero's."""
    for bits in (0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001):
        p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], rounding="remainder", state_dtype=torch.float32, backend=backend)
        optimizer.step()
        strange = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert strange.isnan()
        optimizer.state[p]["exp_avg"][2] = strange
        for _ in range(2):
            optimizer.step()
            assert p.isnan().tolist() == [False, False, True, False, False]
        assert p[0].item() != 1.0


def test_gradients_whose_squares_have_no_place_are_skipped_by_m3(backend):
    for relative in (True, False):
        ps = matrices()
        optimizer = M3(ps, relative=relative, skip_nonfinite=True, backend=backend)
        optimizer.step()
        before = [p.detach().clone() for p in ps]
        ps[0].grad[1, 1] = 1e21
        optimizer.step()
        assert optimizer.skipped.item()
        assert all(map(torch.equal, ps, before))
        ps[0].grad[1, 1] = 1e18
        optimizer.step()
        assert not optimizer.skipped.item()
        assert all(p.isfinite().all() for p in ps)


def test_m3_skips_from_the_norm_that_it_says(backend):
    """Whose square still has a place in fp32, unlike that of twice as much."""
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = M3([p], skip_nonfinite=True, backend=backend)
    for below in (1.0, 1.0 - 2**-20):
        p.grad = torch.full_like(p, 2.0**62 * below)
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.grad_norm.item() == 2.0**63 * below
        assert optimizer.skipped.item() == (below == 1.0)
        assert torch.equal(p, before) == (below == 1.0)
        assert all(x.isfinite().all() for x in (p, *optimizer.state[p].values()))


def test_state_without_its_count_of_steps_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = AdamW([p])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {name: x for name, x in saved["state"][0].items() if name != "step"}
    with pytest.raises(ValueError, match="state of parameter 0 must have a step, got exp_avg, exp"):
        AdamW([torch.nn.Parameter(torch.ones(3))]).load_state_dict(saved)


@pytest.mark.gpu
def test_whole_number_to_clip_to_is_not_that_of_later_calls():
    p = torch.nn.Parameter(torch.ones(100, device="cuda"))
    for norm in (1, 0.5, 2):
        p.grad = torch.ones_like(p)
        clip_grad_norm_([p], norm)
        assert grad_norm([p.grad]).item() == pytest.approx(norm)


@pytest.mark.gpu
def test_norm_over_a_gpu_and_a_cpu_waits_for_the_gpu():
    on_gpu = torch.ones(1000, device="cuda")
    for doubled in range(1, 6):
        torch.cuda._sleep(50_000_000)
        on_gpu.mul_(2.0)
        expected = (4.0**doubled * 1000 + 10) ** 0.5
        assert grad_norm([torch.ones(10), on_gpu]).item() == pytest.approx(expected)
        p = torch.nn.Parameter(torch.ones(10))
        q = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        p.grad, q.grad = torch.ones(10), on_gpu.clone()
        optimizer = AdamW([p, q], max_grad_norm=1.0)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(expected)
