"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import functools
import os

import torch
from fusewright.memory_mlp import (
    _input_launch,
    _read_launch,
    _scan_backward_launch,
    _update_problem,
)
from fusewright.memory_mlp._backends import Card
from fusewright.memory_mlp._input_launch import launch_memory_input, launch_memory_input_backward
from fusewright.memory_mlp._read_launch import launch_read, launch_read_backward
from fusewright.memory_mlp._scan_backward_launch import launch_scan_backward
from fusewright.memory_mlp._scan_launch import launch_scan
from fusewright.memory_mlp._token_launch import (
    launch_count_tokens,
    launch_finite_tokens,
    launch_gated_tokens,
    launch_gated_tokens_backward,
    launch_kept_tokens,
)
from fusewright.memory_mlp._update_backward_launch import (
    backward_plan,
    launch_memory_update_backward,
)
from fusewright.memory_mlp._update_launch import launch_memory_update, update_plan
from fusewright.memory_mlp.packing import packed_size

# The card that is compiled for.
CARD = Card(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
for launcher in (_input_launch, _update_problem, _scan_backward_launch, _read_launch):
    launcher.card_of = lambda device: CARD

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FIRST = (2048, 512, 512)
SIZES = (FIRST, (512, 320, 1280), (8192, 1024, 1024), (65536, 64, 128))


def launch_update(
    rows: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    lead: tuple[int, ...] = (),
    activation: str = "silu",
    every_option: bool = False,
) -> None:
    """Forward and backward of one size; ``every_option``: row weights, a clip, the gradient of the
    loss.
    """
    empty = functools.partial(torch.empty, dtype=F32)
    k = torch.empty(*lead, rows, width, dtype=dtype)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    state = [empty(*lead, *shape) for _ in range(2) for shape in shapes]
    gates = [empty(lead) for _ in range(3)]
    row_weights = empty(*lead, rows) if every_option else None
    clip = 1.0 if every_option else None
    found = launch_memory_update(k, k, *state, *gates, row_weights, 2.0, activation, clip)
    launch_memory_update_backward(
        state if every_option else [*state[:4], *(None,) * 4],
        gates[0] if every_option else None,
        k,
        k,
        state[:4],
        state[4:],
        gates,
        row_weights,
        found[9],
        found[11:15],
        found[15:],
        2.0,
        activation,
        clip,
        True,
        True,
    )


def with_precision(precision: str, *args, launch=launch_update, **options) -> None:
    """``launch`` while torch multiplies fp32 in this precision."""
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        launch(*args, **options)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def one_of_each_update() -> None:
    """Every kernel of the pooled update at the sizes of a model, and where rows are split."""
    launch_update(*FIRST, BF16)
    launch_update(65536, 64, 128, BF16, every_option=True)
    with_precision("tf32", *FIRST, F32)


def every_update() -> None:
    """Every line of the tables, precision, activation and option, and sizes of one."""
    for size in SIZES:
        for every_option in (False, True):
            launch_update(*size, BF16, every_option=every_option)
            with_precision("tf32", *size, F32, every_option=every_option)
    for activation in ("relu", "gelu"):
        launch_update(*FIRST, BF16, activation=activation, every_option=True)
    launch_update(*FIRST, F32, every_option=True)
    launch_update(*FIRST, F16, every_option=True)
    launch_update(300, 64, 256, BF16, lead=(4, 8), every_option=True)
    for size in ((1, 1, 3), (7, 5, 3), (33, 24, 40)):
        launch_update(*size, BF16, every_option=True)
        launch_update(*size, F32)
    update_plan.cache_clear()
    backward_plan.cache_clear()


def launch_a_scan(
    width: int,
    hidden: int,
    dtype: torch.dtype,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    masked: bool = False,
) -> None:
    """Forward and backward of 4 rows of 5 heads."""
    batch, tokens, heads = 4, 320, 5
    rows = torch.empty(batch, tokens, heads, width, dtype=dtype)
    state = torch.empty(batch, heads, 2, packed_size(hidden, width))
    gate = torch.empty(batch, tokens, heads)
    written = torch.empty(batch, tokens, heads, dtype=torch.bool) if masked else None
    options = hidden, chunk, activation, read
    gates = gate, gate, gate, written
    y, end, states = launch_scan(rows, rows, rows, state, *gates, *options)
    launch_scan_backward(y, end, rows, rows, rows, states, *gates, *options)


def every_scan() -> None:
    """Every kernel of the scan at the sizes of a model, every precision, activation and option, and
    small sizes.
    """
    for hidden in (128, 256):
        launch_a_scan(64, hidden, BF16)
        launch_a_scan(64, hidden, F16)
        launch_a_scan(64, hidden, F32)
        with_precision("tf32", 64, hidden, F32, launch=launch_a_scan)
    for activation in ("relu", "gelu"):
        launch_a_scan(64, 256, BF16, activation=activation, read="before", masked=True)
    for chunk, width, hidden in ((16, 32, 64), (32, 40, 128), (48, 64, 512), (5, 3, 5)):
        launch_a_scan(width, hidden, BF16, chunk, masked=True)


def launch_a_read(
    width: int,
    hidden: int,
    dtype: torch.dtype,
    tokens: int = 512,
    activation: str = "silu",
    halves: int = 2,
    heads: int = 5,
) -> None:
    """Forward and backward of 4 rows, with both gradients, and with each alone."""
    q = torch.empty(4, heads, tokens, width, dtype=dtype).transpose(1, 2)
    state = torch.empty(4, heads, halves, packed_size(hidden, width))
    options = hidden, activation
    y = launch_read(q, state, *options)
    for wanted in ((True, True), (True, False), (False, True)):
        launch_read_backward(y, q, state, *options, *wanted)


def one_of_each_read() -> None:
    """Every kernel of the read at the sizes of a model, and where programs share tokens."""
    launch_a_read(64, 128, BF16)
    launch_a_read(64, 128, BF16, tokens=4096, heads=1)


def every_read() -> None:
    """Every line of the tables, precision and activation, and sizes of one."""
    for dtype in (F16, F32):
        launch_a_read(64, 128, dtype)
        launch_a_read(64, 512, dtype, tokens=4096, heads=1)
        launch_a_read(40, 200, dtype, halves=1)
    with_precision("tf32", 64, 128, F32, launch=launch_a_read)
    with_precision("tf32", 40, 200, F32, launch=launch_a_read)
    for activation in ("relu", "gelu"):
        for dtype in (BF16, F32):
            launch_a_read(64, 256, dtype, activation=activation)
    for width, hidden in ((1, 1), (8, 16), (32, 64), (40, 200), (64, 512)):
        launch_a_read(width, hidden, BF16, tokens=65, halves=1)


def launch_an_input(
    width: int,
    dtype: torch.dtype,
    tokens: int = 320,
    taps: int = 4,
    key_norm: str | None = "l2",
    theta: float | None = None,
    history_dtype: torch.dtype = F32,
    queries: bool = False,
) -> None:
    """Forward and backward of 4 rows of 5 heads, with every gradient."""
    batch, heads = 4, 5
    channels = (1 if queries else 3) * heads * width
    joint = torch.empty(batch, tokens, channels, dtype=dtype)
    history = torch.empty(batch, max(taps - 1, 0), channels, dtype=history_dtype)
    own_taps = torch.empty(channels, taps) if taps else None
    logits = None if queries else torch.empty(batch, tokens, (2 if theta else 3) * heads)
    present = None if queries else torch.empty(batch, tokens, dtype=torch.bool)
    operands = joint, history, own_taps, logits
    options = heads, key_norm, 0.1, theta
    *rows, _, last = launch_memory_input(*operands, present, *options)
    launch_memory_input_backward(*operands, *rows, last, *options)


def launch_tokens(width: int, dtype: torch.dtype, flags: int = 5) -> None:
    """Tokens of one width, masked."""
    x = torch.empty(4, 320, width, dtype=dtype)
    mask = torch.empty(4, 320, dtype=torch.bool)
    launch_finite_tokens(x, mask)
    launch_finite_tokens(x, None)
    launch_kept_tokens(x, mask.unsqueeze(-1).expand(4, 320, flags), mask, 0.0)
    launch_kept_tokens(x, mask.unsqueeze(-1), None, 0.0)


def launch_gated(width: int, logits: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Tokens of one width and their gates, forward and backward, and counters of 5 heads."""
    x = torch.empty(4, 320, width, dtype=dtype)
    mask = torch.empty(4, 320, dtype=torch.bool)
    weight = torch.empty(logits, width, dtype=weight_dtype)
    bias = torch.empty(logits, dtype=weight_dtype)
    for given in (mask, None):
        y, present, found = launch_gated_tokens(x, weight, bias, given)
    for given in (y, None):
        launch_gated_tokens_backward(y, present, weight, given, found)
    counters = torch.empty(4, 5, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    written = mask.unsqueeze(-1).expand(4, 320, 5)
    launch_count_tokens(written, *counters, mask, counters[0])
    launch_count_tokens(written, *counters, None, None)


def one_of_each_input() -> None:
    """Every kernel before and behind the memory at the sizes of a model."""
    launch_an_input(64, BF16)
    launch_tokens(320, BF16)
    launch_gated(320, 15, BF16, F32)


def every_input() -> None:
    """Every width, dtype and option."""
    for dtype in (BF16, F16, F32):
        launch_an_input(64, dtype, history_dtype=dtype)
        launch_an_input(128, dtype, taps=8, key_norm="rms")
        launch_tokens(8192, dtype)
        launch_gated(8192, 24, dtype, F32)
        launch_gated(512, 24, dtype, dtype)
    for width in (1, 40, 64):
        launch_an_input(width, BF16, taps=0)
        launch_an_input(width, BF16, taps=1, key_norm=None, theta=0.01)
        launch_an_input(width, BF16, queries=True, history_dtype=BF16)
    launch_an_input(128, F32, taps=0, queries=True)
    launch_tokens(1, BF16, flags=1)
    launch_tokens(700, F32, flags=3)
    launch_gated(1, 1, BF16, F32)
    launch_gated(700, 2, F32, BF16)
    # As many as make the most programs.
    launch_an_input(64, BF16, tokens=1 << 16)
    launch_an_input(64, BF16, tokens=1 << 16, queries=True)
