"""How networks' weights are drawn, and public ones in local files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch


def cut_normal_(x: torch.Tensor, inputs: int) -> None:
    """Normal, cut at two deviations of 1 / sqrt(inputs)."""
    deviation = inputs**-0.5
    torch.nn.init.trunc_normal_(x, 0.0, deviation, -2 * deviation, 2 * deviation)


def read_weights(path: str | os.PathLike[str], caller: str) -> dict[str, torch.Tensor]:
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


def check_names(
    file: str, found: Iterable[str], wanted: Iterable[str], unused: Iterable[str] = ()
) -> None:
    if set(found) - set(unused) != set(wanted):
        raise ValueError(f"{file} must have the weights {sorted(wanted)}, got {sorted(found)}")


def check_shapes(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, Sequence[int]], of: str = ""
) -> None:
    for name, shape in wanted.items():
        got = list(torch.as_tensor(found[name]).shape)
        if got != list(shape):
            raise ValueError(f"{name}{of} must have shape {list(shape)}, got {got}")
