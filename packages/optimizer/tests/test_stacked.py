"""What Muon, M3, delta and deep momentum promise as torch's optimizers."""

from __future__ import annotations

import copy
import functools
import weakref

import pytest
import torch
from fusewright.optimizer import M3, DeepMomentum, DeltaMomentum, Muon
from fusewright.optimizer.common import checks
from fusewright.optimizer.matrix import stacked_optimizer
from fusewright_testkit import capture, no_synchronisation

from .compared import assert_near, everything


@pytest.fixture
def make(stacked):
    """Makes one of the optimizers, of matrices and of what are none."""
    return stacked


def in_full(make, ps, **options):
    """The optimizer with all products in the parameters' dtype."""
    optimizer = make(ps, **options)
    for group in optimizer.param_groups:
        if "ns_dtype" in group:
            group["ns_dtype"] = None
    return optimizer


def test_matrices_in_company_move_as_alone(training, device, make):
    """And where some have no gradient for a step, so that the company changes."""
    ps, alone = (training.parameters(torch.float64, device) for _ in range(2))
    company = in_full(make, ps)
    # A deep momentum draws by the seed and the place among all.
    drawn = "seed" in company.param_groups[0]
    ones = [
        in_full(make, [p], **({"seed": place} if drawn else {})) for place, p in enumerate(alone)
    ]
    for step in range(4):
        for some in (ps, alone):
            training.give_gradients(some, step)
            if step == 2:
                some[0].grad = some[3].grad = None
        for optimizer in (company, *ones):
            # M3 counts the steps in which a group moves.
            for group in optimizer.param_groups:
                if "steps" in group:
                    group["steps"] = step
            optimizer.step()
    for p, q in zip(ps, alone, strict=True):
        torch.testing.assert_close(p, q)


def test_stacks_of_a_bounded_size_move_as_whole_ones(training, device, make, monkeypatch):
    ps, twin = (training.parameters(torch.float64, device) for _ in range(2))
    training.run(functools.partial(in_full, make), ps)
    # Two of three matrices of 60 elements, and less than a filter bank.
    monkeypatch.setattr(stacked_optimizer, "STACKED", 120)
    training.run(functools.partial(in_full, make), twin)
    for p, q in zip(ps, twin, strict=True):
        torch.testing.assert_close(p, q)


def test_without_skipping_what_is_strange_stays_in_its_parameter(training, device, make):
    ps, clean = (training.parameters(device=device) for _ in range(2))
    optimizers = make(ps), make(clean)
    for step in range(3):
        training.give_gradients(ps, step)
        training.give_gradients(clean, step)
        if step == 1:
            ps[0].grad[1, 2] = float("nan")
        for optimizer in optimizers:
            optimizer.step()
    assert ps[0].isnan().any()
    assert all(map(torch.equal, ps[1:], clean[1:]))


def test_gradients_are_left_as_they_are(training, device, make):
    ps = training.parameters(device=device)
    training.give_gradients(ps, 0)
    before = [p.grad.clone() for p in ps]
    make(ps, skip_nonfinite=True, maximize=True).step()
    assert all(torch.equal(g, p.grad) for g, p in zip(before, ps, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_have_wide_state_that_loading_keeps(training, device, make, dtype):
    """Narrow parameters move as fp32 ones would, rounded once each step."""
    if make.by_kernels and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bf16")
    narrow = training.parameters(dtype, device)
    optimizer = training.run(make, narrow, 1)
    wide = [torch.nn.Parameter(p.detach().float()) for p in training.parameters(dtype, device)]
    training.run(make, wide, 1)
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(p, q.to(dtype))
    other = make(training.parameters(dtype, device))
    other.load_state_dict(optimizer.state_dict())
    states = zip(optimizer.state.values(), other.state.values(), strict=True)
    for mine, loaded in states:
        for name, x in mine.items():
            assert x.dtype == torch.float32
            assert torch.equal(x, loaded[name])
            assert loaded[name].dtype == torch.float32


def test_fp64_parameters_are_moved_in_fp64(training, device, make):
    ps = training.parameters(torch.float64, device)
    optimizer = training.run(make, ps, 1)
    state = optimizer.state[ps[0]]
    assert {x.dtype for x in state.values()} == {torch.float64}


def test_strided_parameters_and_gradients_move_as_contiguous_ones(training, device, make):
    ps, twin = (training.parameters(device=device)[:2] for _ in range(2))
    # The kernels take strided gradients alone.
    if not make.by_kernels:
        twin = [torch.nn.Parameter(p.detach().T.contiguous().T) for p in twin]
    optimizers = make(ps), make(twin)
    for step in range(3):
        training.give_gradients(ps, step)
        training.give_gradients(twin, step)
        for p in twin:
            p.grad = p.grad.T.contiguous().T
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, ps, twin))


def test_strided_parameters_are_declined_by_the_kernels(training, device, make):
    if not make.by_kernels:
        pytest.skip("the reference takes them")
    p = torch.nn.Parameter(training.parameters(device=device)[0].detach().T)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="contiguous"):
        make([p]).step()


