"""The rule by fla-core, which the extra ``[fla]`` installs, and when it serves a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from .._core.version import triton_version

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
    """The rule and the state after the last token; gradients are fla's own.

    fla allocates o and gradients and writes the tokens of sequences alone: those before the first
    and after the last sequence are set to zero here.
    """
    function: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    options: dict[str, Any] = dict(scale=scale, initial_state=state, output_final_state=True)
    if cu_seqlens is None:
        o, end = function(q, k, v, g, beta, **options, cu_seqlens=None)
        return o, end
    token = torch.arange(q.shape[1], device=q.device)
    inside = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])
    tensors = (zero_gradients_outside(x, inside) for x in (q, k, v, g, beta))
    o, end = function(*tensors, **options, cu_seqlens=cu_seqlens.long())
    return zero_outside(o, inside), end


def zero_outside(x: Tensor, inside: Tensor) -> Tensor:
    """``[B, T, ...]``, zeros for the tokens that are not inside."""
    return torch.where(inside.view(-1, *(1,) * (x.ndim - 2)), x, 0.0)


def zero_gradients_outside(x: Tensor, inside: Tensor) -> Tensor:
    """x, whose gradient is zero for the tokens that are not inside, whatever it is handed."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(functools.partial(zero_outside, inside=inside))
    return x


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
