"""The private names of torch and Triton that the core uses: all of them stand here.

A release may take any of them away. Each is looked up once; where one is missing, the core does
without it, slower: an op is called through torch's dispatcher, memory is allocated by
``torch.empty``, and kernels are launched by Triton's own dispatch and compiled one after the other.
One warning in a process names what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from concurrent.futures import Executor
from typing import Any

import torch

# What an op needs to be registered as its own Autograd kernel and to skip the dispatcher.
REGISTRATION = (
    ("torch._C", "_AutoDispatchBelowAutograd"),
    ("torch._C", "_any_requires_grad"),
    ("torch._C", "_are_functorch_transforms_active"),
    ("torch._C", "_has_storage"),
    ("torch._C", "_is_tracing"),
    ("torch._C", "_len_torch_dispatch_stack"),
    ("torch._C", "_len_torch_function_stack"),
    ("torch._functorch.utils", "enable_single_level_autograd_function"),
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch.autograd.forward_ad", "_set_fwd_grad_enabled"),
    ("torch.autograd.function", "_SingleLevelFunction"),
)
# What says whether a layer may be computed without a call of it.
LAYERS = (("torch.nn.modules.module", "_has_any_global_hook"),)
# What a planned launch needs. torch's compiler allocates with the first one of each, in a third of
# the time of torch.empty.
LAUNCHES = (("torch._C._dynamo.guards", "_empty_strided_cpu"),)
CUDA_LAUNCHES = (
    ("torch._C._dynamo.guards", "_empty_strided_cuda"),
    ("torch._C", "_cuda_getCurrentRawStream"),
    ("torch._C", "_cuda_getDevice"),
)
# Attributes of torch and Triton that are read or set on objects and cannot be looked up here:
# ``_dynamo_marked_constant`` of functions, ``_autograd_function_id`` and ``_compiled_autograd_key``
# of autograd Functions; the dictionaries of hooks, parameters and children of modules,
# and the names of their buffers that are not persistent; hooks of tensors; ``run``,
# ``function`` and ``packed_metadata`` of Triton's compiled kernels, ``calls``, ``add`` and
# ``remove`` of ``triton.knobs.runtime.launch_enter_hook`` and ``calls`` of ``launch_exit_hook``;
# ``warmup`` of Triton's jitted functions; ``launcher_cls`` of ``triton.runtime.driver.active``, and
# ``src`` and ``metadata`` of compiled kernels.
COMPILED_KERNEL = ("run", "function", "packed_metadata")


def find(module: str, name: str) -> Any:
    """The object of that name; None, with a warning, where there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        warn_missing(f"{module}.{name}")
        return None


def warn_missing(name: str) -> None:
    """Say that a name is missing, the first time that any is in this process."""
    # Every package has its own copy of this module: torch's registry of warnings is the process's.
    warnings.warn_explicit(
        f"torch {torch.__version__} or its triton lacks a private name that fusewright uses, "
        f"{name}: calls are right but slower; please report it",
        RuntimeWarning,
        filename="fusewright",
        lineno=1,
        registry=torch.__dict__.setdefault("__warningregistry__", {}),
    )


# A torch without CUDA lacks the last three, and needs none of them.
WANTED = (
    REGISTRATION + LAYERS + LAUNCHES + (CUDA_LAUNCHES if torch.backends.cuda.is_built() else ())
)
FOUND = {name: find(module, name) for module, name in WANTED}
# Whether ops are their own Autograd kernels and may skip the dispatcher.
REGISTERS_AUTOGRAD = all(FOUND[name] is not None for _, name in REGISTRATION)


@functools.cache
def launch_hooks() -> tuple[Any, Any] | None:
    """What Triton calls before and after each launch; None where this triton has no such hooks."""
    try:
        runtime = importlib.import_module("triton.knobs").runtime
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        if all(hasattr(hook, "calls") for hook in hooks):
            return hooks
    except (ImportError, AttributeError):
        pass
    warn_missing("triton.knobs.runtime.launch_enter_hook.calls")
    return None


def compiles_in(pool: Executor) -> contextlib.AbstractContextManager:
    """In this context the pool compiles what Triton is asked to compile; where this triton cannot
    have it so, one kernel is compiled after the other.
    """
    try:
        return importlib.import_module("triton").AsyncCompileMode(pool)
    except (ImportError, AttributeError):
        warn_missing("triton.AsyncCompileMode")
        return contextlib.nullcontext()


def build_launcher(compiled: Any) -> None:
    """Have Triton leave in its cache what it compiles to launch a kernel, if it compiles anything
    for that; where this triton cannot have it so, it does when it loads the kernel.
    """
    try:
        of_kernel = compiled.src, compiled.metadata
        make = importlib.import_module("triton.runtime").driver.active.launcher_cls
    except (ImportError, AttributeError):
        warn_missing("triton.runtime.driver.active.launcher_cls")
        return
    # Not kept: it may be another kernel's, as `compile_side_by_side` says.
    make(*of_kernel)


def can_rerun(compiled: Any) -> bool:
    """Whether a compiled kernel of Triton has what a repeated launch needs."""
    missing = [name for name in COMPILED_KERNEL if not hasattr(compiled, name)]
    for name in missing:
        warn_missing(f"triton's compiled kernel .{name}")
    return not missing
