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
from fusewright_models.models import published
from fusewright_models.models.published import optional_file_of
from huggingface_hub import hub_mixin
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("name", ["device", "map_location"])
def test_device_that_torch_cannot_use_is_refused_before_weights_are_read(
    name, tmp_path, monkeypatch
):
    MAKERS["transformer-np"]().save_pretrained(tmp_path)

    def read(*given):
        raise AssertionError("weights were read")

    monkeypatch.setattr(published, "check_weights", read)
    absent = f"cuda:{torch.cuda.device_count()}"
    message = f"wanted a device that torch can use here; got {absent}: "
    with pytest.raises(ValueError, match=message):
        TransformerNP.from_pretrained(tmp_path, **{name: absent})


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


def test_file_may_be_absent_of_a_hub_that_was_asked(tmp_path, monkeypatch):
    def raising(error):
        def absent(name, file, **asked):
            raise error

        monkeypatch.setattr(published, "hf_hub_download", absent)

    raising(EntryNotFoundError("absent"))
    assert optional_file_of("me/tasks", "run.json", revision="v1") is None
    raising(LocalEntryNotFoundError("not reached"))
    with pytest.raises(LocalEntryNotFoundError):
        optional_file_of("me/tasks", "run.json")
    assert optional_file_of(str(tmp_path), "run.json") is None
    (tmp_path / "run.json").touch()
    assert optional_file_of(str(tmp_path), "run.json") == tmp_path / "run.json"


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
