"""What one call of a style, and one Triton launch, costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from registration_op import EPS, allocate_forward, forward_kernel
from torch import Tensor

Call = Callable[[Tensor, Tensor], Tensor]


def microseconds(step: Callable[[], object], calls: int = 200, repeats: int = 25) -> float:
    """Median over the repeats of the mean host time of one call."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        times.append((time.perf_counter() - start) / calls)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return 1e6 * statistics.median(times[3:])


CALLS = ("forward, no grad", "forward", "forward + backward")


def call_cost(
    call: Call, name: str, device: str, shape: tuple[int, int], dtype: torch.dtype
) -> float:
    inputs = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
    x, weight = (t.to(dtype).requires_grad_() for t in inputs)
    dy = torch.randn_like(x)
    if name == "forward + backward":
        return microseconds(lambda: torch.autograd.grad(call(x, weight), (x, weight), dy))
    with torch.set_grad_enabled(name == "forward"):
        return microseconds(lambda: call(x, weight))


def launch_steps() -> dict[str, Callable[[], object]]:
    """One Triton launch, through JIT dispatch and from the compiled kernel; and its allocations."""
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    y, rstd = allocate_forward(x, weight, EPS)
    kernel, args, grid = forward_kernel, (x, weight, y, rstd, EPS, 1024), (1024, 1, 1)
    compiled = kernel[grid](*args, BLOCK=1024)
    stream = torch.cuda.current_stream().cuda_stream
    head = (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None)
    return {
        "launch: kernel[grid](...)": lambda: kernel[grid](*args, BLOCK=1024),
        "launch: compiled[grid](...)": lambda: compiled[grid](*args, 1024),
        "launch: compiled.run(...)": lambda: compiled.run(*head, *args, 1024),
        "launch: allocation of y and rstd": lambda: allocate_forward(x, weight, EPS),
        "launch: current_stream().cuda_stream": lambda: torch.cuda.current_stream().cuda_stream,
    }
