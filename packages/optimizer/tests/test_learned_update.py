"""The learned optimizer's step as a function: gradients of its network, and the public weights."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from fusewright.optimizer.common.statistics.reference import Statistics
from fusewright.optimizer.learned.learned_update import (
    FunctionalLearnedOptimizer,
    UpdateMLP,
    learned_apply,
    learned_init,
    learned_update,
)
from fusewright.optimizer.learned.pretrained import (
    PUBLIC_NAMES,
    PUBLIC_OFFSETS,
    load_update_mlp,
    trained_update_mlp,
)
from fusewright_testkit import Yardstick

from .compared import assert_near
from .published import spelled

KINDS = ((), (5,), (3, 4), (2, 5, 3))


def updates(learned, mlp, weights, p, extra, backend, steps=2):
    """The update of the second step as a function of weights and extra features."""
    names = [name for name, _ in mlp.named_parameters() if "offsets" not in name]
    given = dict(zip(names, weights, strict=True))
    p = p.detach().to(weights[0].dtype)
    twin = UpdateMLP(mlp.extra_features, exp_mult=mlp.exp_mult, step_mult=mlp.step_mult)
    twin.load_state_dict(mlp.state_dict())
    twin.to(p.device, p.dtype)
    kept = learned_init([p])
    for step in range(steps):
        g = learned.gradient(p, step)
        some = [p], [g], kept, None if extra is None else [extra.to(p.dtype)]
        found, kept = torch.func.functional_call(twin, given, some, {"backend": backend})
        kept = [Statistics(*(x.detach() for x in one)) for one in kept]
    return found[0]


@pytest.mark.sampled
@pytest.mark.parametrize("shape", KINDS, ids=spelled)
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.usefixtures("small_learned_tiles")
def test_gradients_of_the_network_are_those_of_autograd_in_fp64(learned, shape, extra, device):
    mlp = learned.network(extra, device=device)
    p = learned.drawn([shape])[0].to(device)
    told = torch.tensor([0.5, -1.5], device=device) if extra else None
    weights = [x.detach().clone() for x in mlp.weights()]

    def by(backend):
        def op(*given):
            *some, added = given if extra else (*given, None)
            return updates(learned, mlp, some, p, added, backend)

        return op

    inputs = [*weights, *([told] if extra else [])]
    grads = [torch.cos(torch.arange(p.numel(), device=device).float()).view(shape)]
    Yardstick(by("reference"), inputs, grads).check(by("triton"))


@pytest.mark.parametrize("power", [-12, 0, 20])
def test_layers_of_any_size_are_as_exact_as_the_references(learned, power, device):
    """Results of the first layer beyond fp16's largest number, and weights below its smallest."""
    mlp = learned.network(device=device)
    p = learned.drawn([(3, 40)])[0].to(device)
    w1, b1, w2, *others = (x.detach().clone() for x in mlp.weights())
    weights = [w1 * 2.0**power, b1 * 2.0**power, w2 * 2.0**-power, *others]

    def by(backend):
        return lambda *given: updates(learned, mlp, given, p, None, backend)

    Yardstick(by("reference"), weights, [None]).check(by("triton"))


@pytest.mark.parametrize("power", [-20, 10, 20])
@pytest.mark.parametrize("shape", [(3, 40), (4, 16)], ids=spelled)
@pytest.mark.usefixtures("small_learned_tiles")
def test_layers_whose_units_differ_in_size_are_as_exact_as_the_references(
    learned, power, shape, device
):
    """The first layer's results, of every second unit, and what the second multiplies them by."""
    mlp = learned.network(device=device)
    p = learned.drawn([shape])[0].to(device)
    w1, b1, w2, *others = (x.detach().clone() for x in mlp.weights())
    sizes = 2.0 ** (power * (torch.arange(32, device=device) % 2))
    weights = [w1 * sizes[:, None], b1 * sizes, w2 / sizes, *others]

    def by(backend):
        return lambda *given: updates(learned, mlp, given, p, None, backend)

    Yardstick(by("reference"), weights, [None]).check(by("triton"))


