"""What a step leaves behind for the next, of any optimizer: results, plans, what graphs hold."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
from fusewright.optimizer import (
    M3,
    AdamW,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    clip_grad_norm_,
    grad_norm,
)

from .compared import as_file, assert_equal, everything
from .kinds import ADAMW, LEARNED, STACKED, of_kinds

# Where it is the host's part that is asked, which all backends share.
plain = of_kinds(
    [(name, "reference") for name in ("adamw", "muon", "m3", "deep", "learned", "velo")]
)

# State that has squares of gradients; VeLO clips gradients before it takes theirs.
SQUARED = "adamw", "muon", "m3", "learned"
squared = of_kinds(
    [(name, backend) for name, backend in [*ADAMW, *STACKED, *LEARNED] if name in SQUARED]
)

# DeltaMomentum's momentum holds earlier rates.
rated = of_kinds([case for case in [*ADAMW, *STACKED, *LEARNED] if case[0] != "delta"])


def made(kind, ps):
    """An optimizer that skips what is not finite, and its step."""
    optimizer = kind(ps, skip_nonfinite=True)
    return optimizer, functools.partial(optimizer.step, *map(torch.tensor, kind.losses(0)))


def matrices():
    ps = [torch.nn.Parameter(torch.cos(torch.arange(30.0)).view(6, 5)) for _ in range(2)]
    for p in ps:
        p.grad = torch.sin(p.detach() * 3)
    return ps


def test_step_without_gradients_has_no_results_of_another(kind):
    ps = matrices()
    optimizer, step = made(kind, ps)
    ps[1].grad[2, 3] = float("nan")
    step()
    assert optimizer.skipped.item()
    for p in ps:
        p.grad = None
    step()
    assert not optimizer.skipped.item()
    assert optimizer.grad_norm.isnan().item()
    assert optimizer.skipped_steps.item() == 1


def test_parameter_that_moves_to_another_group_has_its_rate(rated):
    """Over the boundary of two groups: the parameters stand in the same order as before."""
    ps, (last, _) = matrices(), matrices()
    optimizer, step = made(rated, ps)
    optimizer.add_param_group({"params": [last], "lr": 0.0})
    step()
    # A kind may have groups of its own, empty ones too.
    *_, one, other = (group["params"] for group in optimizer.param_groups if group["params"])
    moved = one.pop()
    other.insert(0, moved)
    before = {p: p.detach().clone() for p in (*ps, last)}
    step()
    for p, value in before.items():
        assert torch.equal(p, value) == (p is moved or p is last)


def test_same_inputs_same_bits(training, kind, device):
    options = {} if kind.name in ("muon", "m3", "delta", "deep") else {"max_grad_norm": 0.5}
    runs = [kind(training.parameters(device=device), **options) for _ in range(2)]
    assert_equal(*(everything(kind.go_on(training, each, range(2))) for each in runs))


def test_autocast_changes_nothing(training, networked, device):
    found = []
    for enabled in (False, True):
        optimizer = networked(training.parameters(device=device))
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled):
            found.append(everything(networked.go_on(training, optimizer, range(1))))
    assert_equal(*found)


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["file", "deepcopy", "pickle"])
def test_copies_go_on_with_the_same_bits(training, kind, device, way):
    optimizer = kind(training.parameters(device=device), skip_nonfinite=True)
    kind.go_on(training, optimizer, range(2))
    if way == "file":
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        other = kind([torch.nn.Parameter(p.detach().clone()) for p in ps], lr=0.7)
        other.load_state_dict(as_file(optimizer.state_dict()))
    else:
        other = (
            copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        )
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_equal(
        *(everything(kind.go_on(training, each, range(2, 4))) for each in (optimizer, other))
    )


@pytest.mark.sampled
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_step_without_a_finite_norm_changes_nothing(training, kind, device, strange):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    optimizer, other = kind(ps, skip_nonfinite=True), kind(twin)
    for step in range(4):
        training.give_gradients(ps, step)
        if step in (0, 2):
            ps[0].grad[1, 2] = strange
        before, start = everything(optimizer), [p.detach().clone() for p in ps]
        optimizer.step(*kind.losses(step))
        assert optimizer.skipped.item() == (step in (0, 2))
        if optimizer.skipped:
            assert not optimizer.grad_norm.isfinite().item()
            assert_equal(ps, start)
            # A first step makes state.
            assert step == 0 or all(map(torch.equal, everything(optimizer), before))
        else:
            whole = torch.cat([p.grad.flatten() for p in ps])
            torch.testing.assert_close(optimizer.grad_norm, whole.norm())
            training.give_gradients(twin, step)
            other.step(*kind.losses(step))
    assert optimizer.skipped_steps.item() == 2
    # M3 counts on the host; all others go on as if there had been no such step.
    if kind.name != "m3":
        assert_equal(everything(optimizer), everything(other))


def test_scaler_unscales_and_skips_in_the_step(training, kind, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    optimizer, other = kind(ps), kind(twin)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        training.give_gradients(twin, step)
        optimizer.zero_grad()
        loss = sum((p * q.grad).sum() for p, q in zip(ps, twin, strict=True))
        scaler.scale(loss).backward()
        before = everything(optimizer)
        if step == 1:
            ps[0].grad[0, 0] = float("inf")
        scaler.step(optimizer, *kind.losses(step))
        scaler.update()
        assert optimizer.skipped.item() == (step == 1)
        if step == 1:
            assert_equal(everything(optimizer), before)
        else:
            other.step(*kind.losses(step))
    assert scaler.get_scale() == 512.0
    # A scale that is a power of two rounds nothing.
    if kind.name != "m3":
        assert_equal(everything(optimizer), everything(other))


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["replaced", "cleared"])
def test_state_that_others_put_there_is_moved(training, kind, device, way):
    """As an offloading loop does it; and where a parameter's state is cleared, it begins again."""
    ps, twin = (training.parameters(device=device) for _ in range(2))
    ours, theirs = (kind.go_on(training, kind(some), range(2)) for some in (ps, twin))
    # VeLO keeps no state of a parameter without elements.
    for p, q in ((p, q) for p, q in zip(ps, twin, strict=True) if p in ours.state):
        if way == "cleared":
            ours.state[p] = {}
            theirs.state.pop(q)
        else:
            for name, x in ours.state[p].items():
                ours.state[p][name] = x.clone().mul_(0.5)
                theirs.state[q][name].mul_(0.5)
    found = [everything(kind.go_on(training, each, range(2, 4))) for each in (ours, theirs)]
    assert_equal(*found)


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


