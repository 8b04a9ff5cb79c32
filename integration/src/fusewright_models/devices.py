"""The device that a command line names, and what it can do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Dense TFLOPS in bf16 of data sheets, by what the GPU's name has in it; the first that it has.
PEAKS = {"A100": 312.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "H200": 989.4}


def checked_device(name: str) -> torch.device:
    """The device of that name, once something could be put on it.

    Raises:
        ValueError: it is neither the CPU nor a CUDA device that torch can use here.
    """
    check_device_name(name)
    return usable_device(name, asked_by="--device")


def check_device_name(name: str) -> None:
    """
    Raises:
        ValueError: it is neither that of the CPU nor of a CUDA device, or torch sees none of those.
    """
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N; got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a CUDA device, and torch sees none")


def usable_device(device: torch.device | str, *, asked_by: str = "device") -> torch.device:
    """That device, once something could be put on it.

    Args:
        device: any of torch's.
        asked_by: what names it, for the error.

    Raises:
        ValueError: torch cannot use it here.
    """
    try:
        return torch.zeros((), device=device).device
    # A torch without CUDA asserts that it has it.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"wanted a {asked_by} that torch can use here; got {device}: {reason_of(error)}"
        ) from error


def reason_of(error: BaseException) -> str:
    """The lines below the first are advice to programmers."""
    return str(error).partition("\n")[0]


def wait_for(device: torch.device) -> None:
    """Until it has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync: the host takes the time


def peak_tflops(device: torch.device) -> float | None:
    """Of a GPU of that kind; None of others."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has had so far: of tensors on a GPU, of everything on a CPU;
    None where the system does not say. It waits for nothing.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not every system has it.
        import resource
    except ModuleNotFoundError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, **options: Any) -> Iterator[None]:
    """What is launched within goes to the graph of that device, which is the current one
    meanwhile, and is not run.

    Args:
        options: of `torch.cuda.graph`; without a stream one of that device captures.

    Raises:
        RuntimeError: something within cannot be captured. Random numbers are drawn on as if it had
            not been tried.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    state = generator.clone_state()
    # That of `torch.cuda.graph` is of the device that was current when a first graph was captured.
    options.setdefault("stream", torch.cuda.Stream(index))
    collects = gc.isenabled()
    # No cycles of other work, graphs among them, are let go of meanwhile: a capture does not bear
    # that the device is asked to free something.
    gc.disable()
    try:
        with torch.cuda.device(index), torch.cuda.graph(graph, **options):
            yield
    except RuntimeError:
        # The state that a broken capture has used stays one that captures, and draws no more.
        generator.graphsafe_set_state(state)
        raise
    finally:
        if collects:
            gc.enable()
