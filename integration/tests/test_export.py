"""Runs are exported, and others begin with what was exported or trained."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from fusewright_models import HybridLM, TitanMAC, TransformerNP
from fusewright_models.cli import app
from fusewright_models.models import published
from safetensors import SafetensorError

from .commands import assert_same_weights, invoke

FLAGS = ["--preset", "tiny", "--device", "cpu", "--steps", "2", "--eval-every", "2"]


@pytest.fixture
def trained(tmp_path, text, short_samples, without_pictures):
    """Trains a model into a folder."""

    def train(model, name, *more):
        flags = [model, *FLAGS, "--out", tmp_path / name, *more]
        if model != "transformer-np":
            flags += ["--dataset", text, "--seq-len", "32"]
        result = invoke(app, *flags)
        assert result.exit_code == 0, result.output
        return tmp_path / name

    return train


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["transformer-np", "titan-mac", "hybrid"])
def test_runs_are_exported_and_others_begin_with_them(model, trained, tmp_path):
    run, out = trained(model, "run"), tmp_path / "exported"
    result = invoke(app, "export", run, "--out", out)
    assert result.exit_code == 0, result.output
    kinds = {"transformer-np": TransformerNP, "titan-mac": TitanMAC, "hybrid": HybridLM}
    assert result.output == f"{kinds[model].__name__} in {out}\n"
    assert json.loads((out / "run.json").read_text()) == json.loads(
        (run / "config.json").read_text()
    )
    exported = kinds[model].from_pretrained(out)
    state = torch.load(next((run / "checkpoints/step-000002").glob("*.pt")), weights_only=True)
    for name, x in exported.state_dict().items():
        assert torch.equal(x, state["model"][name]), name
    # At a rate of nothing they are what they begin with.
    still = ["--lr", "0"]
    for source in (run, out):
        begun = trained(model, f"from-{source.name}", "--init-from", source, *still)
        again = tmp_path / f"again-{source.name}"
        assert invoke(app, "export", begun, "--out", again).exit_code == 0
        found = kinds[model].from_pretrained(again)
        learned = {name for name, _ in found.named_parameters()}
        for name, x in found.state_dict().items():
            assert name not in learned or torch.equal(x, exported.state_dict()[name]), name


def test_a_run_keeps_the_commit_of_the_weights_that_it_began_with(trained, tmp_path, monkeypatch):
    snapshots = tmp_path / "hub/snapshots"
    for commit in "ab":
        run = trained("transformer-np", commit, "--seed", "ab".index(commit))
        assert invoke(app, "export", run, "--out", snapshots / (commit * 40)).exit_code == 0
    asked = []

    def download(name, file, *, revision):
        asked.append((file, revision))
        commit = {"v1": "a" * 40, None: "b" * 40}.get(revision, revision)
        return str(snapshots / commit / file)

    monkeypatch.setattr(published, "hf_hub_download", download)
    for revision, commit in (("v1", "a" * 40), (None, "b" * 40)):
        asked.clear()
        more = [] if revision is None else ["--init-revision", revision]
        run = trained(
            "transformer-np", f"of-{revision}", "--init-from", "me/tasks", "--lr", 0, *more
        )
        config = json.loads((run / "config.json").read_text())
        assert (config["init_from"], config["init_revision"]) == ("me/tasks", commit)
        assert asked[-1] == ("model.safetensors", commit)
        assert_same_weights(tmp_path / commit[0], run)
    result = invoke(app, "transformer-np", *FLAGS, "--init-revision", "v1")
    assert "wanted --init-from beside --init-revision v1" in result.output
    source = ["--init-from", tmp_path / "a", "--init-revision", "v1"]
    result = invoke(app, "transformer-np", *FLAGS, *source, "--out", tmp_path / "no")
    assert "is a folder, without --init-revision v1" in result.output


def test_a_run_goes_on_without_the_weights_that_it_began_with(trained, tmp_path):
    first = trained("transformer-np", "first")
    second = trained("transformer-np", "second", "--init-from", first)
    shutil.rmtree(first)
    result = invoke(app, "transformer-np", "--resume", second, "--steps", "3")
    assert result.exit_code == 0, result.output


def test_what_cannot_be_exported_or_begun_with_is_told_in_a_sentence(trained, tmp_path):
    run = trained("transformer-np", "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "nothing").mkdir()
    refused = {
        ("export", run, "--out", tmp_path / "full"): "wanted an empty folder in --out; got",
        (
            "export",
            tmp_path / "nothing",
            "--out",
            tmp_path / "x",
        ): "wanted the folder of a run with config.json",
        ("transformer-np", *FLAGS, "--init-from", tmp_path / "nothing"): "config.json",
        ("titan-mac", *FLAGS, "--init-from", run): "wanted a run of titan-mac",
    }
    for arguments, sentence in refused.items():
        result = invoke(app, *arguments)
        assert result.exit_code == 2, result.output
        assert sentence in result.output, result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("model", "flags", "sentence"),
    [
        (
            "titan-mac",
            ["--variant", "mag"],
            "wanted weights of a model of variant 'mag'; got 'mac'",
        ),
        ("transformer-np", ["--scale", "softplus"], "of scale 'softplus'; got 'log_sigma'"),
    ],
)
def test_weights_of_another_shape_that_fit_are_refused(
    model, flags, sentence, trained, tmp_path, text
):
    run, out = trained(model, "run"), tmp_path / "out"
    assert invoke(app, "export", run, "--out", out).exit_code == 0
    more = [] if model == "transformer-np" else ["--dataset", text, "--seq-len", "32"]
    for source in (run, out):
        result = invoke(app, model, *FLAGS, *more, *flags, "--init-from", source)
        assert result.exit_code == 2, result.output
        assert sentence in result.output


def test_a_run_on_another_device_is_exported(trained, tmp_path):
    run = trained("transformer-np", "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"device": "cuda"}))
    assert invoke(app, "export", run, "--out", tmp_path / "out").exit_code == 0
    TransformerNP.from_pretrained(tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(trained, tmp_path, monkeypatch):
    run, out = trained("transformer-np", "run"), tmp_path / "folder" / "out"

    def full(*given, **options):
        raise SafetensorError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(published, "save_file", full)
        result = invoke(app, "export", run, "--out", out)
        assert result.exit_code == 2
        assert "no space left on device" in result.output
    assert list((tmp_path / "folder").iterdir()) == []
    out.mkdir()
    assert invoke(app, "export", run, "--out", out).exit_code == 0
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["out"]


def test_exported_folders_are_uploaded(trained, tmp_path, monkeypatch):
    import huggingface_hub

    told = []

    class Hub:
        def create_repo(self, name, *, exist_ok):
            told.append((name, exist_ok))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{name}")

        def upload_folder(self, *, repo_id, folder_path):
            told.append((repo_id, folder_path))
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    out = tmp_path / "out"
    run = trained("transformer-np", "run")
    result = invoke(app, "export", run, "--out", out, "--push", "tasks")
    assert result.exit_code == 0, result.output
    assert told == [("tasks", True), ("me/tasks", out)]
    assert result.output.endswith("https://huggingface.co/me/tasks\n")

    def unreached(*given, **options):
        raise EOFError("the hub is away")

    monkeypatch.setattr(Hub, "create_repo", unreached)
    result = invoke(app, "export", run, "--out", tmp_path / "again", "--push", "tasks")
    assert result.exit_code == 2
    assert "to tasks: the hub is away" in result.output