def test_parameter_that_is_cut_is_not_moved_beyond_its_end(kind):
    ps = matrices()
    _, step = made(kind, ps)
    step()
    memory = ps[0].data
    ps[0].data = memory[:3]
    before = [memory.clone(), ps[1].detach().clone()]
    with pytest.raises(ValueError, match=r"shape \[3, 5\] .* gradient of \[6, 5\]"):
        step()
    assert torch.equal(memory, before[0])
    assert torch.equal(ps[1], before[1])
    if kind.name == "deep":
        # Whose state has the size of a row.
        return
    # With a gradient of its own there is no state for it.
    ps[0].grad = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"3, 5\]"):
        step()
    assert torch.equal(memory, before[0])


def test_state_is_not_made_in_a_capture(plain, capture):
    """Each replay would make it again, and take the first step for ever."""
    ps = matrices()
    _, step = made(plain, ps)
    before = [p.detach().clone() for p in ps]
    capture(True)
    with pytest.raises(RuntimeError, match="take a step of the same parameters before"):
        step()
    assert all(map(torch.equal, ps, before))
    capture(False)
    step()
    capture(True)
    step()


def test_captured_steps_are_held_once_and_let_go_of(plain, capture):
    ps = matrices()
    optimizer, step = made(plain, ps)
    step()
    capture(True)
    for _ in range(3):
        step()
    assert len(optimizer._replayed) == 1
    optimizer.forget_captures()
    assert "_replayed" not in vars(optimizer)
    optimizer.forget_captures()


