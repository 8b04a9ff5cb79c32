"""Three clocks: a replayed CUDA graph, device events around one call, and the host's wall clock.

Below 100 microseconds the host is slower than the kernels, so events measure Python; the graph
measures the GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# A graph walks through copies of its inputs that together exceed the L2 cache (60 MB on an H200)
# several times, so that no call finds its operands there.
COLD_BYTES = 512 << 20
MIN_COPIES = 4
MAX_COPIES = 64

# So many calls in one graph hide what starting the graph itself takes; long ones need no hiding.
CALLS_IN_GRAPH = 16
LONG_SECONDS = 1e-3

# What one round of wall-clock calls may take.
ROUND_SECONDS = 0.1


class Time(NamedTuple):
    """Milliseconds of one call: median, 20th and 80th percentile."""

    ms: float
    ms_p20: float
    ms_p80: float


def summary(samples: Sequence[float]) -> Time:
    """Median and the 20th and 80th percentile of at least two samples."""
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Time(statistics.median(samples), fifths[0], fifths[3])


def copies_needed(bytes_of_one_call: int) -> int:
    """How many copies of a call's tensors push one another out of the cache."""
    return max(MIN_COPIES, min(MAX_COPIES, -(-COLD_BYTES // max(bytes_of_one_call, 1))))


def graph_time(
    calls: Sequence[Callable[[], object]],
    replays: int = 25,
    stream: torch.cuda.Stream | None = None,
    warm_seconds: float = 0.1,
) -> Time:
    """Time of one call on the GPU, from replays of a CUDA graph that holds all ``calls`` one after
    the other.

    The results of the calls stay alive until the capture ends, so that each writes to memory of its
    own. A backward pass runs on the stream of its forward pass: ``stream`` is that one.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        if seconds_of(lambda: [call() for call in calls]) < LONG_SECONDS * len(calls):
            calls = [*calls] * -(-CALLS_IN_GRAPH // len(calls))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    # A GPU that has just done other work takes a while to come back to its clocks.
    warm = time.perf_counter() + warm_seconds
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    samples = [start.elapsed_time(end) / len(calls) for start, end in events]
    del kept
    graph.reset()
    return summary(samples)


def event_time(call: Callable[[], object]) -> Time:
    """Time of one call between two device events, the L2 cache flushed before each."""
    import triton.testing

    found = triton.testing.do_bench(call, warmup=20, rep=80, quantiles=[0.5, 0.2, 0.8])
    return Time(*found)


def wall_time(call: Callable[[], object], calls: int = 200, rounds: int = 11) -> Time:
    """Host time of one eager call in a long run of them, the GPU's own work included; of fewer
    than ``calls`` where these would take long.
    """
    for _ in range(3):
        call()
    calls = max(1, min(calls, int(ROUND_SECONDS / seconds_of(call))))
    seconds_of(lambda: [call() for _ in range(min(calls, 20))])
    rounds_of = [seconds_of(lambda: [call() for _ in range(calls)]) for _ in range(rounds)]
    return summary([seconds * 1e3 / calls for seconds in rounds_of])


def seconds_of(work: Callable[[], object]) -> float:
    """What the host waits for some work, the GPU's included."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start
