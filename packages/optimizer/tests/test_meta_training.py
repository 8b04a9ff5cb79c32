"""Meta-training of the learned optimizer's network, and the network that comes from it."""

from __future__ import annotations

import csv
import importlib.util
import pathlib
import sys

import pytest
import torch
from fusewright.optimizer import (
    FunctionalLearnedOptimizer,
    LearnedOptimizer,
    UpdateMLP,
    trained_update_mlp,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .compared import assert_near

# fp32 sums of fewer than 2^6 terms, in two orders.
ROUNDINGS = 2**6 * torch.finfo(torch.float32).eps


def load(folder: pathlib.Path) -> None:
    """Make the folder importable by its name, as for who runs it there."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(folder.name, init)
    sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[folder.name])


load(pathlib.Path(__file__).parents[1] / "meta_training")
command = importlib.import_module("meta_training.__main__")
held_out = importlib.import_module("meta_training.held_out")
runs_of = importlib.import_module("meta_training.runs")
tasks = importlib.import_module("meta_training.tasks")
training = importlib.import_module("meta_training.training")
Pairs, Settings = training.Pairs, training.Settings
MetaTraining = training.MetaTraining

CPU = torch.device("cpu")
ALL = [*tasks.training_tasks(), *tasks.held_out_tasks()]
SMALL = [tasks.Regression((6, 3), batch_size=16), tasks.Classification((4, 3), batch_size=16)]


def flat(mlp: UpdateMLP) -> torch.Tensor:
    return nn.utils.parameters_to_vector(mlp.parameters()).detach()


@pytest.mark.sampled
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name.replace(" ", "-"))
def test_task_is_learned_by_adamw(task):
    torch.manual_seed(0)
    runs = runs_of.Runs(task, runs_of.AdamWSteps(torch.full((3,), 0.02)), 3, 1, CPU)
    for _ in range(30):
        runs.step()
    assert runs.ratio.log().mean() < -0.1


def test_tasks_that_judge_are_others_than_those_that_train():
    names = [task.name for task in ALL]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_runs_are_those_of_the_functional_optimizer(learned, task):
    """Each with the weights of its own, on the same batches, every step from equal parameters."""
    networks = [learned.network(), trained_update_mlp()]
    multipliers = dict(exp_mult=networks[0].exp_mult, step_mult=networks[0].step_mult)
    weights = torch.stack([flat(mlp) for mlp in networks])
    torch.manual_seed(1)
    runs = runs_of.Runs(task, runs_of.LearnedSteps(UpdateMLP(**multipliers), weights), 1, 2, CPU)
    problems, _, unit, gain = runs._drawn
    for mlp in networks:
        mlp.exp_mult, mlp.step_mult = multipliers.values()
    optimizers = [FunctionalLearnedOptimizer(mlp) for mlp in networks]
    starts = [[x[place].clone() for x in runs._params] for place in (0, 1)]
    states = [optimizer.init(p) for optimizer, p in zip(optimizers, starts, strict=True)]
    losses = [[], []]
    for _ in range(3):
        starts = [[x[place].clone() for x in runs._params] for place in (0, 1)]
        before = torch.get_rng_state()
        runs.step()
        after = torch.get_rng_state()
        for place, optimizer in enumerate(optimizers):
            torch.set_rng_state(before)
            batch = tuple(x[0] for x in task.batch(problems))
            given = [p.requires_grad_() for p in starts[place]]
            loss = gain[0] * task.loss([unit[0] * p for p in given], batch)
            losses[place].append(loss.item())
            gradients = torch.autograd.grad(loss, given)
            with torch.no_grad():
                updates, states[place] = optimizer.update(gradients, states[place], given)
                params = optimizer.apply(given, updates)
            for p, found in zip(params, runs._params, strict=True):
                assert_near([found[place]], [p.detach()])
        torch.set_rng_state(after)
    for place, some in enumerate(losses):
        assert runs.ratio[place, 0].item() == pytest.approx(some[-1] / some[0], rel=ROUNDINGS)


def pairs_of(settings: Settings) -> tuple[Pairs, torch.Tensor]:
    mlp = UpdateMLP()
    learned = torch.ones_like(flat(mlp))
    return Pairs(SMALL[0], mlp, learned, settings, CPU), flat(mlp)


def test_gradient_is_that_of_a_plane():
    settings = Settings(pairs=3, steps=4)
    pairs, weights = pairs_of(settings)
    torch.manual_seed(2)
    pairs.prepare(weights)
    plane = torch.randn_like(weights)
    # What the losses would have counted, had each been the plane's height at its weights.
    pairs.runs.total.copy_((pairs.weights @ plane).view(2, 3) * settings.steps)
    found, mean = pairs.gradient()
    noise = pairs.noise.double()
    expected = noise.mT @ (noise @ plane.double()) / (settings.sigma**2 * 3)
    # The heights are sums of products whose roundings are as often up as down.
    off = 8 * torch.finfo(torch.float32).eps * (weights * plane).norm().item()
    bound = off * noise.abs().sum(0) / (settings.sigma**2 * 3)
    assert ((found.double() - expected).abs() <= bound).all()
    assert abs(mean.item() - (weights @ plane).item()) <= off


def test_noise_stays_until_its_training_ends():
    pairs, weights = pairs_of(Settings(pairs=4, steps=1, horizon=20))
    torch.manual_seed(3)
    pairs.prepare(weights)
    for _ in range(3):
        pairs.length.copy_(torch.tensor([1.0, 9.0, 9.0, 1.0]))
        noise, params = pairs.noise.clone(), [x.clone() for x in pairs.runs._params]
        pairs.runs.step()
        moved = [x.clone() for x in pairs.runs._params]
        pairs.prepare(weights)
        assert (pairs.noise == noise).all(-1).tolist() == [False, True, True, False]
        assert pairs.runs.age[0] == pairs.runs.age[3] == 0 < pairs.runs.age[1]
        for x, y, start in zip(pairs.runs._params, moved, params, strict=True):
            # Both networks of a pair begin where the problem does.
            torch.testing.assert_close(x[0], x[4], rtol=0.0, atol=0.0)
            torch.testing.assert_close(x[[1, 2, 5, 6]], y[[1, 2, 5, 6]], rtol=0.0, atol=0.0)
            assert not torch.equal(x[1], start[1])
        plus, minus = pairs.weights.chunk(2)
        torch.testing.assert_close((plus + minus) / 2, weights.expand(4, -1))


class Crossings(TorchDispatchMode):
    """Which operations have results on another device than what they are made from."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        of_all = [x.device for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        # Sums with a number that the host knows are none: kernels take it as an argument.
        arithmetic = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
        if len(set(of_all)) > 1 and function not in arithmetic:
            self.found.add(str(function))
        return result


@pytest.mark.sampled
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name.replace(" ", "-"))
def test_step_is_of_the_device_alone(task):
    """On the device without contents, where whatever asks for a number raises."""
    device = torch.device("meta")
    mlp = UpdateMLP().to(device)
    weights = torch.empty(4, flat(mlp).numel(), device=device)
    for stepper in (runs_of.LearnedSteps(mlp, weights), runs_of.AdamWSteps(weights[:, 0])):
        runs = runs_of.Runs(task, stepper, 2, 2, device)
        with Crossings() as crossings:
            runs.step()
        assert crossings.found == set()


