"""Which implementation serves a call: the Triton kernels or the plain torch reference."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import torch

Backend = Literal["auto", "triton", "reference"]
BACKENDS = ("auto", "triton", "reference")
Function = TypeVar("Function", bound=Callable)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWEST_CAPABILITY = (8, 0)

WARNED: set[str] = set()


def available_backends() -> tuple[str, ...]:
    """What this machine can run: always "reference"; "triton" with a supported GPU or under
    ``TRITON_INTERPRET=1``.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = triton_obstacle(torch.device(device), torch.float32)
    return ("reference",) if reason else ("triton", "reference")


def uses_triton(x: torch.Tensor, backend: Backend) -> bool:
    """Whether the kernels serve a call on ``x``.

    "auto" takes them for CUDA tensors and, where they cannot serve, the reference with one warning
    per reason.

    Raises:
        ValueError: backend is none of the three.
        RuntimeError: backend is "triton" and the kernels cannot serve this tensor here; the message
            says why.
    """
    if backend == "reference" or (backend == "auto" and (x.is_cpu or x.is_meta)):
        return False
    check_backend(backend)
    compiling = torch.compiler.is_compiling()
    obstacle = (triton_obstacle if compiling else known_obstacle)(x.device, x.dtype)
    if obstacle is None:
        return True
    decline(obstacle, backend)
    return False


def decline(obstacle: str, backend: Backend) -> None:
    """Say why the kernels cannot serve a call: raise for "triton", warn once for "auto"."""
    if backend == "triton":
        raise RuntimeError(f'backend="triton" cannot serve this call: {obstacle}')
    warn_once(obstacle)


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f'backend must be "auto", "triton" or "reference", got {backend!r}')


def constant_when_compiled(function: Function) -> Function:
    """Decorator: torch.compile calls the function once and keeps what it returned.

    What torch.compiler.assume_constant_result does, without its import of the whole compiler and
    of triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve tensors of this device and dtype; None where they can."""
    return known_obstacle(device, dtype)


@functools.cache
def known_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if not has_triton():
        return "triton is not installed"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {dtype}"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "this machine has no CUDA device"
        if torch.version.hip is not None:
            # torch calls them "cuda" too, and their architectures' numbers are large enough.
            return f"torch is built for HIP {torch.version.hip}, the kernels need CUDA"
        capability = torch.cuda.get_device_capability(device)
        if capability < LOWEST_CAPABILITY:
            return f"{device} has compute capability {capability}, the kernels need (8, 0) or more"
        return None
    if device.type == "cpu" and interpreted():
        return None
    return f"tensors are on {device}, the kernels need CUDA, or the CPU with TRITON_INTERPRET=1"


@functools.cache
def interpreted() -> bool:
    """Whether triton runs its kernels in the interpreter, on CPU tensors: as the environment said
    when the package was imported.
    """
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:
        # sys.modules["triton"] is None: triton is switched off in this process.
        return False


@constant_when_compiled
def warn_once(obstacle: str) -> None:
    """Say why "auto" took the reference, the first time that a reason occurs."""
    if obstacle not in WARNED:
        WARNED.add(obstacle)
        warnings.warn(f"the reference serves this call: {obstacle}", RuntimeWarning, stacklevel=5)


class DeviceProperties(NamedTuple):
    """What a launch depends on of its device."""

    multiprocessors: int
    # Shared memory that one program may take.
    shared_bytes: int
    # 90 for compute capability 9.0.
    capability: int


@functools.cache
def device_properties(device: torch.device) -> DeviceProperties:
    """The GPU that serves tensors on ``device``; for the interpreter a small one, on which several
    programs run.
    """
    if device.type != "cuda":
        return DeviceProperties(multiprocessors=2, shared_bytes=99 << 10, capability=90)
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceProperties(gpu.multi_processor_count, shared_bytes, 10 * gpu.major + gpu.minor)
