"""Memory that runs out."""

from __future__ import annotations

import re

import torch


class OutOfMemory(RuntimeError):
    """Memory ran out, in a sentence.

    Attributes:
        saved: whether the state that the run had is in its last checkpoint.
    """

    def __init__(self, text: str, *, saved: bool) -> None:
        super().__init__(text)
        self.saved = saved


def asked_for(error: BaseException) -> str | None:
    """What did not fit, in a few words; None of any other error."""
    text = str(error)
    # On a CPU it has no class of its own.
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and (
        "DefaultCPUAllocator" not in text
    ):
        return None
    found = re.search(r"tried to allocate [0-9.]+ \w+", text, re.IGNORECASE)
    return found[0].lower().replace("gib", "GiB").replace("mib", "MiB") if found else "no more fits"