def test_what_diverged_counts_as_the_highest_loss():
    found = runs_of.counted(torch.tensor([0.0, 1.0, 1e9, float("inf"), float("nan")]))
    low, high = runs_of.LOWEST, runs_of.HIGHEST + runs_of.LOWEST
    expected = torch.tensor([low, 1 + low, high, high, high]).log()
    torch.testing.assert_close(found, expected)


TINY = Settings(pairs=8, steps=4, horizon=40, lr=0.02, averaged=3.0)


def test_meta_training_lowers_losses_and_writes_what_it_has(tmp_path):
    path = tmp_path / "weights.pt"
    rows = training.run(
        path, TINY, CPU, updates=40, every=40, problems=8, held_out_steps=40,
        training=SMALL, held_out=[tasks.Regression((5, 2)), tasks.Classification((6, 5))],
    )  # fmt: skip
    learned = [row for row in rows if row.optimizer == "learned"]
    first, last = ({r.task: r for r in learned if r.update == n} for n in (0, 40))
    for name, row in first.items():
        assert row.mean_loss > 0.9
        assert last[name].last_loss < 0.7 * row.last_loss
    with path.with_suffix(".csv").open() as file:
        told = list(csv.DictReader(file))
    assert [line["task"] for line in told] == [row.task for row in rows]
    rates = {f"AdamW lr={rate:g}" for rate in held_out.RATES}
    assert {line["optimizer"] for line in told} == {"learned", *rates}
    kept = torch.load(path, weights_only=True)
    mlp = UpdateMLP()
    mlp.load_state_dict(kept["weights"])
    # Scales of over a third of 40 steps.
    assert mlp.first.weight[:, 28:31].any(0).all()
    assert not mlp.first.weight[:, 31:39].any()


