"""Public weights in local files."""

from __future__ import annotations

import os

import torch


def read_weights(path: str | os.PathLike, caller: str) -> dict[str, torch.Tensor]:
    """What a safetensors file holds, on the CPU; nothing is fetched.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: the file is none of that format.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as missing:
        raise ImportError(
            f"{caller} needs the package safetensors: pip install safetensors"
        ) from missing
    try:
        return load_file(os.fspath(path))
    except SafetensorError as error:
        raise ValueError(
            f"{caller} wants a file in the format safetensors, got {os.fspath(path)!r}: {error}"
        ) from error
