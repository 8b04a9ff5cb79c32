from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli import text as text_command
from fusewright_models.text import ByteModel, Windows
from fusewright_models.training import RunFolder, Trainer

from .commands import (
    FILES,
    assert_refused,
    assert_same_metrics,
    assert_same_weights,
    flags_of,
    interrupted,
    invoke,
    metrics,
    state_file,
    weights,
)

datasets = pytest.importorskip("datasets", reason="the extra 'text' is not installed")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

pytestmark = pytest.mark.usefixtures("short_samples")

SIZES = "--num-layers 1 --dim 16 --num-heads 2 --chunk-size 8 --memory-chunk 4"
SMALL = f"--preset tiny {SIZES} --seq-len 20"
STEPS = "--batch-size 2 --steps 5 --log-every 2 --eval-every 3"
TINY = [*SMALL.split(), *STEPS.split()]


def run(*arguments):
    return invoke(app, *arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "lmm"])
def test_five_steps_leave_every_file_and_report_the_scores(tmp_path, text, variant):
    out = tmp_path / "run"
    result = run("titan-mac", *TINY, "--variant", variant, "--dataset", text, "--out", out)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "config.json").read_text())
    assert (config["model"], config["variant"], config["dim"]) == ("titan-mac", variant, 16)

    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [2, 3, 4, 5]
    scores = [line for line in lines if "held_out_bits_per_byte" in line]
    assert [line["step"] for line in scores] == [0, 3, 5]
    # A byte has eight bits, and the model knows nothing yet.
    assert abs(scores[0]["held_out_bits_per_byte"] - 8.0) < 0.2
    assert scores[-1]["held_out_bits_per_byte"] < scores[0]["held_out_bits_per_byte"]
    for line in (scores[0], scores[-1]):
        assert f"{line['held_out_bits_per_byte']:.4f}" in result.output
    assert f"{scores[-1]['order_2_bits_per_byte']:.4f}" in result.output
    # A held-out text of 64 bytes at most, and eight more.
    sample = (out / "sample.txt").read_bytes()
    assert sample[:-8] in text.read_bytes()


def test_scores_are_of_the_end_of_the_file_which_no_step_sees(tmp_path, text, monkeypatch):
    seen = []
    sample = Windows.sample

    def recorded(self, batch):
        seen.append(bytes(self.stream.tolist()))
        return sample(self, batch)

    monkeypatch.setattr(Windows, "sample", recorded)
    flags = [*TINY, "--steps", "1", "--dataset", text]
    assert run("titan-mac", *flags, "--out", tmp_path / "run").exit_code == 0
    whole = text.read_bytes()
    assert whole.startswith(seen[0])
    held_out = whole[len(seen[0]) :]
    assert 100 < len(held_out) < len(whole) / 20
    order_2 = ByteModel(np.frombuffer(seen[0], dtype="uint8"))
    expected = order_2.bits_per_byte(np.frombuffer(held_out[1:], dtype="uint8"))
    assert metrics(tmp_path / "run")[-1]["order_2_bits_per_byte"] == expected


def test_default_data_is_the_standard_library(tmp_path):
    # An evaluation of 4 KB, in few batches.
    sizes = ["--seq-len", "64", "--batch-size", "32", "--steps", "1"]
    flags = [*TINY, *sizes, "--dataset-tokens", "50000"]
    result = run("titan-mac", *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["dataset"], config["tokenizer"], config["vocab_size"]) == (None, None, None)
    assert weights(tmp_path / "run")["embedding.weight"].shape == (256, 16)


