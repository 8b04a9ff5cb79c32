"""The rule by fla-core, which the extra ``[fla]`` installs, and when it serves a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
import re
from importlib.machinery import ModuleSpec
from typing import Any

import torch

Tensor = torch.Tensor

FLA_DTYPES = (torch.bfloat16, torch.float16)
FLA_WIDEST_KEY = 256
# fla's issue 640: triton compiled its backward pass wrongly for Hopper from 3.4.0 on, and correctly
# again from 3.7.1 on. In between fla raises, unless tilelang is installed to compute it.
REFUSED_FROM, REFUSED_BELOW = (3, 4, 0), (3, 7, 1)


def fla_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The rule and the state after the last token; gradients are fla's own."""
    function: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return function(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )


def fla_obstacle(q: Tensor, differentiates: bool) -> str | None:
    """Why fla cannot serve a call; None where it can."""
    if not has_fla():
        return "fla-core is not installed, which the extra [fla] asks for"
    if not q.is_cuda:
        return f"tensors are on {q.device}, fla needs CUDA"
    if q.dtype not in FLA_DTYPES:
        return f"fla takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] > FLA_WIDEST_KEY:
        return f"fla takes keys of up to {FLA_WIDEST_KEY} columns, not {q.shape[-1]}"
    if differentiates and refuses_backward(q.device):
        return (
            "fla refuses its backward pass on Hopper with a triton from 3.4.0 to below 3.7.1, "
            "whose gradients were wrong (its issue 640), and without tilelang"
        )
    return None


@functools.cache
def refuses_backward(device: torch.device) -> bool:
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return hopper and REFUSED_FROM <= triton_version() < REFUSED_BELOW and not spec_of("tilelang")


def triton_version() -> tuple[int, ...]:
    """The version that fla reads: triton's own, since its distribution has several names."""
    version: str = importlib.import_module("triton").__version__
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@functools.cache
def has_fla() -> bool:
    """Whether fla-core is installed, found without an import. Other packages have its name too."""
    spec = spec_of("fla")
    folders = (spec and spec.submodule_search_locations) or ()
    return any((pathlib.Path(folder) / "ops" / "gated_delta_rule").is_dir() for folder in folders)


def spec_of(package: str) -> ModuleSpec | None:
    """Of a package that can be imported; None where it cannot."""
    try:
        return importlib.util.find_spec(package)
    except ValueError:
        # sys.modules[package] is None: the package is switched off in this process.
        return None