def live_tensors():
    gc.collect()
    # Proxies of lazy modules would be imported if they were asked for their class.
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_nothing_is_left_of_captured_steps_whose_optimizer_is_dropped(kind, capture):
    def train():
        ps = matrices()
        optimizer, step = made(kind, ps)
        for on in (False, True, True):
            capture(on)
            for p in ps:
                p.grad = p.grad * 2
            step()
        # Planned in a capture.
        ps[1].grad = ps[1].grad.T.contiguous().T
        step()
        capture(False)
        step()
        del optimizer

    train()
    before = live_tensors()
    for _ in range(3):
        train()
    assert live_tensors() == before


def test_nothing_is_left_of_captured_norms(backend, capture):
    def clip():
        ps = matrices()
        capture(True)
        grad_norm([p.grad for p in ps], backend=backend)
        clip_grad_norm_(ps, 1.0, backend=backend)
        capture(False)

    clip()
    before = live_tensors()
    for _ in range(3):
        clip()
    assert live_tensors() == before


def test_captured_norms_are_the_eager_ones(backend, capture):
    ps, twins = matrices(), matrices()
    expected = clip_grad_norm_(twins, 1.0, backend=backend)
    capture(True)
    assert torch.equal(clip_grad_norm_(ps, 1.0, backend=backend), expected)
    assert all(torch.equal(p.grad, twin.grad) for p, twin in zip(ps, twins, strict=True))


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


@pytest.mark.sampled
@pytest.mark.parametrize("large", [3e22, -3e38])
def test_squares_that_are_not_finite_are_not_stored(training, kind, device, large):
    """A step that would store one is skipped like one without a finite norm; others are taken."""
    ps, twin = (training.parameters(device=device) for _ in range(2))
    optimizer, other = kind(ps, skip_nonfinite=True), kind(twin)
    expected = kind.name in SQUARED
    for step in range(4):
        training.give_gradients(ps, step)
        training.give_gradients(twin, step)
        if step in (0, 2):
            ps[0].grad[1, 2] = large
        start = [p.detach().clone() for p in ps]
        optimizer.step(*kind.losses(step))
        assert optimizer.skipped.item() == (expected and step in (0, 2))
        assert all(x.isfinite().all() for x in everything(optimizer))
        assert all(map(torch.equal, ps, start)) == optimizer.skipped.item()
        if not optimizer.skipped:
            other.step(*kind.losses(step))
    assert optimizer.skipped_steps.item() == 2 * expected
    # M3 counts on the host; all others go on as if there had been no such step.
    if expected and kind.name != "m3":
        assert_equal(everything(optimizer), everything(other))


def test_steps_are_skipped_from_the_documented_norm_on(squared, device):
    """Whose square still has a place in fp32, unlike that of twice as much."""
    # AdamW moves Muon's vectors.
    p = torch.nn.Parameter(torch.ones(4 if squared.name == "muon" else (2, 2), device=device))
    optimizer = squared([p], skip_nonfinite=True)
    for below in (1.0, 1.0 - 2**-20):
        p.grad = torch.full_like(p, 2.0**62 * below)
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.grad_norm.item() == 2.0**63 * below
        assert optimizer.skipped.item() == (below == 1.0)
        assert torch.equal(p, before) == (below == 1.0)
        assert all(x.isfinite().all() for x in everything(optimizer))


