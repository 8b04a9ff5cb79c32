"""The launches of attention and their candidates: ``python -m fusewright_testkit.tune attention``.

The fastest lines go to ``launch.py`` and ``launch_backward.py`` of their family.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from fusewright.attention import rectangular_attention, sliding_window_attention
from fusewright.attention.common.problem import TileConfig
from fusewright.attention.rectangular import launch as forward
from fusewright.attention.rectangular import launch_backward as backward
from fusewright.attention.rectangular import reference as rectangular_reference
from fusewright.attention.rectangular.launch import SingleTileConfig
from fusewright.attention.window import launch as window
from fusewright.attention.window import reference as window_reference
from fusewright.attention.window.launch import Band
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, described
from fusewright_testkit.tune import Tuning, lines


class Size(NamedTuple):
    """B tasks, Nq queries, M keys, H heads of width D; and what of the keys a row sees."""

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    band: Band | None = None

    @property
    def pairs(self) -> int:
        """How many keys the rows of a head see together."""
        if self.band is None:
            return self.queries * self.keys
        length, prefix, every = self.band
        tokens = self.keys - prefix
        seen = (max(0, tokens - every * later) for later in range(self.queries))
        return sum(min(length, keys) for keys in seen) + self.queries * prefix

    @property
    def named(self) -> dict[str, int]:
        sizes = {name: x for name, x in self._asdict().items() if name != "band"}
        return sizes | (self.band._asdict() if self.band else {})

    @property
    def small(self) -> Size:
        """At which candidates are checked: of numbers that divide by 16 just where those that are
        timed do, for which all is compiled.
        """
        if self.band is None:
            queries, keys = 96 + self.queries % 16, min(self.keys, 192 + self.keys % 16)
            return self._replace(batches=2, queries=queries, keys=keys)
        tokens = self.band.window + 320
        keys = self.band.prefix + tokens if self.band.every > 1 else tokens
        return self._replace(batches=2, queries=tokens // self.band.every, keys=keys)

    def inputs(self, device: str) -> list[torch.Tensor]:
        """q, k and v."""
        rows = self.queries, self.keys, self.keys
        draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        return [draw(self.batches, length, self.heads, self.width) for length in rows]


class Kind(NamedTuple):
    """A launch: its table, how many products of all pairs of rows with D it computes, its kernels,
    and the sizes at which it is timed.
    """

    module: ModuleType
    table: str
    products: int
    kernels: tuple[str, ...]
    sizes: tuple[Size, ...]


STREAMING_SIZES = (
    Size(4, 11000, 10000, 8, 64),
    Size(4, 5500, 5000, 8, 128),
    Size(4, 5500, 5000, 8, 32),
)
SINGLE_SIZES = (
    Size(256, 564, 64, 8, 64),
    Size(256, 564, 128, 8, 64),
    Size(256, 564, 128, 8, 128),
    Size(256, 564, 64, 8, 32),
)
WINDOW_SIZES = (
    Size(4, 4096, 4096, 8, 64, Band(512, 0)),
    Size(4, 4096, 4096, 8, 40, Band(512, 16)),
    Size(4, 4096, 4096, 4, 128, Band(512, 16)),
    Size(4, 4096, 4096, 8, 32, Band(512, 16)),
    # A segment of TitanMAC.
    Size(4, 512, 1040, 8, 40, Band(1024, 16, every=2)),
)
KINDS = {
    "forward": Kind(forward, "FORWARD", 2, ("streaming_forward_kernel",), STREAMING_SIZES),
    "dq": Kind(backward, "DQ", 3, ("streaming_dq_kernel",), STREAMING_SIZES),
    "dkdv": Kind(backward, "DKDV", 4, ("streaming_dkdv_kernel",), STREAMING_SIZES),
    "window_forward": Kind(window, "FORWARD", 2, ("window_forward_kernel",), WINDOW_SIZES),
    "window_dq": Kind(window, "DQ", 3, ("window_dq_kernel",), WINDOW_SIZES),
    "window_dkdv": Kind(
        window, "DKDV", 4, ("window_dkdv_kernel", "add_chunks_kernel"), WINDOW_SIZES
    ),
    "single_forward": Kind(
        forward, "SINGLE_TILE_FORWARD", 2, ("single_tile_forward_kernel",), SINGLE_SIZES
    ),
    "single_backward": Kind(
        backward, "SINGLE_TILE_BACKWARD", 5, ("single_tile_backward_kernel",), SINGLE_SIZES
    ),
}


def tunings() -> list[Tuning]:
    return [tuning(kind, size) for kind in KINDS for size in KINDS[kind].sizes]


def tuning(kind: str, size: Size) -> Tuning:
    module, table, products, kernels, _ = KINDS[kind]
    op: Callable[..., torch.Tensor] = rectangular_attention
    reference = rectangular_reference.rectangular_attention
    if size.band is not None:
        band = size.band._asdict()
        op = functools.partial(sliding_window_attention, **band)
        reference = functools.partial(window_reference.sliding_window_attention, **band)
    # Of the columns of all heads, an operation of one product and two bytes of q, o, k and v.
    columns = 2 * size.batches * size.heads * size.width
    moved = (2 * columns * (size.queries + keys) for keys in (size.keys, 2 * size.keys))
    work = products * columns * size.pairs
    return Tuning(
        names=dict(kind=kind, case=described(size.named)),
        case=Case(
            op="sliding_window_attention" if size.band else "rectangular_attention",
            sizes=size.named,
            dtype=torch.bfloat16,
            reference=functools.partial(reference, scale=size.width**-0.5),
            inputs=size.inputs,
            sample=size.small.inputs,
            bytes_moved=by_pass(*moved),
            flops=by_pass(work, work),
        ),
        op=functools.partial(op, backend="triton"),
        module=module,
        candidates=lines(candidates(kind, size), table, table=True),
        backward=not kind.endswith("forward"),
        kernels=kernels,
        rate="tflops",
    )


def candidates(kind: str, size: Size) -> list[TileConfig | SingleTileConfig]:
    """Lines of a launch table for one size."""
    limits = dict(max_width=size.width, max_bytes=2)
    if kind.startswith("single"):
        return [
            SingleTileConfig(
                size.keys, **limits, queries=queries, num_warps=warps, num_stages=stages
            )
            for queries, warps, stages in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4))
        ]
    found: list[TileConfig | SingleTileConfig] = []
    for queries, keys, warps, stages in itertools.product(
        (32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
    ):
        streamed, kept = (queries, keys) if kind.endswith("dkdv") else (keys, queries)
        if kept >= 64 and streamed <= kept and 2048 <= queries * keys // (warps // 4) <= 16384:
            line = TileConfig(
                **limits, queries=queries, keys=keys, num_warps=warps, num_stages=stages
            )
            found.append(line)
            # They cost the host time at every call, and a band is read by short launches.
            if size.band is None:
                found.append(line._replace(hopper=True, descriptors=True))
    return found
