from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data import DATA_NAMES, make_sampler
from fusewright_models.training import RunFolder, Trainer, TrainingConfig, adamw, warmup_cosine
from fusewright_testkit import no_synchronisation

from .commands import metrics, untimed_metrics
from .steps import check_steps
from .trainers import assert_same_bits, assert_same_state, quiet_trainer

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = TrainingConfig(steps=12, batch_size=4, warmup_steps=2, log_every=2, evaluate_every=6)


@dataclass(frozen=True)
class Numbers:
    """A batch of the smallest source: eight tokens."""

    x: torch.Tensor
    tokens: int = 8


class Normal:
    """Vectors of two independent normal numbers."""

    def __init__(self, device: str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(0)

    def sample(self, batch: int) -> Numbers:
        draw = torch.randn(batch, 2, generator=self.generator, device=self.generator.device)
        return Numbers(draw)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def regression_loss(model: torch.nn.Module, batch: Numbers) -> torch.Tensor:
    return (model(batch.x) - batch.x.sum(-1, keepdim=True)).square().mean()


def linear_trainer(path, config=CONFIG, **options) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = adamw(model, lr=0.1, weight_decay=0.01)
    return quiet_trainer(path, model, Normal(), regression_loss, optimizer, config, **options)


def transformer_trainer(
    path,
    config=CONFIG,
    *,
    data="digits",
    ragged=False,
    device="cpu",
    dtype=torch.float32,
    **options,
) -> Trainer:
    torch.manual_seed(0)
    source = make_sampler(data, ragged=ragged, device=device)
    shape = TransformerNPConfig(
        x_width=source.x_width, width=16, layers=2, heads=2, feed_forward_width=21, components=3
    )
    model = TransformerNP(shape, **options).to(device, dtype)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.01)
    return quiet_trainer(path, model, source, negative_log_likelihood, optimizer, config)


def test_loop_trains_any_model(tmp_path):
    config = replace(CONFIG, steps=100, log_every=20, evaluate_every=100)
    trainer = linear_trainer(tmp_path, config)
    trainer.run()
    losses = [line["loss"] for line in trainer.folder.read_metrics()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]


# Of so many kinds of functions nothing is learned in so few steps.
@pytest.mark.sampled
@pytest.mark.parametrize("data", [name for name in DATA_NAMES if name != "prior"])
def test_loss_of_transformer_np_decreases(tmp_path, data):
    config = replace(CONFIG, steps=60, batch_size=16, log_every=20, evaluate_every=60)
    trainer = transformer_trainer(tmp_path, config, data=data)
    trainer.run()
    losses = [line["loss"] for line in trainer.folder.read_metrics()]
    assert losses == sorted(losses, reverse=True)