def test_gradients_add_over_tensors_in_a_fixed_order(learned, device):
    mlp = learned.network(device=device)
    ps = learned.drawn(learned.kinds, device)
    gs = [learned.gradient(p, 0) for p in ps]

    def gradients(backend):
        found, _ = learned_update(mlp, ps, gs, learned_init(ps), backend=backend)
        loss = sum((u * torch.cos(p)).sum() for u, p in zip(found, ps, strict=True))
        return torch.autograd.grad(loss, list(mlp.weights()))

    kernels = gradients("triton")
    assert all(map(torch.equal, kernels, gradients("triton")))
    for x, y in zip(kernels, gradients("reference"), strict=True):
        # fp32 sums of fewer than 2^6 terms, of which large ones may cancel.
        assert ((x - y).abs() <= 2**6 * torch.finfo(torch.float32).eps * y.abs().max()).all()


def test_reference_gives_gradients_to_everything(learned):
    mlp = learned.network(extra=1).double()
    mlp.requires_grad_()
    told = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    p = learned.drawn([(3, 4)])[0].double().requires_grad_()
    weights = list(mlp.parameters())

    def unrolled(p, told, *_):
        kept, x = learned_init([p]), p
        for step in range(2):
            g = torch.sin(x * (3 + step)) + 0.1
            found, kept = learned_update(mlp, [x], [g], kept, [told])
            x = learned_apply([x], found, lr=0.3, weight_decay=0.1)[0]
        return x.square().sum()

    assert torch.autograd.gradcheck(unrolled, (p, told, *weights), fast_mode=True)


def test_what_the_kernels_take_for_constant_is_not_differentiated_silently(learned, device):
    mlp = learned.network(device=device)
    (p,) = learned.drawn([(3, 4)], device)
    kept = learned_init([p])
    wanting = p.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="constants"):
        learned_update(mlp, [wanting], [p], kept, backend="triton")
    with pytest.raises(RuntimeError, match="constants"):
        learned_update(mlp, [p], [wanting], kept, backend="triton")
    mlp.momentum_offsets.requires_grad_()
    with pytest.raises(RuntimeError, match="constants"):
        learned_update(mlp, [p], [p], kept, backend="triton")
    with torch.no_grad():
        learned_update(mlp, [wanting], [p], kept, backend="triton")


def test_backward_pass_sees_when_a_parameter_was_written_in_between(learned, device):
    mlp = learned.network(device=device)
    (p,) = learned.drawn([(3, 4)], device)
    (update,), _ = learned_update(mlp, [p], [p.clone()], learned_init([p]), backend="triton")
    p.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        update.sum().backward()


def test_functions_write_into_nothing_they_are_given(learned, backend, device):
    mlp = learned.network(device=device)
    ps = learned.drawn(learned.kinds, device)
    gs = [learned.gradient(p, 0) for p in ps]
    _, kept = learned_update(mlp, ps, gs, learned_init(ps), backend=backend)
    before = [x.clone() for x in (*ps, *gs, *(x for one in kept for x in one))]
    found, _ = learned_update(mlp, ps, gs, kept, backend=backend)
    learned_apply(ps, found)
    after = [*ps, *gs, *(x for one in kept for x in one)]
    assert all(map(torch.equal, before, after))


def test_functional_steps_are_the_optimizers(learned, backend, device):
    from fusewright.optimizer.learned.learned_optimizer import LearnedOptimizer

    mlp = learned.network(device=device)
    xs = learned.drawn(learned.kinds, device)
    ps = [torch.nn.Parameter(x.clone()) for x in xs]
    optimizer = LearnedOptimizer(ps, mlp, lr=0.5, weight_decay=0.1, backend=backend)
    kept = learned_init(xs)
    for step in range(2):
        gs = [learned.gradient(x, step) for x in xs]
        found, kept = learned_update(mlp, xs, gs, kept, backend=backend)
        xs = learned_apply(xs, [u.detach() for u in found], lr=0.5, weight_decay=0.1)
        for p, g in zip(ps, gs, strict=True):
            p.grad = g
        optimizer.step()
    for p, x in zip(ps, xs, strict=True):
        assert_near([p.detach()], [x])


