"""Models as folders and repositories of the Hugging Face hub: config.json and model.safetensors,
which are read without anything in them being executed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Fields of a shape that say how the same weights compute, and how far they look.
ANYHOW = {"checkpointing", "mode", "segment", "memory_chunk", "k_base", "index_temperature"}
# What of a call goes to the hub.
ASKED = "revision", "cache_dir", "force_download", "local_files_only", "token"


class Published(PyTorchModelHubMixin, library_name="fusewright-models", license="apache-2.0"):
    """What a model of ours is beside an ``nn.Module``: ``save_pretrained``, ``from_pretrained`` and
    ``push_to_hub``, as huggingface_hub has them.

    ``from_pretrained(name, *, revision, cache_dir, token, ..., device="cpu", **options)`` takes the
    path of a folder or the name of a repository, makes the model of its config.json with the
    ``options`` of the class, such as ``backend``, and gives it the weights, in evaluation mode.

    It raises FileNotFoundError where a folder lacks a file, and ValueError where config.json is
    another model's or no shape of this one, or the weights are cut or do not fit.
    ``save_pretrained`` raises ValueError where the weights are shards.
    """

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
        text = json.dumps(written, indent=2, allow_nan=False) + "\n"
        state = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
        (save_directory / CONFIG).write_text(text)
        save_file(state, save_directory / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        name = str(pretrained_model_name_or_path)
        # Said in our words before the mixin reads it.
        read_config(file_of(name, CONFIG, **{x: options[x] for x in ASKED if x in options}), cls)
        return super().from_pretrained(name, **options)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, device: torch.device | str = "cpu", **options: Any
    ) -> Self:
        asked = {name: options.pop(name, None) for name in ASKED}
        # What the mixin makes of config.json.
        options.pop("config", None)
        config, own = read_config(file_of(model_id, CONFIG, **asked), cls)
        model: Any = cls(config, **own | options)
        load_weights(model, file_of(model_id, WEIGHTS, **asked))
        return model.to(device).eval()

    def load_pretrained(self, name: str) -> None:
        """Give this model the weights of a folder or repository of that name.

        Raises:
            OSError: there is none.
            ValueError: as of ``from_pretrained``; or they are of a model of another shape.
        """
        model: Any = self
        file = file_of(name, CONFIG)
        shape, _ = read_config(file, type(self))
        check_shape(model.config, shape, file)
        load_weights(self, file_of(name, WEIGHTS))


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
