"""Models as folders and repositories of the Hugging Face hub: config.json and model.safetensors,
which are read without anything in them being executed.

Nothing that config.json says is allocated before the names and shapes in the head of
model.safetensors agree with it, and weights are used if they have the SHA-256 that it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..devices import usable_device

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Fields of a shape that say how the same weights compute, and how far they look.
ANYHOW = {"checkpointing", "mode", "segment", "memory_chunk", "k_base", "index_temperature"}
# Numbers that parameters may have, by their names in the head of the file and to a caller.
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
# What of a call goes to the hub.
ASKED = "revision", "cache_dir", "force_download", "local_files_only", "token"


class Published(PyTorchModelHubMixin, library_name="fusewright-models", license="apache-2.0"):
    """What a model of ours is beside an ``nn.Module``: ``save_pretrained``, ``from_pretrained`` and
    ``push_to_hub``, as huggingface_hub has them.

    ``from_pretrained(name, *, revision, cache_dir, token, ..., device="cpu", dtype=None,
    **options)`` takes the path of a folder or the name of a repository, makes the model of its
    config.json with the ``options`` of the class, such as ``backend``, and gives it the weights, in
    evaluation mode. ``map_location`` and ``torch_dtype`` are other names of ``device`` and
    ``dtype``: a torch.dtype or its name, "auto" for that of the file, or None for fp32.

    It raises FileNotFoundError where a folder lacks a file, and ValueError where config.json is
    another model's or no shape of this one, the weights are cut, do not fit or have another
    SHA-256, a dtype is none of floating-point numbers, or torch cannot use the device.
    ``save_pretrained`` raises ValueError where the weights are shards.

    Attributes:
        revision: the commit of the repository that the model was loaded from; None of a folder.
    """

    revision: str | None = None
    # The dataclass of the model's shape.
    config_type: ClassVar[type]
    # Names that `extras` gives.
    extra_names: ClassVar[frozenset[str]] = frozenset()

    def extras(self) -> dict[str, Any]:
        """What else the class is made of, for config.json."""
        return {}

    @classmethod
    def options_from(cls, extras: dict[str, Any]) -> dict[str, Any]:
        """Options of the class from what ``extras`` gave."""
        return {}

    def _save_pretrained(self, save_directory: Path) -> None:
        model: Any = self
        if any(hasattr(p, "full_tensor") for p in model.parameters()):
            raise ValueError(
                "wanted weights that are whole; got shards, which fusewright-train export reads "
                "from a checkpoint"
            )
        written = {"model": name_of(type(self)), "shape": asdict(model.config)} | self.extras()
        state = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
        save_file(state, save_directory / WEIGHTS, metadata={"format": "pt"})
        written["sha256"] = digest_of(save_directory / WEIGHTS)
        text = json.dumps(written, indent=2, allow_nan=False) + "\n"
        (save_directory / CONFIG).write_text(text)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        name = str(pretrained_model_name_or_path)
        file = file_of(name, CONFIG, **{x: options[x] for x in ASKED if x in options})
        # Said in our words before the mixin reads it.
        read_config(file, cls)
        # All files are of one commit, whatever a branch comes to be meanwhile.
        commit = commit_of(name, file) or options.pop("revision", None)
        return super().from_pretrained(name, **options | {"revision": commit})

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: torch.device | str | None = None,
        map_location: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> Self:
        asked_for = _either(device=device, map_location=map_location)
        # Before weights are read, which may be downloaded.
        where = usable_device("cpu" if asked_for is None else asked_for)
        wanted = _either(dtype=dtype, torch_dtype=torch_dtype)
        asked = {name: options.pop(name, None) for name in ASKED}
        # What the mixin makes of config.json.
        options.pop("config", None)
        file = file_of(model_id, CONFIG, **asked)
        config, own = read_config(file, cls)
        weights = file_of(model_id, WEIGHTS, **asked)
        kind = check_weights(lambda: cls(config, **own), config, weights)
        chosen = _dtype(wanted, kind, weights)
        check_digest(file, weights)
        model: Any = cls(config, **own | options)
        if chosen is not None:
            model.to(chosen)
        load_weights(model, weights)
        model.revision = commit_of(model_id, file)
        return model.to(where).eval()

    def load_pretrained(self, name: str, *, revision: str | None = None) -> None:
        """Give this model the weights of a folder or repository of that name, at that revision.

        Raises:
            OSError: there is none.
            ValueError: as of ``from_pretrained``; or they are of a model of another shape.
        """
        model: Any = self
        file = file_of(name, CONFIG, revision=revision)
        shape, _ = read_config(file, type(self))
        check_shape(model.config, shape, file)
        weights = file_of(name, WEIGHTS, revision=commit_of(name, file))
        check_digest(file, weights)
        load_weights(self, weights)


def check_shape(wanted: Any, got: Any, file: Path) -> None:
    """Refuse weights of another shape, which may fit and would not be this model's.

    Raises:
        ValueError: they are.
    """
    told = [
        f"{name} {x!r}; got {getattr(got, name)!r}"
        for name, x in asdict(wanted).items()
        if name not in ANYHOW and x != getattr(got, name)
    ]
    if told:
        raise ValueError(f"wanted weights of a model of {told[0]} in {file}")


def file_of(name: str, file: str, **asked: Any) -> Path:
    """A file of a folder, or of a repository, from which it is downloaded first."""
    if Path(name).is_dir():
        return Path(name, file)
    # A repository is called name or owner/name.
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise FileNotFoundError(f"wanted the folder of a model, or a repository; got {name}")
    return Path(hf_hub_download(name, file, **asked))


def optional_file_of(name: str, file: str, **asked: Any) -> Path | None:
    """Likewise one that need not be there.

    Raises:
        OSError: the hub is not reached, and may have it.
    """
    try:
        found = file_of(name, file, **asked)
    except LocalEntryNotFoundError:
        # One of those below, which says that the hub was not asked.
        raise
    except EntryNotFoundError:
        return None
    return found if found.exists() else None


def commit_of(name: str, file: Path) -> str | None:
    """Of a file of a repository the commit that it was downloaded of; None of a folder's."""
    # What hf_hub_download returns is in snapshots/COMMIT.
    if Path(name).is_dir() or file.parent.parent.name != "snapshots":
        return None
    return file.parent.name


