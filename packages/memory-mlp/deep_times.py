"""The scan of deep memories on a GPU: right first, then its times beside those of two layers.

    PYTHONPATH=packages/memory-mlp/src:ci/testkit/src:packages/memory-mlp \
        python packages/memory-mlp/deep_times.py [check|time|split|tune|more] ..
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
from fusewright.memory_mlp.common.deep_weights import deep_shapes, pack_deep
from fusewright.memory_mlp.common.weights import MemoryWeights, pack
from fusewright.memory_mlp.scan import (
    launch,
    launch_backward,
    launch_deep,
    launch_deep_backward,
)

B, T, HEADS, D, C = 4, 4096, 5, 64, 64
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CLOCK = time.time()


def say(*words):
    print(f"[{time.time() - CLOCK:6.1f}]", *words, flush=True)


def check():
    compare(
        (dict(layers=4), (2, 300, 3, 64, 128), BF16),
        (dict(layers=4), (1, 300, 3, 64, 256), BF16),
        (dict(layers=3), (2, 300, 3, 64, 64), BF16),
    )


def more():
    compare(
        (dict(layers=3, rests=True, masked=True, read="before"), (2, 130, 3, 40, 200), BF16),
        (dict(layers=3, activation="gelu"), (2, 130, 3, 64, 128), F16),
        (dict(layers=3), (1, 130, 2, 64, 128), F32),
    )


def compare(*cases):
    from tests.operations import DeepOp

    for options, sizes, dtype in cases:
        op = DeepOp().having(**options)
        torch.manual_seed(0)
        tensors = op.draw(*sizes, dtype, "cuda", rate=0.002)
        try:
            op.check(tensors)
            say("right", options, sizes, dtype)
        except Exception as error:
            say("WRONG", options, sizes, dtype, str(error)[:1500])
        leaves = [x.requires_grad_() for x in tensors]
        results = []
        for _ in range(3):
            outputs = op.kernels(*leaves)
            grads = torch.autograd.grad([y.float().sin().sum() for y in outputs], leaves)
            results.append([*outputs, *grads])
        same = all(
            torch.equal(x, y) for one in results[1:] for x, y in zip(one, results[0], strict=True)
        )
        say("same bits", same)


def operands(layers, hidden):
    torch.manual_seed(0)
    draw = partial(torch.randn, B, T, HEADS, D, device="cuda")
    q, k = (torch.nn.functional.normalize(draw(), dim=-1) for _ in range(2))
    rows = [x.to(BF16) for x in (q, k, draw())]
    gates = [
        least + (most - least) * torch.rand(B, T, HEADS, device="cuda")
        for least, most in ((0.0, 0.02), (0.85, 0.95), (0.0, 0.002))
    ]
    shapes = deep_shapes((B, HEADS), layers, hidden, D)
    halves = [
        [s * torch.randn(x, device="cuda") * (x[-1] ** -0.5 if len(x) == 4 else 0.1) for x in shapes]
        for s in (1.0, 0.1)
    ]
    return rows, halves, gates


def passes(layers, hidden):
    rows, halves, gates = operands(layers, hidden)
    dy = torch.randn_like(rows[0])
    if layers == 2:
        state = pack(*(MemoryWeights(*half) for half in halves))
        options = hidden, C, "silu", "after"
        forward = partial(launch.scan_forward, *rows, state, *gates, None, *options)
        run, more = launch_backward.scan_backward, (None, *options)
    else:
        state = pack_deep(*halves)
        options = layers, hidden, C, "silu", "after"
        forward = partial(launch_deep.deep_forward, *rows, state, *gates, None, None, *options)
        run, more = launch_deep_backward.deep_backward, (None, None, *options)
    y, end, states = forward()
    backward = partial(run, dy, torch.randn_like(end), *rows, state, states, *gates, *more)
    return forward, backward


def timed(call, repeats=5):
    """Milliseconds in a graph, and of the host's clock."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / repeats * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))
    return times[len(times) // 2], wall


def clock(sizes=((64, (2, 3, 4)), (128, (2, 3, 4)), (256, (2, 3, 4)))):
    for hidden, depths in sizes:
        base = {}
        for layers in depths:
            torch.cuda.reset_peak_memory_stats()
            forward, backward = passes(layers, hidden)
            found = {name: timed(x) for name, x in (("fwd", forward), ("bwd", backward))}
            base = base or {name: x for name, (x, _) in found.items()}
            text = " ".join(
                f"{name} {x:.3f} ms ({x / base[name]:.2f}x, wall {wall:.3f})"
                for name, (x, wall) in found.items()
            )
            both = sum(x for x, _ in found.values())
            peak = torch.cuda.max_memory_allocated() >> 20
            say(f"hidden={hidden} layers={layers} {text} both {both:.3f} "
                f"({both / sum(base.values()):.2f}x, wanted {layers / 2 * 1.3:.2f}x) {peak} MiB")
            del forward, backward


def split(sizes=((4, 128), (4, 256))):
    """Time by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for layers, hidden in sizes:
        for name, call in zip(("fwd", "bwd"), passes(layers, hidden), strict=True):
            call()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                call()
                torch.cuda.synchronize()
            rows = sorted(found.key_averages(), key=lambda x: -x.device_time_total)
            for row in rows[:10]:
                each = row.device_time_total / row.count
                say(f"layers={layers} hidden={hidden} {name} {row.key[:40]:40s} {row.count:5d} x "
                    f"{each:8.2f} us = {row.device_time_total / 1e3:.3f} ms")


def tune():
    """Forward and backward with other lines of ROWS."""
    for hidden in (128, 256):
        for tokens, loaded, stages, warps in (
            (16, 32, 3, 4), (16, 32, 3, 8), (32, 32, 3, 8),
        ):
            line = launch_deep.RowsConfig(tokens, loaded << 10, stages, warps)
            launch_deep.ROWS = launch_deep_backward.ROWS = line
            launch_deep.forward_plan.cache_clear()
            launch_deep_backward.backward_plan.cache_clear()
            try:
                found = [timed(x)[0] for x in passes(4, hidden)]
                say(f"hidden={hidden} {line} fwd {found[0]:.3f} bwd {found[1]:.3f}")
            except Exception as error:
                say(f"hidden={hidden} {line} {str(error)[:200]}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"check": check, "more": more, "time": clock, "split": split, "tune": tune}[name]()
