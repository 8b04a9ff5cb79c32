"""What tests ask of the host beside a GPU: a call in a CUDA graph, and one that never waits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(
    call: Callable[[], Result], *, warm_up: bool = True
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a call that has run once before, for what only a first call does (it compiles, it
    plans): the graph, and the results that a replay writes to.

    Args:
        warm_up: run the call first, on a stream beside the current one, as CUDA wants it of work
            that is captured later; False where the caller has seen to it.
    """
    # One stream for both: a leaf's gradient is given on the stream that first asked for it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if warm_up:
        with torch.cuda.stream(stream):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    # What is no longer used may hold graphs, which must not be let go of during a capture.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise where torch would have the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
