"""Models are written to folders that any program of theirs reads, and read from them."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256

import pytest
import torch
from fusewright_models import (
    HYBRID,
    TITAN_MAC,
    HybridConfig,
    HybridLM,
    TitanMAC,
    TransformerNP,
    TransformerNPConfig,
)
from fusewright_models.cli import app
from fusewright_models.models import published
from huggingface_hub import hub_mixin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .commands import assert_same_weights, invoke

SMALL = TransformerNPConfig(x_width=2, width=16, layers=1, heads=2, feed_forward_width=20)
WORDS = [b"a", b"the", "\N{SNOWMAN}".encode(), b"\xff\x00"]


def hybrid(embedding: str) -> HybridLM:
    sizes = dict(vocab_size=len(WORDS)) if embedding == "bytes" else {}
    config = HybridConfig(embedding=embedding, **sizes)
    return HybridLM(config, token_bytes=WORDS if embedding == "bytes" else None)


MAKERS = {
    "transformer-np": lambda: TransformerNP(SMALL),
    "titan-mac": lambda: TitanMAC(TITAN_MAC["tiny"]),
    "hybrid": lambda: HybridLM(HYBRID["tiny"]),
    "hybrid-plain": lambda: hybrid("plain"),
    "hybrid-words": lambda: hybrid("bytes"),
}


def assert_same_model(one, other):
    assert type(one) is type(other)
    assert one.config == other.config
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        assert torch.equal(x, states[1][name]), name
    buffers = dict(other.named_buffers())
    for name, x in one.named_buffers():
        assert torch.equal(x, buffers[name]), name


@pytest.mark.parametrize("name", MAKERS)
def test_models_come_back_as_they_were(name, tmp_path):
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    found = type(model).from_pretrained(tmp_path, backend="reference")
    assert_same_model(model, found)
    assert not found.training
    assert "library_name: fusewright-models" in (tmp_path / "README.md").read_text()
    other = MAKERS[name]()
    other.load_pretrained(str(tmp_path))
    assert_same_model(model, other)


def test_dtype_and_device_are_those_asked_for(tmp_path):
    MAKERS["titan-mac"]().bfloat16().save_pretrained(tmp_path)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    for name in ("device", "map_location"):
        found = TitanMAC.from_pretrained(tmp_path, **{name: "meta"})
        assert all(p.is_meta for p in found.parameters())
    kinds = {
        None: torch.float32,
        "auto": torch.bfloat16,
        "float16": torch.float16,
        torch.float64: torch.float64,
    }
    for wanted, kind in kinds.items():
        for name in ("dtype", "torch_dtype"):
            found = TitanMAC.from_pretrained(tmp_path, **{name: wanted})
            assert {p.dtype for p in found.parameters()} == {kind}


def test_weights_of_a_wide_dtype_are_rounded_once(tmp_path):
    model = MAKERS["transformer-np"]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    found = TransformerNP.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, x in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], x.bfloat16()), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "int8"},
            "wanted a dtype of auto, float64, float32, bfloat16, float16; got int8",
        ),
        ({"dtype": torch.int64}, r"got torch\.int64"),
        (
            {"dtype": "float16", "torch_dtype": "float32"},
            "wanted one of dtype and torch_dtype; got",
        ),
        ({"device": "cpu", "map_location": "meta"}, "wanted one of device and map_location; got"),
    ],
)
def test_dtypes_and_devices_that_are_none_are_refused(options, message, tmp_path):
    MAKERS["transformer-np"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        TransformerNP.from_pretrained(tmp_path, **options)


def test_the_dtype_of_a_file_is_that_of_all_its_parameters(tmp_path):
    model = MAKERS["transformer-np"]()
    next(model.parameters()).data = next(model.parameters()).double()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"wanted parameters of one dtype in .* for dtype auto"):
        TransformerNP.from_pretrained(tmp_path, dtype="auto")
    # The average that a HybridLM selects by stays in fp32, and is no parameter.
    MAKERS["hybrid"]().bfloat16().save_pretrained(tmp_path / "hybrid")
    found = HybridLM.from_pretrained(tmp_path / "hybrid", dtype="auto")
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}


SIZES = {"transformer-np": "width", "titan-mac": "dim", "hybrid": "dim"}


@pytest.mark.parametrize("size", [2**14, 2**40, 2**70])
@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_allocated_of_a_shape_that_the_weights_have_not(
    name, size, tmp_path, monkeypatch
):
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())["shape"]
    for field in (SIZES[name], "layers"):
        changed(tmp_path, shape=shape | {field: size})
        with Allocations() as seen, pytest.raises(ValueError, match=r"config\.json|model\.safeten"):
            type(model).from_pretrained(tmp_path)
        assert seen.largest < 2**12


class Allocations(TorchDispatchMode):
    """Notes the elements of the largest tensor that is not on meta."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.largest = max(self.largest, x.numel())
        return found