def name_of(kind: type) -> str:
    """Of a model, whatever has taken its place since, such as what ``fully_shard`` makes of it."""
    kinds = [each for each in kind.__mro__ if "config_type" in vars(each)]
    return kinds[0].__name__


def read_model(file: Path) -> str:
    """The name of the model in a config.json.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it names none.
    """
    return str(_written(file)["model"])


def read_config(file: Path, kind: type[Published]) -> tuple[Any, dict[str, Any]]:
    """The shape of a model in a config.json, and what else the class is made of.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another model's, or no shape of this one.
    """
    written = _written(file)
    name, shape = written.pop("model"), written.pop("shape")
    written.pop("sha256", None)
    known = {field.name for field in fields(kind.config_type)}
    unknown = (shape.keys() - known) | (written.keys() - kind.extra_names)
    if name != name_of(kind):
        raise ValueError(f"wanted a {name_of(kind)}; {file} is that of a {name}")
    if unknown:
        raise ValueError(f"{file} was written by another version: it has {', '.join(unknown)}")
    try:
        return kind.config_type(**shape), kind.options_from(written)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _written(file: Path) -> dict[str, Any]:
    """What a config.json says: "model", "shape", which is an object, and what else it has."""
    try:
        written = json.loads(file.read_text())
        if not isinstance(written["shape"], dict):
            raise TypeError("shape is no object")
        return {"model": written["model"]} | written
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"wanted a model's config.json; got {file}: {error!r}") from error


def check_weights(make: Callable[[], Any], config: Any, file: Path) -> torch.dtype | None:
    """Hold the head of a file of weights against a model that is not allocated; returns the dtype
    of its parameters there, if they have one.

    Args:
        make: the model.
        config: its shape.
        file: of the weights, of which the head alone is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or has not the model's tensors.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            heads = {name: (x.get_shape(), x.get_dtype()) for name, x in parts.items()}
        # A layer has a tensor or more; modules take memory of the host, allocated or not.
        if config.layers > len(heads):
            raise ValueError(f"{len(heads)} tensors for {config.layers} layers")
        if odd := [name for name, (_, kind) in heads.items() if kind not in FLOATS]:
            raise ValueError(f"{heads[odd[0]][1]} in {odd[0]}")
        with torch.device("meta"):
            model = make()
            model.load_state_dict({name: torch.empty(shape) for name, (shape, _) in heads.items()})
    except (SafetensorError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"wanted this model's weights in {file}; got: {error}") from error
    kinds = {FLOATS[heads[name][1]] for name, _ in model.named_parameters()}
    return kinds.pop() if len(kinds) == 1 else None


def check_digest(config: Path, weights: Path) -> None:
    """Refuse weights that are not those that a config.json was written with, if it says which.

    Raises:
        ValueError: they are not.
    """
    wanted = _written(config).get("sha256")
    if wanted is not None and (got := digest_of(weights)) != wanted:
        raise ValueError(
            f"wanted weights of SHA-256 {wanted}, as {config} says; {weights} has {got}: it is "
            "damaged, or another model's"
        )


def digest_of(file: Path) -> str:
    """Its SHA-256, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _either(**given: Any) -> Any:
    """What one of two names says."""
    said = {name: value for name, value in given.items() if value is not None}
    if len({str(value) for value in said.values()}) > 1:
        raise ValueError(f"wanted one of {' and '.join(given)}; got {said}")
    return next(iter(said.values()), None)


def _dtype(
    wanted: torch.dtype | str | None, of_file: torch.dtype | None, file: Path
) -> torch.dtype | None:
    """What parameters are converted to; None leaves them as the model makes them."""
    if wanted == "auto" and of_file is None:
        raise ValueError(f"wanted parameters of one dtype in {file} for dtype auto; got several")
    named: dict[Any, torch.dtype | None] = {None: None, "auto": of_file, **DTYPES}
    found: Any = named.get(wanted, wanted)
    if found is not None and found not in FLOATS.values():
        raise ValueError(f"wanted a dtype of auto, {', '.join(DTYPES)}; got {wanted}")
    return found


def load_weights(model: Any, file: Path) -> None:
    """Give a model all its weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or another model's.
    """
    try:
        model.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"wanted this model's weights in {file}; got: {error}") from error
