"""Key-value recall: the task, its score, and that the memory earns its place."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.studies import recall
from fusewright_models.studies.recall import RecallPoint, RecallTraining, draw, train_recall
from fusewright_models.studies.results import read, write
from fusewright_models.text.recall import IGNORED, KeyValueRecall, recall_accuracy

from .commands import invoke, rows_of


def test_every_pair_is_said_once_and_asked_for_once():
    task = KeyValueRecall(pairs=5, gap=7, keys=9, values=4, noise=3, seed=2)
    batch = task.sample(50)
    assert batch.windows.shape == (50, 23)
    assert batch.targets.shape == (50, 22)
    assert batch.tokens == 50 * 22
    said, gap, asked, _ = batch.windows.split([10, 7, 5, 1], dim=1)
    ignored, answers = batch.targets.split([17, 5], dim=1)
    assert set(gap.flatten().tolist()) == {13, 14, 15}
    assert ignored.eq(IGNORED).all()
    for row in range(50):
        pairs = [tuple(pair) for pair in said[row].reshape(5, 2).tolist()]
        questions = zip(asked[row].tolist(), answers[row].tolist(), strict=True)
        assert sorted(pairs) == sorted(questions)
        assert len({key for key, _ in pairs}) == 5
        assert all(0 <= key < 9 <= value < 13 for key, value in pairs)
    orders = {(tuple(said[row, ::2].tolist()), tuple(asked[row].tolist())) for row in range(50)}
    assert len(orders) == 50


def test_answers_are_shown_nowhere_after_the_pairs():
    task = KeyValueRecall(pairs=3, gap=4)
    read = task.sample(100).windows[:, :-1]
    values = (read >= task.keys) & (read < task.keys + task.values)
    assert values.sum(1).tolist() == [3] * 100
    assert values[:, 1:6:2].all()


def test_every_key_value_and_order_is_drawn():
    task = KeyValueRecall(pairs=2, gap=0, keys=3, values=2)
    rows = {tuple(row) for row in task.sample(2000).windows.tolist()}
    # Six pairs of keys, four of values, two orders; the last token says no more.
    assert len(rows) == 6 * 4 * 2


def test_batches_depend_on_seed_and_number_alone():
    one, other = (KeyValueRecall(pairs=4, gap=2, seed=1) for _ in range(2))
    one.sample(3)
    second = one.sample(3).windows
    other.load_state_dict({"batches": 1})
    assert torch.equal(other.sample(3).windows, second)
    assert not torch.equal(KeyValueRecall(pairs=4, gap=2, seed=2).sample(3).windows, second)


class Knowing:
    """Reads the answers from the row, all but every ``wrong``-th question's."""

    def __init__(self, task: KeyValueRecall, wrong: int) -> None:
        self.task, self.wrong = task, wrong

    def __call__(self, tokens, state=None):
        said = tokens[:, : 2 * self.task.pairs].reshape(len(tokens), -1, 2)
        hidden = torch.zeros(*tokens.shape, self.task.vocab_size)
        for row, text in enumerate(tokens.tolist()):
            values = dict(said[row].tolist())
            for place, token in enumerate(text):
                hidden[row, place, values.get(token, 0)] = 1.0
        if self.wrong:
            asked = 2 * self.task.pairs + self.task.gap
            hidden[:, asked :: self.wrong] = 0.0
        return hidden, None

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize(("wrong", "accuracy"), [(0, 1.0), (1, 0.0), (2, 0.5), (4, 0.75)])
def test_accuracy_is_the_share_of_questions_answered(wrong, accuracy):
    task = KeyValueRecall(pairs=4, gap=3, keys=8, values=5)
    assert recall_accuracy(Knowing(task, wrong), task, batches=2, batch_size=6) == accuracy


def test_score_is_of_the_same_rows_every_time():
    class Random:
        """Any function of the tokens: another row, another answer."""

        def __call__(self, tokens, state=None):
            seed = torch.Generator().manual_seed(int(tokens.sum()))
            return torch.rand(*tokens.shape, 112, generator=seed), None

        def logits(self, hidden):
            return hidden

    task = KeyValueRecall(pairs=4, gap=3, seed=5)
    task.sample(7)
    first = recall_accuracy(Random(), task, batches=20, batch_size=6)
    assert first == recall_accuracy(Random(), task, batches=20, batch_size=6)
    assert 0.0 < first < 0.2


@pytest.mark.parametrize(
    "numbers",
    [
        {"pairs": 0, "gap": 1},
        {"pairs": 2, "gap": -1},
        {"pairs": 5, "gap": 0, "keys": 4},
        {"pairs": 2, "gap": 0, "values": 1},
        {"pairs": 2, "gap": 1, "noise": 0},
    ],
    ids=lambda numbers: " ".join(map(str, numbers.items())),
)
def test_impossible_tasks_are_refused(numbers):
    with pytest.raises(ValueError, match=r"wanted a pair or more, keys as many as pairs"):
        KeyValueRecall(**numbers)


def test_questions_are_further_from_their_pairs_than_attention_reaches():
    """All of them in other segments of "mac", by a whole one in between."""
    segment = recall.SHAPE.segment
    last_pair, first_question = 2 * recall.PAIRS - 1, 2 * recall.PAIRS + recall.GAP
    assert first_question // segment - last_pair // segment > 1


def test_results_are_a_table_and_a_picture(tmp_path):
    points = [
        RecallPoint(variant, memory, 0, step, 0.25 * step, 0.0625)
        for variant in ("mac", "lmm")
        for memory in (True, False)
        for step in (0, 2)
    ]
    file = tmp_path / "made" / "recall-cpu.csv"
    write(points, file, draw, number=".4f")
    rows = rows_of(file.parent)
    assert len(rows) == 8
    assert rows[1] == {
        "variant": "mac",
        "memory": "True",
        "seed": "0",
        "step": "2",
        "accuracy": "0.5000",
        "chance": "0.0625",
    }
    assert read(RecallPoint, file) == points
    picture = file.with_suffix(".png")
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    write(points, file, draw, number=".4f")
    assert picture.read_bytes() == first


def test_command_trains_with_and_without_memory(tmp_path):
    flags = ["--variant", "lmm", "--steps", "2", "--eval-every", "1", "--batch-size", "2"]
    result = invoke(recall.main, *flags, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("recall-cpu-*.csv")
    rows = [(row["variant"], row["memory"], row["step"]) for row in rows_of(tmp_path)]
    assert rows == [("lmm", memory, step) for memory in ("True", "False") for step in "012"]
    assert file.with_suffix(".png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mac", "lmm"])
def test_memory_recalls_what_attention_cannot_reach(variant):
    with_memory, without = (
        train_recall(variant, memory=memory, training=RecallTraining())[-1]
        for memory in (True, False)
    )
    assert with_memory.accuracy >= 0.9
    assert without.accuracy <= 2.0 * without.chance