def test_parameter_of_another_shape_is_refused(training, device, make):
    (p, *_) = training.parameters(device=device)
    optimizer = make([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.ones(1, 5, device=device)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()


def test_what_one_stack_cannot_take_moves_no_other(training, device, make):
    if not make.by_kernels:
        pytest.skip("the reference takes all")
    ps = [p for p in training.parameters(device=device) if p.shape in ((6, 10), (12, 5))]
    ps[-1].data = ps[-1].data.T.contiguous().T
    training.give_gradients(ps, 0)
    before = [p.detach().clone() for p in ps]
    optimizer = make(ps)
    with pytest.raises(RuntimeError, match="contiguous"):
        optimizer.step()
    assert all(map(torch.equal, ps, before))
    assert all(group.get("steps", 0) == 0 for group in optimizer.param_groups)


def test_gradients_and_state_of_others_are_not_kept(training, device, make):
    """Of a step's gradients nothing lives on; state without a gradient keeps no whole stack."""
    training.shapes = ((6, 10),) * 4
    ps = training.parameters(device=device)
    optimizer = training.run(make, ps, 1)
    training.give_gradients(ps, 1)
    optimizer.step()
    seen = [weakref.ref(p.grad.untyped_storage()) for p in ps]
    for p in ps:
        p.grad = None
    assert not any(x() for x in seen)
    training.give_gradients(ps[:1], 2)
    optimizer.step()
    for p in ps:
        for x in optimizer.state[p].values():
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_groups_may_be_added_and_have_options_of_their_own(training, device, make):
    ps = training.parameters(device=device)
    optimizer = make(ps)
    training.give_gradients(ps, 0)
    optimizer.step()
    added = torch.nn.Parameter(torch.ones(6, 10, device=device))
    optimizer.add_param_group(dict(params=[added], lr=0.0, weight_decay=0.0))
    start, before = added.detach().clone(), ps[0].detach().clone()
    training.give_gradients([*ps, added], 1)
    optimizer.step()
    assert torch.equal(added, start)
    assert not torch.equal(ps[0], before)
    assert "lr" in optimizer.param_groups[-1]
    with pytest.raises(ValueError, match="lr must be at least 0"):
        optimizer.add_param_group(dict(params=[torch.nn.Parameter(torch.ones(2, 2))], lr=-1.0))
    optimizer.step()


def test_learning_rate_may_be_a_tensor_that_others_write(training, device, make):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    lr = torch.tensor(0.05, device=device)
    optimizers = make(ps, lr=lr), make(twin)
    for step in range(3):
        rate = 0.05 / (1 + step)
        lr.fill_(rate)
        for some, optimizer in zip((ps, twin), optimizers, strict=True):
            training.give_gradients(some, step)
            if optimizer is optimizers[1]:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            optimizer.step()
    assert_near(ps, twin)


def test_hooks_and_closures_are_called(training, device, make):
    ps = training.parameters(device=device)
    optimizer = make(ps)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in ps)
        loss.backward()
        called.append("closure")
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert called == ["before", "closure", "after"] * 2
    assert second < first


def test_nothing_happens_without_gradients(training, device, make):
    ps = training.parameters(device=device)
    optimizer = make(ps)
    optimizer.step()
    assert not optimizer.state
    assert not optimizer.skipped.item()


def make_sparse(p):
    p.grad = None
    rows = torch.tensor([0, 2], device=p.device)
    torch.nn.functional.embedding(rows, p, sparse=True).sum().backward()


def shorten(p):
    p.data = p.data[:3]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (make_sparse, TypeError, "a strided tensor, got layout torch.sparse_coo"),
        (shorten, ValueError, r"shape \[3, 10\] .* gradient of \[6, 10\]"),
    ],
    ids=["sparse", "shape"],
)
def test_bad_gradients_are_refused_before_anything_is_touched(
    training, device, make, change, error, message
):
    ps = training.parameters(device=device)
    optimizer = training.run(make, ps, 1)
    training.give_gradients(ps, 1)
    change(ps[2])
    before = everything(optimizer)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(map(torch.equal, before, everything(optimizer)))


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.ones(2, 3, dtype=torch.complex64), "floating, got torch.complex64"),
        (torch.ones(2, 3).to_sparse(), "a strided tensor, got layout torch.sparse_coo"),
    ],
    ids=["complex", "sparse"],
)
def test_bad_parameters_are_refused(make, p, message):
    with pytest.raises(TypeError, match=message):
        make([torch.nn.Parameter(p)])


@pytest.mark.parametrize("make", [DeltaMomentum, DeepMomentum])
def test_sharded_parameters_are_refused(make, monkeypatch):
    monkeypatch.setattr(checks, "is_distributed", lambda x: True)
    with pytest.raises(TypeError, match="must be whole, got a Parameter"):
        make([torch.nn.Parameter(torch.ones(2, 3))])


