"""lm-eval gets the scores of our models on tasks that lie in files; nothing is downloaded."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fusewright_models import HYBRID, TITAN_MAC, HybridLM, TitanMAC
from fusewright_models.evaluation import Scorer, load_scorer
from fusewright_models.evaluation import __main__ as program
from fusewright_models.text import ByteTokenizer

LIMIT = 2**10 * torch.finfo(torch.float64).eps
lm_eval_is_there = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="the extra 'eval' is not installed"
)

ROWS = [
    {"question": "one", "choices": ["two", "a longer one", "\N{SNOWMAN}"], "answer": 1},
    {"question": "a question of more than a window", "choices": ["yes", "no"], "answer": 0},
    {"question": "\N{SNOWMAN}", "choices": ["x", "yy", "zzz", "wwww"], "answer": 3},
]
CHOICES = """
task: ours_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: ours_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""
WRITING = """
task: ours_writing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]
"""


ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "integration/README.md", ROOT / "docs/models/training.md"


def documented() -> list[str]:
    text = "\n".join(page.read_text() for page in PAGES if page.exists()).replace("\\\n", " ")
    return re.findall(r"python -m fusewright_models.evaluation .*", text)


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in {"choices": CHOICES, "text": TEXT, "writing": WRITING}.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", json.dumps(str(data))))
    return folder


MAKERS = {
    "titan-mac": lambda: TitanMAC(TITAN_MAC["tiny"]),
    "hybrid": lambda: HybridLM(HYBRID["tiny"]),
}


@pytest.fixture(params=MAKERS)
def folder(request, tmp_path):
    torch.manual_seed(0)
    MAKERS[request.param]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_without_lm_eval_the_program_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r'need lm_eval, .*"\./integration\[eval\]" brings it'):
        program.main()


def direct(scorer, context: str, continuation: str) -> float:
    """Of bytes, by one forward pass of all of them or of a window's worth, for each window."""
    before = context.encode() or b"\n"
    text, first, nats = before + continuation.encode(), len(before), 0.0
    while first < len(text):
        end = min(first + scorer.length, len(text))
        piece = torch.tensor([list(text[max(0, end - 1 - scorer.length) : end])])
        with torch.no_grad():
            hidden = scorer.model(piece[:, :-1])
            hidden = hidden[0] if isinstance(scorer.model, TitanMAC) else hidden
            found = scorer.model.logits(hidden)[0].log_softmax(-1)
        nats += float(found.gather(1, piece[0, 1:, None])[-(end - first) :].sum())
        first = end
    return nats


@lm_eval_is_there
def test_lm_eval_has_the_scores_of_the_model(folder, tasks):
    import lm_eval
    from fusewright_models.evaluation import adapter
    from lm_eval.tasks import TaskManager

    sizes = {"max_length": 16, "dtype": "float64"}
    found = lm_eval.simple_evaluate(
        model="fusewright",
        model_args={"pretrained": str(folder), **sizes},
        tasks=["ours_choices", "ours_text", "ours_writing"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=3,
        device="cpu",
        bootstrap_iters=0,
    )
    assert lm_eval.api.registry.get_model("fusewright") is adapter.FusewrightLM
    scorer = load_scorer(folder, **sizes)
    samples = found["samples"]
    right = []
    for row, sample in zip(ROWS, samples["ours_choices"], strict=True):
        # The choice is what follows the question and a space.
        nats = [direct(scorer, row["question"], f" {choice}") for choice in row["choices"]]
        told = [float(score) for score, _ in (answer[0] for answer in sample["resps"])]
        for one, other in zip(told, nats, strict=True):
            assert abs(one - other) <= LIMIT * abs(other)
        right.append(max(range(len(nats)), key=nats.__getitem__) == row["answer"])
    results = found["results"]
    assert results["ours_choices"]["acc,none"] == sum(right) / len(right)
    nats = sum(direct(scorer, "", row["question"]) for row in ROWS)
    count = sum(len(row["question"].encode()) for row in ROWS)
    bits = results["ours_text"]["bits_per_byte,none"]
    assert abs(bits + nats / count / math.log(2.0)) <= LIMIT * bits
    for row, sample in zip(ROWS, samples["ours_writing"], strict=True):
        wanted = scorer.continuations([row["question"]], tokens=5, until=["e"])
        assert sample["resps"][0] == wanted


@lm_eval_is_there
@pytest.mark.parametrize("folder", ["titan-mac"], indirect=True)
def test_batches_of_no_size_are_refused(folder):
    from fusewright_models.evaluation.adapter import FusewrightLM

    for size in ("auto", 0, "-1"):
        with pytest.raises(ValueError, match=f"wanted a batch_size of 1 or more; got {size}"):
            FusewrightLM(str(folder), batch_size=size)


@lm_eval_is_there
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["titan-mac"], indirect=True)
def test_the_program_is_lm_evals_own(folder, tasks, tmp_path):
    command = [sys.executable, "-m", "fusewright_models.evaluation", "--model", "fusewright"]
    sizes = f"pretrained={folder},max_length=16"
    more = ["--model_args", sizes, "--tasks", "ours_text", "--include_path", str(tasks)]
    done = subprocess.run(
        [*command, *more, "--device", "cpu", "--batch_size", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "bits_per_byte" in done.stdout


@lm_eval_is_there
@pytest.mark.parametrize("line", documented())
def test_documented_commands_have_flags_of_lm_eval(line, monkeypatch):
    from lm_eval._cli import HarnessCLI

    monkeypatch.setattr(sys, "argv", shlex.split(line)[2:])
    assert HarnessCLI().parse_args().model == "fusewright"


@lm_eval_is_there
@pytest.mark.parametrize(
    "pair", [("a", " b"), ("a ", "b"), ("a\n\n", " b"), ("\N{SNOWMAN} ", "\N{SNOWMAN}")]
)
def test_contexts_and_continuations_are_cut_as_lm_eval_cuts_them(pair):
    from lm_eval.api.model import TemplateLM

    scorer = Scorer(TitanMAC(TITAN_MAC["tiny"]), ByteTokenizer(), length=9)
    own = SimpleNamespace(backend="causal", tok_encode=lambda text: list(text.encode()))
    found = [part.tolist() for part in scorer.encoded(*pair)]
    assert found == list(TemplateLM._encode_pair(own, *pair))