def test_same_seed_same_run_and_interrupted_run_resumes_to_it(tmp_path, text, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*TINY, "--gradient-accumulation-steps", "2", "--dataset", text]
    assert run("titan-mac", *flags, "--out", whole).exit_code == 0
    # In the middle of the fifth step, after the checkpoint of the third.
    begun = ("titan-mac", *flags, "--out", parts)
    stopped = interrupted(monkeypatch, Windows, 10, lambda: run(*begun))
    assert stopped.exit_code == 130
    assert f"fusewright-train titan-mac --resume {parts}" in stopped.output
    assert RunFolder(parts).load_checkpoint()["step"] == 3

    resumed = run("titan-mac", "--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    assert (whole / "sample.txt").read_bytes() == (parts / "sample.txt").read_bytes()
    assert_same_metrics(whole, parts)


def test_run_over_data_that_has_changed_is_not_resumed(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("some text\n" * 200)
    flags = [*TINY, "--steps", "1", "--dataset", data]
    assert run("titan-mac", *flags, "--out", tmp_path / "run").exit_code == 0
    data.write_text("other text\n" * 200)
    result = run("titan-mac", "--resume", tmp_path / "run")
    assert_refused(result, "wanted the data that the run was begun with, of digest")


def test_tokenizer_decides_the_vocabulary_and_bytes_the_score(tmp_path, text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = [*TINY, "--dataset", text, "--tokenizer", tmp_path / "tokenizer.json"]
    # Without a decoder its tokens are of another text.
    refused = run("titan-mac", *flags, "--out", tmp_path / "run")
    assert_refused(refused, "wanted a tokenizer whose tokens decode to the text", tmp_path / "run")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    result = run("titan-mac", *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert weights(tmp_path / "run")["embedding.weight"].shape == (280, 16)
    first = metrics(tmp_path / "run")[0]
    # Fewer tokens than bytes: fewer bits for a byte than for a token.
    per_token = -first["held_out_log_likelihood"] / torch.tensor(2.0).log().item()
    assert first["held_out_bits_per_byte"] < 0.8 * per_token

    flags += ["--vocab-size", "300", "--steps", "1"]
    larger = run("titan-mac", *flags, "--out", tmp_path / "larger")
    assert larger.exit_code == 0, larger.output
    assert weights(tmp_path / "larger")["embedding.weight"].shape == (300, 16)


@pytest.fixture
def trained(monkeypatch):
    """What the runs train: model, source, loss function, optimizer and configuration of each."""
    made = []

    class Recorded(Trainer):
        def __init__(self, *arguments, **options):
            made.append(arguments)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(text_command, "Trainer", Recorded)
    return made


def test_options_reach_the_run(tmp_path, text, trained):
    choices = {
        "--variant": "mal",
        "--num-layers": "2",
        "--vocab-size": "257",
        "--batch-size": "3",
        "--gradient-accumulation-steps": "3",
        "--optimizer": "torch-adamw",
        "--lr": "0.002",
        "--weight-decay": "0.2",
        "--precision": "bf16",
        "--dataset-tokens": "2000",
        "--backend": "reference",
        "--seed": "7",
        "--device": "cpu",
    }
    flags = [word for pair in choices.items() for word in pair]
    result = run(
        *("titan-mac", *TINY, *flags, "--no-compile", "--no-capture"),
        *("--dataset", text, "--out", tmp_path / "run"),
    )
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run/config.json").read_text())
    for flag, value in choices.items():
        assert str(config[flag.removeprefix("--").replace("-", "_")]) == value
    assert config["capture"] is False
    assert "2,000 tokens to train on" in result.output
    checkpoint = RunFolder(tmp_path / "run").load_checkpoint()
    assert checkpoint["model"]["embedding.weight"].shape == (257, 16)
    blocks = {name.split(".")[1] for name in checkpoint["model"] if name.startswith("blocks.")}
    assert blocks == {"0", "1"}
    matrices, vectors = checkpoint["optimizer"]["param_groups"]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)

    ((model, windows, _, _, training, _),) = trained
    shape = model.config
    assert (shape.heads, shape.segment, shape.memory_chunk) == (2, 8, 4)
    assert training.precision == "bf16"
    assert windows.sample(training.batch_size).windows.shape == (3, 21)


def test_column_of_a_parquet_file_is_trained_on(tmp_path, text, trained):
    rows = text.read_text().splitlines()
    table = {"text": ["another"] * len(rows), "content": rows}
    datasets.Dataset.from_dict(table).to_parquet(str(tmp_path / "rows.parquet"))
    flags = ["--dataset", tmp_path / "rows.parquet", "--text-column", "content", "--steps", "1"]
    result = run("titan-mac", *TINY, *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    ((_, windows, *_),) = trained
    assert set(bytes(windows.stream.tolist()).decode().splitlines()) <= set(rows)


def test_subset_of_a_named_data_set_is_asked_for(tmp_path, text, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"text": text.read_text()}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        huggingface_hub, "dataset_info", lambda name, revision: SimpleNamespace(sha="1")
    )
    flags = ["--dataset", "owner/name", "--dataset-subset", "part", "--steps", "1"]
    flags += ["--cache", tmp_path / "cache"]
    result = run("titan-mac", *TINY, *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    options = {"split": "train", "streaming": True, "revision": "1"}
    assert asked == [(("owner/name", "part"), options)]


def test_a_run_goes_on_with_the_commit_of_the_data_that_it_began_with(tmp_path, text, monkeypatch):
    """Whatever the hub has later, and without asking it."""
    commits = {"a" * 40: text.read_text(), "b" * 40: text.read_text()[::-1]}
    read, asked = [], []

    def load_dataset(name, subset, *, revision, **options):
        read.append(revision)
        return iter([{"text": commits[revision]}])

    def newest(name, revision):
        asked.append(revision)
        return SimpleNamespace(sha="ab"[len(asked) - 1] * 40)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "dataset_info", newest)
    flags = [*TINY, "--dataset", "owner/name", "--dataset-revision", "v1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    begun = ["titan-mac", *flags, "--cache", tmp_path / "one", "--out"]
    assert run(*begun, whole).exit_code == 0
    assert (read, asked) == (["a" * 40], ["v1"])
    config = json.loads((whole / "config.json").read_text())
    assert config["dataset_revision"] == "a" * 40

    # The branch has another commit by now, and so has a run that is begun with it.
    assert run(*begun, tmp_path / "later").exit_code == 0
    assert (read.pop(), asked.pop()) == ("b" * 40, "v1")
    monkeypatch.setattr(huggingface_hub, "dataset_info", None)
    config = ["--config", whole / "config.json", "--cache", tmp_path / "one", "--out", parts]
    stopped = interrupted(monkeypatch, Windows, 4, lambda: run("titan-mac", *config))
    assert stopped.exit_code == 130
    assert read == ["a" * 40]
    # Without the tokens that were kept they are read again.
    resumed = run("titan-mac", "--resume", parts, "--cache", tmp_path / "other")
    assert resumed.exit_code == 0, resumed.output
    assert read == ["a" * 40] * 2
    assert_same_weights(whole, parts)
    assert_same_metrics(whole, parts)


@pytest.mark.slow
def test_runs_of_before_may_be_told_the_commit_that_they_read(tmp_path, text, monkeypatch):
    commits = {"a" * 40: text.read_text(), "b" * 40: text.read_text()[::-1]}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, subset, *, revision, **options: iter([{"text": commits[revision]}]),
    )
    flags = [*TINY, "--dataset", "owner/name", "--dataset-revision", "a" * 40]
    folder = tmp_path / "run"
    assert run("titan-mac", *flags, "--cache", tmp_path, "--out", folder).exit_code == 0
    config = json.loads((folder / "config.json").read_text())
    del config["dataset_revision"]
    (folder / "config.json").write_text(json.dumps(config))
    resumed = ["titan-mac", "--resume", folder, "--steps", "6", "--dataset-revision"]
    result = run(*resumed, "b" * 40)
    assert_refused(result, "wanted the data that the run was begun with")
    assert run(*resumed, "a" * 40).exit_code == 0


def test_a_hub_that_is_not_reached_is_told_in_a_sentence(tmp_path, monkeypatch):
    def unreached(name, revision):
        raise EOFError("it is away")

    monkeypatch.setattr(huggingface_hub, "dataset_info", unreached)
    result = run("titan-mac", *TINY, "--dataset", "owner/name", "--out", tmp_path / "run")
    assert_refused(result, "could not ask the hub for owner/name: it is away", tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "huge"], "'huge' is not one of"),
        (["--variant", "mad"], "'mad' is not one of"),
        (["--precision", "fp16"], "'fp16' is not one of"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--num-heads", "3"], "dim must be divisible by heads; got dim 16, heads 3"),
        (["--chunk-size", "6"], "segment must be divisible by memory_chunk"),
        (["--vocab-size", "255"], "the tokenizer has 256 tokens; got --vocab-size 255"),
        (["--seq-len", "9000"], "windows of 9000 + 1 tokens want a stream as long; got"),
        (["--dataset", "none.txt"], "wanted a file, a folder or a data set's name; none.txt is"),
        (["--dataset-subset", "part"], "no subsets or revisions; got subset 'part' beside"),
        (["--dataset-revision", "v1"], "no subsets or revisions; got revision 'v1' beside"),
        (["--tokenizer", "none.json"], "wanted a tokenizer's file or name; got none.json"),
        (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
        (["--lr", "-1"], "Invalid value for '--lr'"),
        (["--resume", "nowhere"], "takes what is trained from its folder; got --preset"),
    ],
    ids=flags_of,
)
def test_bad_flags_get_one_clear_sentence(tmp_path, monkeypatch, text, flags, message):
    monkeypatch.chdir(tmp_path)
    result = run("titan-mac", *TINY, "--dataset", text, *flags)
    assert_refused(result, re.escape(message), tmp_path)


def test_empty_data_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    result = run("titan-mac", *TINY, "--dataset", tmp_path / "empty.txt")
    assert_refused(result, "wanted text with two tokens or more to train on; got too little of it")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, short_samples):
    """The folder of a short run, which is only read."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run("titan-mac", *TINY, "--dataset", text, "--out", folder).exit_code == 0
    return folder


@pytest.mark.usefixtures("without_pictures")
def test_run_of_before_that_names_no_rule_of_the_memory_goes_on_by_the_papers(tmp_path, text):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    rule = ["--memory-rule", "paper", "--memory-length", "100"]
    result = run("titan-mac", *TINY, *rule, "--dataset", text, "--out", whole)
    assert result.exit_code == 0, result.output
    shutil.copytree(whole, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    later = {name: config.pop(name) for name in ("memory_rule", "memory_length", "memory_layers")}
    assert later == {"memory_rule": "paper", "memory_length": 100.0, "memory_layers": 2}
    file.write_text(json.dumps(config))
    assert RunFolder(folder).load_checkpoint()["choices"].keys().isdisjoint(later)
    continued = [run("generate", each, "--tokens", "12").stdout for each in (whole, folder)]
    assert continued[0] == continued[1]
    result = run("titan-mac", "--resume", folder)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("margin", "code"), [("-100", 0), ("0.15", 1)])
def test_margin_that_is_not_reached_is_a_failure(tmp_path, finished, margin, code):
    """Five steps are far from an order-2 byte model."""
    shutil.copytree(finished, tmp_path / "run")
    result = run("titan-mac", "--resume", tmp_path / "run", "--margin", margin)
    assert result.exit_code == code, result.output
    wanted = f"wanted {float(margin)} bits per byte or more below the order-2 byte model; got -"
    assert (wanted in result.output) == bool(code)
    assert weights(tmp_path / "run").keys() == weights(finished).keys()


def test_run_of_another_model_is_not_resumed(finished):
    result = run("transformer-np", "--resume", finished)
    assert_refused(result, "wanted a run of transformer-np")


PROMPTS = ["line 7", "of 9", "line 12 of"]


def test_trained_model_continues_a_prompt(finished):
    flags = ["--prompt", "line 7", "--tokens", "12"]
    first = run("generate", finished, *flags)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("line 7")
    assert run("generate", finished, *flags).stdout == first.stdout
    assert run("generate", finished, *flags, "--seed", "1").stdout != first.stdout
    cold = run("generate", finished, *flags, "--temperature", "0")
    other = run("generate", finished, *flags, "--temperature", "0", "--seed", 3)
    assert cold.stdout == other.stdout
    # Less than the likeliest token has.
    assert run("generate", finished, *flags, "--top-p", "1e-6").stdout == cold.stdout
    wanted = r"read 6 tokens at [\d,]+ tokens/s, wrote 12 at [\d,]+ tokens/s\n"
    assert re.fullmatch(wanted, first.stderr)


def test_several_prompts_are_continued_as_each_alone(finished, tmp_path):
    flags = ["--tokens", "9", "--temperature", "0"]
    file = tmp_path / "prompts.txt"
    file.write_text("of 9\n\nline 12 of\n")
    found = run("generate", finished, *flags, "--prompt", "line 7", "--prompts", file)
    assert found.exit_code == 0, found.output
    alone = [run("generate", finished, *flags, "--prompt", each) for each in PROMPTS]
    assert found.stdout == "".join(each.stdout for each in alone)
    assert "read 12 tokens at " in found.stderr
    assert ", wrote 27 at " in found.stderr
    assert run("generate", finished, *flags).stdout.startswith("def ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "wanted prompts [P] with P >= 1; got [0]"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
        (["--top-p", "0"], "top_p must be above 0 and at most 1; got 0.0"),
        (["--top-p", "2"], "Invalid value for '--top-p'"),
        (["--speculate"], "wanted a run of hybrid beside --speculate, whose model drafts tokens;"),
        (["--prompts", "/dev/null"], "wanted a prompt on a line of /dev/null; got none"),
        (["--prompts", "/no/such"], "No such file or directory: '/no/such'"),
    ],
    ids=flags_of,
)
def test_impossible_generation_gets_one_clear_sentence(finished, flags, message):
    result = run("generate", finished, *flags)
    assert_refused(result, re.escape(message))


def test_temperature_that_is_no_number_gets_one_clear_sentence(finished):
    result = run("generate", finished, "--temperature", "nan")
    assert result.exit_code == 2
    # An older typer finds NaN in the flag's range, and the model refuses it.
    by_typer = "Invalid value for '--temperature'" in result.output
    assert by_typer != ("temperature must be 0 or positive, and finite; got nan" in result.output)
    assert "Traceback" not in result.output


def test_folder_without_a_model_generates_nothing(tmp_path, finished):
    assert "wanted the folder of a run with config.json" in run("generate", tmp_path).output
    (tmp_path / "config.json").write_bytes((finished / "config.json").read_bytes())
    assert_refused(run("generate", tmp_path), "wanted the folder of a run with a checkpoint")
    torch.save({"model": {}}, tmp_path / "checkpoint.pt")
    assert_refused(run("generate", tmp_path), "wanted this model's checkpoint in")


def test_text_is_generated_from_the_checkpoint_before_a_damaged_one(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run")
    file = state_file(tmp_path / "run")
    file.write_bytes(file.read_bytes()[:-1])
    flags = ["--prompt", "line 7", "--tokens", "4"]
    result = run("generate", tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    (before,) = (each for each in RunFolder(tmp_path / "run").checkpoints.files() if each != file)
    assert f"{before} is taken instead" in result.stderr
    # A run may be training there: nothing is renamed.
    assert file.exists()


def test_help_lists_the_subcommands():
    result = run("--help")
    assert result.exit_code == 0
    assert {"titan-mac", "generate"} <= set(result.output.split())


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "lmm"])
def test_training_on_the_gpu_in_bf16_leaves_every_file(tmp_path, text, variant):
    flags = [*TINY, "--device", "cuda", "--precision", "bf16", "--variant", variant]
    result = run("titan-mac", *flags, "--dataset", text, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