def test_state_of_another_shape_is_refused_before_anything_is_taken(training, device, make):
    ps = training.parameters(device=device)
    saved = training.run(make, ps, 2).state_dict()
    other = make(training.parameters(device=device))
    wrong = copy.deepcopy(saved)
    name = next(iter(wrong["state"][0]))
    wrong["state"][0][name] = torch.ones(3, 3)
    with pytest.raises(ValueError, match=rf"{name} of parameter 0 must .* got \[3, 3\]"):
        other.load_state_dict(wrong)
    with pytest.raises(ValueError, match="must have groups of"):
        make(training.parameters(device=device)[:3]).load_state_dict(saved)
    assert not other.state


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu(training, make):
    ps = training.parameters(device="cuda")
    optimizer = make(ps, skip_nonfinite=True)
    training.give_gradients(ps, 0)
    gradients = [p.grad for p in ps]
    with no_synchronisation():
        # With the first, which plans, one that fires, and one whose gradients are fewer.
        for step in range(4):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone() if step else g
            if step == 3:
                ps[0].grad = None
            optimizer.step()


@pytest.mark.gpu
def test_replayed_steps_are_the_eager_ones_and_skip_and_follow_a_schedule(training, make):
    """Two steps in a graph, which are a whole chunk of M3's."""
    ps = training.parameters(device="cuda")
    optimizer = make(ps, capturable=True, skip_nonfinite=True)
    sources = [[torch.zeros_like(p) for p in ps] for _ in range(2)]

    def both():
        for source in sources:
            for p, g in zip(ps, source, strict=True):
                p.grad = g * 1.0
            optimizer.step()

    graph, _ = capture(both)
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = make(twin, capturable=True, skip_nonfinite=True)
    other.load_state_dict(optimizer.state_dict())
    for replay in range(3):
        for group, groups in zip(optimizer.param_groups, other.param_groups, strict=True):
            for each in (group, groups):
                each["lr"].fill_(0.05 / (1 + replay))
        for half, source in enumerate(sources):
            training.give_gradients(twin, 2 * replay + half)
            if replay == 1 and half == 0:
                twin[1].grad[2, 3] = float("nan")
            for q, g in zip(twin, source, strict=True):
                g.copy_(q.grad)
            other.step()
        graph.replay()
        assert all(map(torch.equal, ps, twin))
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.parametrize(
    ("make_optimizer", "factor"),
    [
        (functools.partial(Muon, lr=0.1, weight_decay=0.0), 0.01),
        (functools.partial(M3, lr=0.1), 0.01),
        # The paper's own swings.
        (functools.partial(M3, lr=0.03, **M3.ALGORITHM_1), 0.7),
        (functools.partial(DeltaMomentum, lr=0.1), 0.02),
        (functools.partial(DeltaMomentum, lr=0.1, normalize=False), 0.02),
        (functools.partial(DeepMomentum, lr=1.5), 0.02),
        (functools.partial(DeepMomentum, lr=1.5, objective="regression"), 0.02),
        (functools.partial(DeepMomentum, lr=0.05, orthogonal=True), 0.02),
    ],
    ids=[
        *("muon", "m3", "m3-paper", "delta", "delta-paper"),
        *("deep-dot", "deep-regression", "deep-orthogonal"),
    ],
)
def test_regression_on_a_matrix_is_solved(device, make_optimizer, factor):
    """The loss falls to this factor; a wrong sign, or a gradient that is forgotten, raises it."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(shape, generator=generator) for shape in ((64, 12), (12, 8)))
    x, target = x.to(device), target.to(device)
    w = torch.nn.Parameter(torch.zeros(12, 8, device=device))
    optimizer = make_optimizer([w])
    (group,) = optimizer.param_groups
    rate, losses = group["lr"], []
    for step in range(200):
        if "matrix" in group:
            # An orthogonal step has a length of its own.
            group["lr"] = rate * (1 - step / 200)
        optimizer.zero_grad()
        loss = (x @ (w - target)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < factor * losses[0]


def test_a_plan_that_fails_half_way_is_made_again_by_the_next_step(monkeypatch):
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3, 4))]
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer = Muon(ps, lr=0.1)
    optimizer.step()
    optimizer.state[ps[1]].clear()
    complete = optimizer._new_state

    def fails(p, group, place):
        if place == 1:
            raise MemoryError
        return complete(p, group, place)

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_new_state", fails)
        with pytest.raises(MemoryError):
            optimizer.step()
    before = [p.detach().clone() for p in ps]
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(ps, before, strict=True))


def test_plan_made_again_holds_the_state_of_a_few_stacks_twice(monkeypatch):
    monkeypatch.setattr(stacked_optimizer, "STACKED", 24)
    ps = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(20)]
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer = Muon(ps, backend="reference")
    optimizer.step()
    held = []
    plain = optimizer._stacked

    def watched(*some):
        for stack in plain(*some):
            states = optimizer.state.values()
            memories = [x.untyped_storage() for state in states for x in state.values()]
            held.append(sum({x.data_ptr(): x.nbytes() for x in memories}.values()))
            yield stack

    monkeypatch.setattr(optimizer, "_stacked", watched)
    ps[0].grad = None
    optimizer.step()
    of_one = ps[0].numel() * 4
    assert len(held) == 19
    assert max(held) < (20 + 2 * 4 + 2) * of_one