def test_metrics_hold_mean_loss_rate_and_evaluations(tmp_path, monkeypatch):
    # With its picture.
    monkeypatch.undo()
    seen = []
    trainer = linear_trainer(tmp_path, evaluate=lambda: {"score_log_likelihood": float(len(seen))})
    plain = trainer.stepper.loss_function

    def recorded(model, batch):
        loss = plain(model, batch)
        seen.append(float(loss.detach()))
        return loss

    trainer.stepper.loss_function = recorded
    trainer.run()
    lines = metrics(tmp_path)
    evaluations = [line for line in untimed_metrics(tmp_path) if "loss" not in line]
    training = [line for line in lines if "loss" in line]
    assert evaluations == [{"step": s, "score_log_likelihood": float(s)} for s in (0, 6, 12)]
    assert [line["step"] for line in training] == [2, 4, 6, 8, 10, 12]
    for index, line in enumerate(training):
        # As the loop adds them, in fp32.
        assert line["loss"] == float(torch.tensor(seen[2 * index : 2 * index + 2]).sum() / 2)
        assert line["lr"] == 0.1 * warmup_cosine(line["step"] - 1, steps=12, warmup_steps=2)
        assert line["gradient_norm"] > 0.0
        assert line["tokens_per_second"] > 0.0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("make", [linear_trainer, transformer_trainer], ids=["linear", "np"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path, make):
    whole = make(tmp_path / "whole")
    whole.run()
    # Stopped two steps after its checkpoint: those are taken again.
    make(tmp_path / "parts").run(until=8)
    rest = make(tmp_path / "parts")
    rest.resume()
    assert rest.step == 6
    rest.run()

    assert_same_bits(whole, rest)
    assert_same_state(whole, rest)


class Dealt:
    """The rows of one table, dealt out in order."""

    def __init__(self) -> None:
        self.table = torch.randn(96, 2, generator=torch.Generator().manual_seed(0)).double()
        self.dealt = 0

    def sample(self, batch: int) -> Numbers:
        rows = self.table[self.dealt : self.dealt + batch]
        self.dealt += batch
        return Numbers(rows, tokens=batch)

    def state_dict(self):
        return {"dealt": self.dealt}

    def load_state_dict(self, state):
        self.dealt = state["dealt"]


def dealt_trainer(path, **changes) -> Trainer:
    trainer = linear_trainer(path, replace(CONFIG, **changes))
    trainer.source = Dealt()
    trainer.model.double()
    return trainer


def test_accumulated_batches_train_as_one_batch_of_all_their_rows(
    tmp_path, assert_same_but_for_rounding
):
    """Every step from equal weights."""
    one = dealt_trainer(tmp_path / "one", batch_size=8)
    parts = dealt_trainer(tmp_path / "parts", batch_size=2, accumulation_steps=4)
    for step in range(1, CONFIG.steps + 1):
        for trainer in (one, parts):
            trainer.run(until=step)
            assert trainer.source.dealt == 8 * step
        assert_same_but_for_rounding([parts.model.weight], [one.model.weight])
        parts.model.load_state_dict(one.model.state_dict())
    losses = [[line["loss"] for line in trainer.folder.read_metrics()] for trainer in (one, parts)]
    # Logged in fp32.
    assert losses[1] == pytest.approx(losses[0], rel=4 * torch.finfo(torch.float32).eps)


def test_tokens_per_second_count_every_accumulated_batch(tmp_path):
    trainer = dealt_trainer(tmp_path, batch_size=2, accumulation_steps=4)
    counted = []
    log = trainer._log
    trainer._log = lambda: (counted.append(trainer.clock.tokens), log())[1]
    trainer.run()
    assert counted == [2 * 4 * CONFIG.log_every] * 6


def test_observer_is_shown_the_lines_that_the_folder_keeps(tmp_path):
    lines = []
    trainer = linear_trainer(tmp_path, evaluate=lambda: {"score": 1.0}, observe=lines.append)
    trainer.run()
    assert len(lines) == 9
    assert lines == trainer.folder.read_metrics()


def test_run_until_then_run_equals_one_run(tmp_path):
    whole, parts = linear_trainer(tmp_path / "whole"), linear_trainer(tmp_path / "parts")
    whole.run()
    parts.run(until=5)
    parts.run()
    assert torch.equal(whole.model.weight, parts.model.weight)


def test_non_finite_loss_stops_at_the_log_point_and_keeps_the_checkpoint(tmp_path):
    trainer = linear_trainer(tmp_path)
    trainer.run(until=6)
    sound = RunFolder(tmp_path).load_checkpoint()["model"]["weight"]
    plain = trainer.stepper.loss_function
    trainer.stepper.loss_function = lambda model, batch: plain(model, batch) * float("nan")
    with pytest.raises(FloatingPointError, match="steps 7 to 8: not finite"):
        trainer.run()
    assert torch.equal(RunFolder(tmp_path).load_checkpoint()["model"]["weight"], sound)
    assert [line["step"] for line in trainer.folder.read_metrics()] == [2, 4, 6]


def test_gradients_longer_than_the_limit_are_cut_to_it(tmp_path):
    limit = 1e-3
    trainer = linear_trainer(tmp_path, replace(CONFIG, clip_norm=limit))
    norms = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (norms.append(trainer.model.weight.grad.norm()), step())
    trainer.run(until=3)
    # The divisor is the norm plus 1e-6, as in torch.
    assert all(0.999 * limit <= norm <= limit for norm in norms)


def test_gains_do_not_decay():
    model = torch.nn.LayerNorm(4, bias=False)
    decays = {
        parameter.ndim: group["weight_decay"]
        for group in adamw(
            torch.nn.Sequential(model, torch.nn.Linear(4, 2)), lr=1.0, weight_decay=0.1
        ).param_groups
        for parameter in group["params"]
    }
    assert decays == {1: 0.0, 2: 0.1}


def test_rate_rises_linearly_then_falls_as_a_cosine():
    factors = [warmup_cosine(step, steps=14, warmup_steps=4) for step in range(14)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    for step in range(4, 14):
        assert factors[step] == 0.5 * (1.0 + math.cos(math.pi * (step - 4) / 10))
    assert warmup_cosine(14, steps=14, warmup_steps=4) == 0.0
    assert warmup_cosine(0, steps=1, warmup_steps=0) == 1.0


@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
@pytest.mark.parametrize("data", DATA_NAMES)
def test_steps_between_log_points_read_nothing_on_the_host(tmp_path, host_reads, data, ragged):
    config = replace(CONFIG, steps=100, log_every=50, evaluate_every=50)
    trainer = transformer_trainer(tmp_path, config, data=data, ragged=ragged)
    with host_reads as reads:
        trainer.run(until=3)
    assert reads.count == 0
    with reads:
        torch.ones(()).item()
    assert reads.count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
@pytest.mark.parametrize("data", DATA_NAMES)
def test_steps_on_the_gpu_do_not_synchronise(tmp_path, data, ragged, precision):
    config = replace(CONFIG, steps=100, log_every=50, evaluate_every=50, precision=precision)
    # A capture waits for the device; replays are looked at in test_captured_gpu.
    config = replace(config, capture=False)
    trainer = transformer_trainer(tmp_path, config, data=data, ragged=ragged, device="cuda")
    trainer.run(until=3)
    with no_synchronisation():
        trainer.run(until=20)
    trainer.run()
    losses = [line["loss"] for line in trainer.folder.read_metrics()]
    assert data == "prior" or losses[1] < losses[0]


@pytest.mark.gpu
def test_resumed_run_on_the_gpu_equals_uninterrupted_run(tmp_path):
    whole = transformer_trainer(tmp_path / "whole", device="cuda")
    whole.run()
    transformer_trainer(tmp_path / "parts", device="cuda").run(until=8)
    rest = transformer_trainer(tmp_path / "parts", device="cuda")
    rest.resume()
    rest.run()
    assert_same_bits(whole, rest)


@pytest.mark.slow
def test_steps_of_a_compiled_training_follow_eager_ones(tmp_path):
    eager = transformer_trainer(tmp_path / "eager")
    compiled = transformer_trainer(tmp_path / "compiled", replace(CONFIG, compile=True))
    batches = [eager.source.sample(4) for _ in range(11)]

    def loss_of(model, step):
        trainer = compiled if model is compiled.model else eager
        return trainer.stepper.loss_function(model, batches[step])

    check_steps(compiled.model, eager.model, loss_of, (0, 1, 10), steps=11)
    compiled.run()
    losses = [line["loss"] for line in compiled.folder.read_metrics()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1; got 0"),
        ("batch_size", 0, "batch_size must be at least 1; got 0"),
        ("accumulation_steps", 0, "accumulation_steps must be at least 1; got 0"),
        ("warmup_steps", 13, "warmup_steps must be 0 to 12; got 13"),
        ("clip_norm", 0.0, "clip_norm must be positive; got 0.0"),
        ("clip_norm", math.nan, "clip_norm must be positive; got nan"),
        ("precision", "fp16", "precision must be one of .*; got 'fp16'"),
    ],
)
def test_impossible_choices_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **{field: value})


def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of a run with a checkpoint; got"):
        linear_trainer(tmp_path).resume()
