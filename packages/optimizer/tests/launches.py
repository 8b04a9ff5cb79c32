"""Calls that launch the kernels, for the compile tests: tensors are never read. Of each kind of
optimizer one launch of every kernel, and every dtype with every option that its kernels
distinguish.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
from fusewright.optimizer import (
    M3,
    AdamW,
    DeepNestedOptimizer,
    LearnedOptimizer,
    Muon,
    UpdateMLP,
    VeLO,
    VeLONetworks,
    clip_grad_norm_,
    grad_norm,
    learned_init,
    learned_update,
)
from fusewright.optimizer._core.backends import DeviceProperties
from fusewright.optimizer.common import launch as common
from fusewright.optimizer.common.statistics import launch as statistics_launch
from fusewright.optimizer.matrix import launch_hopper

GPU = DeviceProperties(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
for module in (common, statistics_launch, launch_hopper):
    module.device_properties = lambda device: GPU
for name in (
    "common.planned_optimizer",
    "learned.learned_update",
    "matrix.matrix_optimizer",
    "nested.rates",
    "norms.grad_norm",
):
    # Launches are recorded on CPU tensors.
    sys.modules[f"fusewright.optimizer.{name}"].uses_triton = lambda x, backend: True
DTYPES = torch.float32, torch.bfloat16, torch.float16


def parameters(dtype: torch.dtype, start: int, *shapes: tuple[int, ...]) -> list:
    """With gradients; each ``start`` elements off an aligned address."""
    found = []
    for shape in shapes:
        memory = torch.empty(torch.Size(shape).numel() + start, dtype=dtype)
        p = torch.nn.Parameter(memory[start:].view(shape))
        p.grad = torch.empty_like(p)
        found.append(p)
    return found


def adamw_step(dtype: torch.dtype, start: int = 0, **options) -> None:
    (p,) = parameters(dtype, start, (4096,))
    AdamW([p], **options).step()
    clip_grad_norm_([p], 1.0)
    grad_norm([p.grad])


def adamw() -> None:
    adamw_step(torch.float32, max_grad_norm=1.0, amsgrad=True)
    adamw_step(torch.bfloat16, rounding="remainder", state_dtype=torch.float32)
    adamw_step(torch.bfloat16, rounding="stochastic")


def every_adamw() -> None:
    storage = [dict(state_dtype=x) for x in (None, torch.float32, torch.bfloat16)]
    storage += [dict(rounding=x) for x in ("remainder", "stochastic")]
    kinds = itertools.product(DTYPES, (0, 1), (False, True), (False, True), storage)
    for dtype, start, amsgrad, decoupled, kept in kinds:
        adamw_step(dtype, start, amsgrad=amsgrad, decoupled_weight_decay=decoupled, **kept)


def matrix_step(make: type, dtype: torch.dtype, start: int = 0, **options) -> None:
    """Of two matrices, and of a vector that AdamW moves."""
    *two, vector = parameters(dtype, start, (32, 128), (32, 128), (4096,))
    make([dict(params=two), dict(params=[vector], matrix=False)], **options).step()


def matrices() -> None:
    matrix_step(Muon, torch.float32)
    matrix_step(M3, torch.float32, skip_nonfinite=True)


def every_matrices() -> None:
    kinds = itertools.product(DTYPES, (0, 1), (False, True), (None, torch.bfloat16), (False, True))
    for dtype, start, skip, ns_dtype, switch in kinds:
        options = dict(skip_nonfinite=skip, ns_dtype=ns_dtype)
        matrix_step(Muon, dtype, start, nesterov=switch, **options)
        matrix_step(M3, dtype, start, relative=switch, **options)


def nested_steps(dtype: torch.dtype, start: int = 0, scaled: bool = False, **options) -> None:
    """Two steps of two groups, and a hypergradient."""
    ps = parameters(dtype, start, (2, 4096), (2, 4096))
    named = list(zip(("embed", "core"), ps, strict=True))
    optimizer = DeepNestedOptimizer(named, mode="explicit", **options)
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    for _ in range(2):
        optimizer.step(1.0)
    optimizer._mode.hypergradient(optimizer.param_groups, [p.grad for p in ps])


def nested() -> None:
    nested_steps(torch.float32, controller_update_freq=3)
    nested_steps(torch.bfloat16, controller_hidden_dim=128, scaled=True)


def every_nested() -> None:
    for dtype, start in itertools.product(DTYPES, (0, 1)):
        nested_steps(dtype, start, controller_update_freq=3)
    for hidden, layers, features in itertools.product((1, 20, 128), (1, 2, 4), ("log", "raw")):
        options = dict(controller_hidden_dim=hidden, controller_num_layers=layers)
        nested_steps(torch.float32, scaled=hidden == 20, features=features, **options)


def learned_step(dtype: torch.dtype, start: int = 0, extra: int = 0, **options) -> None:
    """Of a vector, a matrix, and one in strips."""
    ps = parameters(dtype, start, (256,), (64, 64), (64, 128))
    given = torch.empty(extra) if extra else None
    LearnedOptimizer(ps, UpdateMLP(extra), extra_features=given, **options).step()


def learned_gradient(dtype: torch.dtype, extra: int = 0) -> None:
    """The update as a function, and its backward pass."""
    ps, gs = ([torch.empty(64, size, dtype=dtype) for size in (64, 128)] for _ in range(2))
    given = [torch.empty(extra)] * 2 if extra else None
    updates, _ = learned_update(UpdateMLP(extra), ps, gs, learned_init(ps), given)
    sum(update.sum() for update in updates).backward()


def learned() -> None:
    learned_step(torch.float32, max_grad_norm=1.0)
    learned_gradient(torch.float32)


def every_learned() -> None:
    """With both kinds of products."""
    matmul = torch.backends.cuda.matmul
    for precision in ("ieee", "tf32"):
        matmul.fp32_precision = precision
        for dtype in DTYPES:
            for start in (0, 1):
                learned_step(dtype, start, extra=2)
            learned_gradient(dtype, extra=1)


def velo_step(dtype: torch.dtype, start: int = 0, **options) -> None:
    """Of a vector and a matrix."""
    ps = parameters(dtype, start, (256,), (64, 64))
    VeLO(ps, VeLONetworks(8, 4), 100, **options).step(1.0)


def velo() -> None:
    velo_step(torch.float32, max_grad_norm=1.0, weight_decay=0.1)


def every_velo() -> None:
    for dtype, start, weight_decay in itertools.product(DTYPES, (0, 1), (0.0, 0.1)):
        velo_step(dtype, start, weight_decay=weight_decay)


def products(dtype: torch.dtype = torch.bfloat16) -> None:
    """Of wide and of tall matrices, on Hopper, where alone the kernel compiles."""
    if GPU.capability == 90:
        for shape in ((1, 128, 256), (1, 256, 128)):
            x = torch.empty(shape, dtype=dtype)
            launch_hopper.chain_on_hopper(x, [(2.0, -1.5, 0.5)])


def every_products() -> None:
    for dtype in launch_hopper.DTYPES:
        products(dtype)