def test_steps_of_trees_are_learned_updates(learned, backend, device):
    mlp = learned.network(device=device)
    tree = dict(zip("abcde", learned.drawn(learned.kinds, device), strict=True))
    optimizer = FunctionalLearnedOptimizer(mlp, lr=0.5, weight_decay=0.1, backend=backend)
    gs = {name: learned.gradient(p, 0) for name, p in tree.items()}
    updates, state = optimizer.update(gs, optimizer.init(tree), tree)
    moved = optimizer.apply(tree, updates)
    xs = list(tree.values())
    found, kept = learned_update(mlp, xs, list(gs.values()), learned_init(xs), backend=backend)
    for x, y in zip(moved.values(), learned_apply(xs, found, 0.5, 0.1), strict=True):
        torch.testing.assert_close(x, y)
    for one, other in zip(state, kept, strict=True):
        assert all(map(torch.equal, one, other))


def test_gradients_of_the_network_compose_with_transforms(learned, device):
    mlp = learned.network(device=device)
    p = learned.drawn([(3, 4)], device)[0]
    given = learned.gradient(p, 0)
    weights = {name: x.detach() for name, x in mlp.named_parameters() if "offsets" not in name}

    def loss(weights, backend):
        some = [p], [given], learned_init([p])
        found, _ = torch.func.functional_call(mlp, weights, some, {"backend": backend})
        return found[0].square().sum()

    kernels, reference = (torch.func.grad(loss)(weights, b) for b in ("triton", "reference"))
    for name, x in reference.items():
        assert_near([kernels[name]], [x])


def test_unrolled_steps_compose_with_transforms(learned):
    """Through two steps, whose second gradient depends on the first step, by func.grad and vmap;
    against autograd.
    """
    mlp = learned.network().double()
    optimizer = FunctionalLearnedOptimizer(mlp, lr=0.5)
    starts = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    names, weights = zip(*mlp.named_parameters(), strict=True)

    def left(weights, start):
        def steps(start):
            p, state = {"p": start}, optimizer.init({"p": start})
            for _ in range(2):
                given = (p, {"p": torch.sin(p["p"])}, state)
                updates, state = updated(dict(zip(names, weights, strict=True)), *given)
                p = optimizer.apply(p, updates)
            return p["p"].square().sum()

        return steps(start)

    def updated(named, p, g, state):
        class Step(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.mlp = mlp

            def forward(self):
                return optimizer.update(g, state, p)

        named = {f"mlp.{name}": x for name, x in named.items()}
        return torch.func.functional_call(Step(), named, ())

    found = torch.func.vmap(torch.func.grad(left), (None, 0))(weights, starts)
    for place, start in enumerate(starts):
        lives = [x.detach().clone().requires_grad_() for x in weights]
        expected = torch.autograd.grad(left(lives, start), lives)
        for x, y in zip(found, expected, strict=True):
            assert_near([x[place]], [y])


def test_loaded_network_whose_weights_are_live_is_served_by_the_kernels(learned, device):
    mlp = trained_update_mlp().to(device)
    for x in mlp.weights():
        x.requires_grad_()
    (p,) = learned.drawn([(5, 7)], device)
    (update,), _ = learned_update(mlp, [p], [p.sin()], learned_init([p]), backend="triton")
    update.sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in mlp.weights())
    assert all(x.grad is None for x in mlp.offsets())


def test_nothing_of_a_call_waits_for_the_collector(learned, backend, device):
    (p,) = learned.drawn([(5, 7)], device)
    mlp = learned.network(device=device)
    gc.disable()
    try:
        (update,), (after,) = learned_update(
            mlp, [p], [p.sin()], learned_init([p]), backend=backend
        )
        seen = [weakref.ref(x) for x in (update, after.momenta, after.square)]
        del update, after
        assert not any(x() is not None for x in seen)
    finally:
        gc.enable()