def test_momentum_alone_takes_gradients_without_finite_squares(backend, device):
    p = torch.nn.Parameter(torch.ones(2, 2, device=device))
    optimizer = Muon([p], skip_nonfinite=True, backend=backend)
    p.grad = torch.tensor([[3e22, 1.0], [0.0, -3e22]], device=device)
    optimizer.step()
    assert not optimizer.skipped
    assert not torch.equal(p, torch.ones_like(p))
    assert all(x.isfinite().all() for x in everything(optimizer))


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5,)], ids=str)
def test_squares_of_delta_momentum_without_normalization_are_finite(shape, device):
    p = torch.nn.Parameter(torch.ones(shape, device=device))
    optimizer = DeltaMomentum([p], normalize=False, skip_nonfinite=True)
    for step, large in enumerate((1.0, 3e22, 1e-3, 3e22)):
        if step == 3:
            # An option may change between steps.
            optimizer.param_groups[0]["normalize"] = True
        p.grad = torch.full_like(p, large)
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.skipped.item() == (step == 1)
        assert torch.equal(p, before) == (step == 1)
        assert all(x.isfinite().all() for x in everything(optimizer))


@pytest.mark.parametrize("make", [DeltaMomentum, DeepMomentum, Muon])
def test_norm_that_its_dtype_does_not_hold_is_none(make, device):
    """Which grad_norm says: it is infinite."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        p = torch.nn.Parameter(torch.ones(8, 3, dtype=dtype, device=device))
        optimizer = make([p], skip_nonfinite=True)
        p.grad = torch.full_like(p, 1e38)
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.grad_norm.isinf()
        assert optimizer.skipped.item() == (dtype != torch.float64)
        assert torch.equal(p, before) == (dtype != torch.float64)
        assert all(x.isfinite().all() for x in everything(optimizer))


@pytest.mark.parametrize("max_norm", [1.0, 1e30])
def test_squares_are_of_clipped_gradients(training, backend, device, max_norm):
    ps = training.parameters(device=device)
    optimizer = AdamW(ps, max_grad_norm=max_norm, backend=backend)
    for scale in (1e30, 1e-3):
        training.give_gradients(ps, 0, scale)
        optimizer.step()
        assert optimizer.skipped.item() == (max_norm == scale == 1e30)
        assert optimizer.grad_norm.isfinite()
        assert all(x.isfinite().all() for x in everything(optimizer))


def test_squares_are_of_unscaled_gradients(training, backend, device):
    ps = training.parameters(device=device)
    optimizer = AdamW(ps, skip_nonfinite=True, backend=backend)
    optimizer.found_inf = torch.zeros((), device=device)
    for scale, times in ((2.0**16, 2.0**50), (2.0**-16, 2.0**70), (2.0**-16, 2.0**40)):
        optimizer.grad_scale = torch.tensor(scale, device=device)
        training.give_gradients(ps, 0, times)
        optimizer.step()
        assert optimizer.skipped.item() == (times / scale > 2.0**64)
        assert all(x.isfinite().all() for x in everything(optimizer))


@pytest.mark.parametrize("narrow", ["none", "state", "parameter"])
def test_squares_in_fp64_may_be_larger(training, narrow):
    """Unless one parameter or state of the step is narrower."""
    ps = training.parameters(torch.float64)
    if narrow == "parameter":
        ps.append(torch.nn.Parameter(torch.ones(3)))
    state_dtype = torch.float32 if narrow == "state" else None
    optimizer = AdamW(ps, skip_nonfinite=True, state_dtype=state_dtype)
    for scale in (3e22, 1e100, 1e160, 1.0):
        training.give_gradients(ps[:5], 0)
        for p in ps[:5]:
            p.grad *= scale
        if narrow == "parameter":
            ps[-1].grad = torch.ones(3)
        optimizer.step()
        assert optimizer.skipped.item() == (scale > (1e150 if narrow == "none" else 1.0))
        assert all(x.isfinite().all() for x in everything(optimizer))


def test_m3_adds_its_matrices_squares_in_fp32(backend):
    for relative in (True, False):
        ps = matrices()
        optimizer = M3(ps, relative=relative, skip_nonfinite=True, backend=backend)
        optimizer.step()
        before = [p.detach().clone() for p in ps]
        for large, skipped in ((1e21, True), (1e18, False)):
            ps[0].grad[1, 1] = large
            optimizer.step()
            assert optimizer.skipped.item() == skipped
            assert all(map(torch.equal, ps, before)) == skipped
            assert all(x.isfinite().all() for x in everything(optimizer))


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