def trained_flat(device: torch.device) -> torch.Tensor:
    meta = MetaTraining(SMALL, TINY._replace(seed=5), device)
    torch.stack([meta.update() for _ in range(3)])
    return meta.flat


def test_meta_training_has_the_same_bits_twice():
    assert torch.equal(trained_flat(CPU), trained_flat(CPU))


@pytest.mark.gpu
def test_meta_training_has_the_same_bits_twice_on_a_gpu():
    found = [trained_flat(torch.device("cuda")) for _ in range(2)]
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_trials_change_nothing_of_the_training():
    def after(trials: bool) -> torch.Tensor:
        meta = MetaTraining(SMALL, TINY, CPU)
        trial = held_out.LearnedHeldOut(SMALL, meta.mlp, 2, 10, CPU, 1)
        rows = []
        for _ in range(2):
            meta.update()
            if trials:
                rows = [trial.rows(0, meta.flat) for _ in range(2)]
        # And are the same twice.
        assert not trials or rows[0] == rows[1]
        return meta.flat

    assert torch.equal(after(False), after(True))


def test_command_trains_all_tasks(tmp_path):
    path = tmp_path / "folder" / "weights.pt"
    given = "--device cpu --updates 1 --pairs 1 --steps 1 --horizon 20 --problems 1"
    assert command.main([*given.split(), "--held-out-steps", "2", "--out", str(path)]) == 0
    assert path.is_file()
    assert path.with_suffix(".csv").is_file()
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out weights.csv", "--out must not end in .csv"),
        ("--out weights.pt --every 0", "--every must be at least 1; got 0"),
    ],
    ids=["out", "every"],
)
def test_flags_that_cannot_be_served_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        command.main(flags.split())
    assert message in capsys.readouterr().err


class Problem:
    """A model, and the loss of batches that never repeat."""

    def __init__(self, kind: str) -> None:
        self.kind, self.drawn = kind, torch.Generator().manual_seed(11)
        torch.manual_seed(12)
        self.model = {
            "digits": lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
            "curve": lambda: nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2)),
            "images": lambda: nn.Sequential(
                nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 10)
            ),
        }[kind]()
        self.patterns = self.normal(10, 64)
        self.map = self.normal(4, 2)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.drawn)

    def loss(self) -> torch.Tensor:
        if self.kind == "curve":
            x = self.normal(64, 4)
            return (self.model(x) - torch.sin(x @ self.map)).square().mean()
        labels = torch.randint(10, (64,), generator=self.drawn)
        x = self.patterns[labels] + 1.5 * self.normal(64, 64)
        x = x.unflatten(1, (1, 8, 8)) if self.kind == "images" else x
        return nn.functional.cross_entropy(self.model(x), labels)

    def train(self, steps: int) -> torch.Tensor:
        optimizer = LearnedOptimizer(self.model.parameters(), trained_update_mlp())
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)


KINDS = ("digits", "curve", "images")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_trained_network_trains_what_it_never_saw(kind):
    losses = Problem(kind).train(150)
    assert losses[-30:].mean() < 0.25 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_times_the_longest_training_does_not_blow_up(kind):
    losses = Problem(kind).train(10 * Settings().horizon)
    # In the mean of every hundred steps, so that no batch decides.
    later = losses.view(-1, 100).mean(1)[Settings().horizon // 100 :]
    assert later.max() < 0.1 * losses[0]


def test_trained_network_makes_the_same_bits_twice():
    assert torch.equal(Problem("curve").train(20), Problem("curve").train(20))


def test_trained_network_is_frozen_and_a_new_one_at_every_call():
    first, second = trained_update_mlp(), trained_update_mlp()
    assert not any(p.requires_grad for p in first.parameters())
    assert {p.device.type for p in first.parameters()} == {"cpu"}
    nn.init.zeros_(first.first.weight)
    assert second.first.weight.any()
