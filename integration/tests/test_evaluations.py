"""Evaluations take no more than their share of a run, and say what they have read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli.hybrid import HybridRun
from fusewright_models.cli.presets import HYBRID_PRESETS, TITAN_MAC_PRESETS, TRANSFORMER_NP
from fusewright_models.cli.text import HeldOutText
from fusewright_models.cli.titan_mac import TitanMACRun
from fusewright_models.cli.transformer_np import TransformerNPRun
from fusewright_models.data import Evaluator, make_sampler
from fusewright_models.text import (
    ByteModel,
    ByteTokenizer,
    evaluate_text,
    read_corpus,
)
from fusewright_models.training import TrainingConfig
from fusewright_models.training.evaluations import EVALUATIONS, part_size
from fusewright_models.training.processes import Processes

from .commands import invoke, metrics
from .trainers import tiny

pytestmark = pytest.mark.usefixtures("without_pictures", "short_samples")
CONFIG = TrainingConfig(steps=100, batch_size=4, evaluate_every=30)
SHARE = 0.03
TIMES = "seconds", "evaluation_seconds"
OF_EACH = [
    *((TransformerNPRun, name) for name in TRANSFORMER_NP),
    *((TitanMACRun, name) for name in TITAN_MAC_PRESETS),
    *((HybridRun, name) for name in HYBRID_PRESETS),
]


@pytest.mark.parametrize(
    ("kind", "name"), OF_EACH, ids=[f"{kind.model_name}-{name}" for kind, name in OF_EACH]
)
def test_evaluations_of_every_preset_are_three_hundredths_of_the_run_at_most(kind, name):
    run, preset = kind.from_flags({"preset": name, "device": "cpu"}), kind.presets[name]
    trained = run.steps * run.batch_size * run.gradient_accumulation_steps
    if kind is TransformerNPRun:
        whole = preset.evaluation_tasks
        part = run.part_tasks(preset)
    else:
        # Of a text of bytes, which has the most tokens.
        whole, trained = preset.held_out_bytes - 1, trained * run.seq_len
        part = run.part_tokens(whole)
    read = whole + math.ceil(run.steps / run.eval_every) * part
    assert read <= SHARE * (read + EVALUATIONS * trained)
    assert 0 < part <= whole


@pytest.mark.parametrize("share", [0.01, 0.03, 0.2, 0.9])
@pytest.mark.parametrize("every", [1, 30, 50, 100, 1000])
def test_part_is_the_most_that_the_share_allows(share, every):
    config = replace(CONFIG, evaluate_every=every)
    part = part_size(config, share=share, trained=40, whole=90, each=2)
    times = 1 + len([step for step in range(1, 100) if step % every == 0])
    allowed = share / (1.0 - share) * EVALUATIONS * 40 * 100
    fits = {size for size in range(2, 91, 2) if 90 + times * size <= allowed}
    assert part == max(fits, default=2)


def test_last_evaluation_reads_everything_and_those_before_it_a_part(tmp_path, text):
    flags = ["--preset", "tiny", "--dataset", text, "--batch-size", "2", "--seq-len", "16"]
    flags += ["--steps", "3", "--eval-every", "2", "--log-every", "3"]
    result = invoke(app, "titan-mac", *flags, "--out", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    lines = [line for line in metrics(tmp_path / "parts") if "held_out_tokens" in line]
    assert [line["step"] for line in lines] == [0, 2, 3]
    read = [line["held_out_tokens"] for line in lines]
    assert read[0] == read[1] == 16 < read[2]
    assert all(line["evaluation_seconds"] > 0.0 for line in lines)

    asked = invoke(app, "titan-mac", *flags, "--eval-share", "1", "--out", tmp_path / "whole")
    assert asked.exit_code == 0, asked.output
    whole = [line for line in metrics(tmp_path / "whole") if "held_out_tokens" in line]
    assert [line["held_out_tokens"] for line in whole] == [read[2]] * 3
    names = ("held_out_bits_per_byte", "order_2_bits_per_byte")
    assert [whole[-1][name] for name in names] == [lines[-1][name] for name in names]


def test_evaluations_tell_their_share_of_the_seconds_so_far(tmp_path):
    flags = ["--preset", "tiny", "--steps", "2", "--eval-every", "1", "--out", tmp_path]
    assert invoke(app, "transformer-np", *flags).exit_code == 0
    # Those before the run was taken up count.
    assert invoke(app, "transformer-np", "--resume", tmp_path, "--steps", "4").exit_code == 0
    lines = metrics(tmp_path)
    shares = [place for place, line in enumerate(lines) if "evaluation_share" in line]
    assert [lines[place]["step"] for place in shares] == [0, 1, 2, 3, 4]
    for place in shares:
        seconds, evaluating = (
            sum(line.get(name, 0.0) for line in lines[: place + 1]) for name in TIMES
        )
        expected = evaluating / (seconds + evaluating)
        assert lines[place]["evaluation_share"] == pytest.approx(expected)
    # At first there are no others.
    assert lines[0]["evaluation_share"] == 1.0


def test_part_of_a_text_is_scored_as_a_text_that_ends_there():
    sizes = {"most_tokens": 2**20, "held_out_bytes": 400}
    corpus = read_corpus([b"".join(b"%d\n" % n for n in range(999))], ByteTokenizer(), **sizes)
    order_2, (model, *_) = ByteModel(corpus.training_text), tiny("titan-mac")
    flags = {"preset": "tiny", "device": "cpu", "seq_len": 16, "batch_size": 2}
    run = TitanMACRun.from_flags(flags)
    assert corpus.beginning(len(corpus.held_out) - 1) is corpus
    part = corpus.beginning(40)
    assert (len(part.held_out), part.held_out_ends.tolist()) == (41, [41])
    found = HeldOutText(run, part, order_2).score(model.eval())
    expected = evaluate_text(model, corpus.held_out[:41], length=16, batch_size=2, text_bytes=40)
    assert found["held_out_bits_per_byte"] == expected.bits_per_byte
    assert found["held_out_tokens"] == 40
    assert found["order_2_bits_per_byte"] == order_2.bits_per_byte(corpus.held_out_text[:40])


class Third(Processes):
    """One of three processes, the others of which are asked for what they add."""

    def __init__(self, rank, others):
        super().__init__()
        self.rank, self.count, self.others = rank, 3, others

    def add_(self, x):
        return sum(self.others, x) if self.rank == 0 else self.others.append(x) or x


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_processes_score_what_one_scores_and_call_the_model_as_often(batches):
    sampler = make_sampler("digits", held_out=True, seed=3)
    model, *_ = tiny("transformer-np")
    model.eval().double()
    calls = []
    model.register_forward_hook(lambda *given: calls.append(rank))
    rank, others = 0, []
    alone = Evaluator(sampler, batch_size=2).score(model, batches)
    calls.clear()
    for rank in (2, 1, 0):
        shared = Evaluator(sampler, batch_size=2, processes=Third(rank, others))
        together = shared.score(model, batches)
    assert together == alone
    assert [calls.count(rank) for rank in range(3)] == [-(-batches // 3)] * 3


@pytest.mark.parametrize("length", [9, 40, 100, 300])
def test_processes_score_the_text_that_one_scores(length):
    stream = torch.randint(97, 105, (101,))
    model, *_ = tiny("titan-mac")
    model.eval().double()
    sizes = {"length": length, "batch_size": 2, "text_bytes": 100}
    others = []
    alone = evaluate_text(model, stream, **sizes)
    for rank in (2, 1, 0):
        together = evaluate_text(model, stream, **sizes, processes=Third(rank, others))
    # Three sums of up to six terms.
    bound = 16 * torch.finfo(torch.float64).eps * abs(alone.log_likelihood)
    assert abs(together.log_likelihood - alone.log_likelihood) <= bound
