"""The device that a command line names."""

from __future__ import annotations

import torch


def checked_device(name: str) -> torch.device:
    """The device of that name, once something could be put on it.

    Raises:
        ValueError: it is neither the CPU nor a CUDA device that torch can use here.
    """
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N; got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a CUDA device, and torch sees none")
    try:
        return torch.zeros((), device=name).device
    except RuntimeError as error:
        # The lines below the first are advice to programmers.
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name}: {reason}") from error