def test_second_derivatives_of_the_kernels_are_refused(learned, device):
    mlp = learned.network(device=device)
    p = learned.drawn([(3, 4)], device)[0]
    (update,), _ = learned_update(mlp, [p], [p], learned_init([p]), backend="triton")
    (first,) = torch.autograd.grad(update.sum(), mlp.last.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(first.sum(), mlp.last.weight)


def test_bad_arguments_are_refused(learned, device):
    mlp = learned.network(extra=2, device=device)
    (p,) = learned.drawn([(3, 4)], device)
    kept = learned_init([p])
    with pytest.raises(ValueError, match="2 extra features, got none"):
        learned_update(mlp, [p], [p], kept)
    with pytest.raises(ValueError, match=r"extra features must be \[2\]"):
        learned_update(mlp, [p], [p], kept, [p.new_ones(3)])
    with pytest.raises(ValueError, match="gradients must be 1"):
        learned_update(mlp, [p], [], kept, [p.new_ones(2)])
    with pytest.raises(ValueError, match="statistics of a parameter"):
        learned_update(mlp, [p], [p], learned_init([p.t()[:2]]), [p.new_ones(2)])


def public_file(learned, path, **changes):
    """A file of the public format with weights of its own."""
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="the package safetensors is not installed"
    )
    mlp = learned.network()
    state = mlp.state_dict()
    found = {public: state[name].clone() for public, name in PUBLIC_NAMES.items()}
    found.update(changes)
    safetensors.save_file({k: x for k, x in found.items() if x is not None}, str(path))
    return mlp


def test_public_file_is_loaded_with_the_decays_that_go_with_it(learned, tmp_path):
    path = tmp_path / "model.safetensors"
    mlp = public_file(learned, path)
    loaded = load_update_mlp(path)
    assert all(map(torch.equal, loaded.weights(), mlp.weights()))
    assert loaded.step_mult == 0.01
    assert loaded.exp_mult == 0.001
    assert not any(x.requires_grad for x in loaded.parameters())
    for x, values in zip(loaded.offsets(), PUBLIC_OFFSETS.values(), strict=True):
        assert torch.equal(x, torch.tensor(values))
    # fp32 weights and the header, as the published file has it: 10096 bytes.
    assert sum(x.numel() for x in loaded.weights()) == 2402


def test_names_and_offsets_are_the_published_ones():
    assert PUBLIC_NAMES == {
        "network.input.weight": "first.weight",
        "network.input.bias": "first.bias",
        "network.linear_0.weight": "second.weight",
        "network.linear_0.bias": "second.bias",
        "network.output.weight": "last.weight",
        "network.output.bias": "last.bias",
    }
    assert PUBLIC_OFFSETS == {
        "momentum_offsets": (0.15216392, 0.14245212, 0.06812963),
        "square_offsets": (0.01079706,),
        "factored_offsets": (0.18621896, -0.10864615, -0.06185547),
    }


def test_file_that_is_no_safetensors_is_refused(tmp_path):
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    path = tmp_path / "model.safetensors"
    path.write_text("weights")
    with pytest.raises(ValueError, match="load_update_mlp wants a file in the format safetensors"):
        load_update_mlp(path)


def test_file_of_another_network_is_refused(learned, tmp_path):
    path = tmp_path / "model.safetensors"
    public_file(learned, path, **{"network.output.weight": torch.ones(3, 32)})
    with pytest.raises(ValueError, match=r"network.output.weight must have shape \[2, 32\]"):
        load_update_mlp(path)
    public_file(learned, path, **{"network.output.weight": None})
    with pytest.raises(ValueError, match="the file must have the weights"):
        load_update_mlp(path)


def test_missing_safetensors_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load_update_mlp(tmp_path / "model.safetensors")


def test_a_live_network_learns_to_descend(device):
    torch.manual_seed(0)
    mlp = UpdateMLP(step_mult=0.1).to(device)
    live = list(mlp.weights())
    meta = torch.optim.Adam(live, lr=0.01)

    def last_loss(steps):
        """After some steps on a quadratic, each of which the network sees as a constant."""
        x = torch.full((4, 3), 2.0, device=device)
        kept = learned_init([x])
        for _ in range(steps):
            given = [x.detach()], [2.0 * x.detach()], kept
            found, kept = learned_update(mlp, *given)
            x = learned_apply([x], found)[0]
        return x.square().mean()

    before = last_loss(5).item()
    for _ in range(15):
        meta.zero_grad()
        last_loss(5).backward()
        meta.step()
    assert last_loss(5).item() < 0.5 * before