def test_a_flipped_bit_is_told(tmp_path):
    model = MAKERS["transformer-np"]()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    assert (
        json.loads((tmp_path / "config.json").read_text())["sha256"] == sha256(content).hexdigest()
    )
    content[-5] ^= 1
    file.write_bytes(content)
    other = MAKERS["transformer-np"]()
    before = {name: x.clone() for name, x in other.state_dict().items()}
    for load in (TransformerNP.from_pretrained, lambda name: other.load_pretrained(str(name))):
        with pytest.raises(
            ValueError, match=r"wanted weights of SHA-256 .* it is damaged, or anoth"
        ):
            load(tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    # Folders of before have no digest.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sha256"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    TransformerNP.from_pretrained(tmp_path)


def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path):
    MAKERS["transformer-np"]().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: x.int() for name, x in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"wanted this model's weights in .*; got: I32 in "):
        TransformerNP.from_pretrained(tmp_path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders of commits, of which "main" is the last one, in the layout of the hub's cache."""
    snapshots, asked = tmp_path / "hub/models--me--tasks/snapshots", []

    def download(name, file, *, revision=None, **options):
        asked.append((file, revision))
        commits = sorted(folder.name for folder in snapshots.iterdir())
        commit = revision if revision in commits else commits[-1]
        if len(asked) == 1:
            # What is newest changes as soon as a first file was read.
            models[-1].save_pretrained(snapshots / ("c" * 40))
        return str(snapshots / commit / file)

    models = [MAKERS["transformer-np"]() for _ in range(3)]
    for commit, model in zip("ab", models, strict=False):
        model.save_pretrained(snapshots / (commit * 40))
    monkeypatch.setattr(published, "hf_hub_download", download)
    monkeypatch.setattr(
        hub_mixin,
        "hf_hub_download",
        lambda repo_id, filename, **x: download(repo_id, filename, **x),
    )
    return models, asked


@pytest.mark.parametrize(("revision", "number"), [(None, 1), ("a" * 40, 0)])
def test_all_files_are_of_one_commit_which_is_told(revision, number, hub):
    models, asked = hub
    found = TransformerNP.from_pretrained("me/tasks", revision=revision)
    assert found.revision == "ab"[number] * 40
    assert_same_model(models[number], found)
    assert {revision for _, revision in asked[1:]} == {found.revision}
    asked.clear()
    other = MAKERS["transformer-np"]()
    other.load_pretrained("me/tasks", revision=found.revision)
    assert_same_model(models[number], other)


def test_a_folder_has_no_commit(tmp_path):
    MAKERS["transformer-np"]().save_pretrained(tmp_path)
    assert TransformerNP.from_pretrained(tmp_path, revision="main").revision is None


def changed(folder, **parts):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def of_another_width(folder):
    TransformerNP(TransformerNPConfig(x_width=3, width=16, layers=1, heads=2)).save_pretrained(
        folder / "other"
    )
    shutil.copy(folder / "other/model.safetensors", folder)


DAMAGES = {
    "no such file": (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, None),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, None),
    "not JSON": (lambda folder: cut(folder / "config.json"), ValueError, "wanted a model's config"),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        ValueError,
        "wanted a model's config",
    ),
    "cut": (lambda folder: cut(folder / "model.safetensors"), ValueError, "wanted this model's we"),
    "another model": (
        lambda folder: changed(folder, model="TitanMAC"),
        ValueError,
        "wanted a TransformerNP; .* is that of a TitanMAC",
    ),
    "another version": (
        lambda folder: changed(folder, shape={"x_width": 2, "depth": 3}),
        ValueError,
        "written by another version: it has depth",
    ),
    "no shape": (
        lambda folder: changed(folder, shape={"x_width": 2, "width": 15}),
        ValueError,
        "width must be divisible by heads",
    ),
    "nested": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        ValueError,
        "wanted a model's config",
    ),
    "an option of the reader": (
        lambda folder: changed(folder, backend="triton"),
        ValueError,
        "written by another version: it has backend",
    ),
    "weights of another shape": (of_another_width, ValueError, "wanted this model's weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_model_of_ours_is_refused(damage, tmp_path):
    harm, error, message = DAMAGES[damage]
    MAKERS["transformer-np"]().save_pretrained(tmp_path)
    harm(tmp_path)
    with pytest.raises(error, match=message):
        TransformerNP.from_pretrained(tmp_path)


@pytest.mark.parametrize("words", [5, None, [1], ["\N{SNOWMAN}"] * 4])
def test_bytes_that_are_none_are_refused(words, tmp_path):
    MAKERS["hybrid-words"]().save_pretrained(tmp_path)
    changed(tmp_path, bytes=words)
    with pytest.raises(ValueError, match=r"config\.json"):
        HybridLM.from_pretrained(tmp_path)


def test_shards_are_not_saved(tmp_path, monkeypatch):
    model = MAKERS["transformer-np"]()
    monkeypatch.setattr(torch.nn.Parameter, "full_tensor", None, raising=False)
    with pytest.raises(ValueError, match="wanted weights that are whole; got shards"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_lack_one_are_refused(tmp_path):
    MAKERS["transformer-np"]().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state.popitem()
    save_file(state, file)
    with pytest.raises(ValueError, match="Missing key"):
        TransformerNP.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_told(name):
    with pytest.raises(FileNotFoundError, match="wanted the folder of a model"):
        TransformerNP.from_pretrained(name)


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
