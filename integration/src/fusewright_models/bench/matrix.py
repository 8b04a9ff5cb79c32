"""Every provider with and without checkpointing and CUDA graphs: what a step of TransformerNP takes
and keeps, and how much faster it is than on torch's attention.

    none             everything is kept for the backward pass
    block            blocks are computed again
    keep-attention   blocks but for their attention are computed again

Times of graphs are those of one replay. What runs out of memory, fails, or needs what is not here
has a row that says so.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..choices import Checkpointing
from ..devices import peak_tflops
from .harness import Line
from .providers import Provider
from .results import gib, keep_beside, mib, table_of
from .shapes import Shape, operations
from .step import Measurement
from .transformer_np import TransformerNPHarness

# Of a file of its own: rows may be of what was not measured.
NAMED = ["case", "provider", "checkpointing", "timing"]
COLUMNS = [*NAMED, "attention", "ms", "ms_p20", "ms_p80", "tflops", "mfu", "mem_mib", "note"]
# What times are compared with: all of it kept, eager.
AGAINST = ("sdpa", "none", "wall")
# Beyond so many context rows the host's share of a step is nothing that a graph could save.
MOST_ROWS_OF_GRAPHS = 100_000


class MatrixHarness(NamedTuple):
    """Measures the matrix.

    Attributes:
        harness: everything but checkpointing and graphs.
        checkpointings: of them.
        graphs: whether steps are replayed too.
    """

    harness: TransformerNPHarness
    checkpointings: Sequence[Checkpointing]
    graphs: bool

    def bench(self, shape: Shape, providers: list[Provider]) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        harness, against = self.harness, self.before(shape)
        expected = harness.known(shape)
        numbers = ("tokens/s", "ms", "TFLOPS", "MFU", "GiB", f"times {AGAINST[0]}")
        caption = "a step; TFLOPS without what is computed again"
        names = ("provider", "checkpointing", "timing")
        table = table_of(shape.case, caption, names, numbers)

        def line_of(provider: Provider, checkpointing: Checkpointing, timing: str) -> Line:
            config = replace(harness.config, checkpointing=checkpointing)
            one, named = replace(harness, config=config), (provider.name, checkpointing, timing)

            def keep(*values: str) -> None:
                found = (shape.case, *named, *values)
                keep_beside(harness.file, "matrix", COLUMNS, found, len(NAMED))

            def told(measured: Measurement) -> list[str]:
                nonlocal against
                ms = measured.step.ms
                against = ms if named == AGAINST else against
                rate, share = self.rates(shape, ms)
                times = (f"{each:.4f}" for each in measured.step)
                memory = measured.memory_mib
                keep(measured.attention, *times, f"{rate:.1f}", share, mib(memory), "")
                speed = f"{1e3 * shape.tokens / ms:,.0f}", f"{ms:,.2f}", f"{rate:.0f}"
                times_of = "" if against is None else f"{against / ms:.2f}"
                return [*speed, share, gib(memory, 2), times_of]

            def failed(reason: str) -> None:
                keep("", "", "", "", "", "", "", reason)

            def measure() -> Measurement:
                return one.measure(shape, provider, timing, expected)

            return Line(named, provider.ours, measure, told, failed)

        lines = [
            line_of(provider, checkpointing, timing)
            for provider in providers
            for checkpointing in self.checkpointings
            for timing in self.timings(shape, provider)
        ]
        return harness.tabulate(table, lines)

    def timings(self, shape: Shape, provider: Provider) -> tuple[str, ...]:
        """What is captured anyway is timed by its graph alone."""
        own = self.harness.timings(provider)
        if not self.graphs or shape.context > MOST_ROWS_OF_GRAPHS:
            return tuple(timing for timing in own if timing == "wall")
        gpu = self.harness.device.type == "cuda"
        return own if provider.captured or not gpu else (*own, "graph")

    def rates(self, shape: Shape, ms: float) -> tuple[float, str]:
        """TFLOPS, and its share of what the GPU could do."""
        rate = operations(self.harness.config, shape)["step"] / ms / 1e9
        peak = peak_tflops(self.harness.device)
        return rate, "" if peak is None else f"{rate / peak:.3f}"

    def before(self, shape: Shape) -> float | None:
        """What times are compared with, where the result file has it from an earlier run."""
        file = self.harness.file
        path = None if file is None else file.with_name(f"matrix-{file.name}")
        if path is None or not path.exists():
            return None
        with path.open(newline="") as rows:
            for row in csv.DictReader(rows):
                if tuple(row[name] for name in NAMED) == (shape.case, *AGAINST) and row["ms"]:
                    return float(row["ms"])
        return None
