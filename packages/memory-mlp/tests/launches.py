"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import functools
import os

import torch
from fusewright.memory_mlp._core.backends import DeviceProperties
from fusewright.memory_mlp._core.launches import layouts
from fusewright.memory_mlp.common.deep_weights import deep_size
from fusewright.memory_mlp.common.weights import packed_size
from fusewright.memory_mlp.inputs import launch as inputs
from fusewright.memory_mlp.inputs import launch_tokens as tokens
from fusewright.memory_mlp.read import launch as read
from fusewright.memory_mlp.scan import launch as scan
from fusewright.memory_mlp.scan import launch_backward as scan_backward
from fusewright.memory_mlp.scan import launch_deep as deep
from fusewright.memory_mlp.scan import launch_deep_backward as deep_backward
from fusewright.memory_mlp.update import launch as update
from fusewright.memory_mlp.update import launch_backward as update_backward
from fusewright.memory_mlp.update import problem as update_problem

# The GPU that is compiled for.
GPU = DeviceProperties(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
for module in (inputs, update_problem, scan_backward, deep_backward, read):
    module.device_properties = lambda device: GPU

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
    all_options: bool = False,
    row_weights: bool = True,
) -> None:
    """Forward and backward of one size; ``all_options``: a clip, the gradient of the loss and, if
    wanted, row weights.
    """
    empty = functools.partial(torch.empty, dtype=F32)
    k = torch.empty(*lead, rows, width, dtype=dtype)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    state = [empty(*lead, *shape) for _ in range(2) for shape in shapes]
    gates = [empty(lead) for _ in range(3)]
    of_rows = empty(*lead, rows) if all_options and row_weights else None
    options = 2.0, activation, 1.0 if all_options else None
    inputs = k, k, *state, *gates, of_rows
    results = update.update_forward(inputs, *options)
    # Gradients of W', and with all options of S' and of the loss.
    upstream = [*state, gates[0]] if all_options else [*state[:4], *(None,) * 5]
    saved = results[9], *results[11:]
    update_backward.update_backward(upstream, inputs, saved, *options, True, True)


def launch_many_rows(dtype: torch.dtype, activation: str) -> None:
    """An update of which Hopper has a kernel of its own: no row weights, but a clip and the
    gradient of the loss.
    """
    launch_update(
        8192, 1024, 1024, dtype, activation=activation, all_options=True, row_weights=False
    )


def with_precision(precision: str, *args, launch=launch_update, **options) -> None:
    """``launch`` while torch multiplies fp32 in this precision."""
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        launch(*args, **options)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def launch_transposes(rows: int, width: int, hidden: int) -> None:
    """What an update in TF32 transposes, forward and backward."""
    k, w1 = torch.empty(rows, width), torch.empty(hidden, width)
    h, w2 = torch.empty(rows, hidden), torch.empty(width, hidden)
    inputs = layouts(k, k, *[None] * 12)
    problem, _ = update_problem.problem_of(k.shape, hidden, inputs, "silu", "tf32", k.device)
    absent = None, None, None, None
    forward, backward = (update_problem.transpose_launch(problem, each) for each in (False, True))
    forward((k, w1, w2, *absent, k, k, w1, None, w2, w2, *absent))
    backward((k, w1, w2, k, h, w1, w2, k, k, None, w1, None, w2, k, h, w1, w2))


def one_of_each_update() -> None:
    """Every kernel of the pooled update where rows are split; in TF32, whose products take as long
    to compile, the transposes alone: ``every_update`` has the others.
    """
    launch_update(65536, 64, 128, BF16, all_options=True)
    launch_transposes(*FIRST)


def update_of_many_rows() -> None:
    launch_many_rows(BF16, "silu")


def every_update() -> None:
    """Every line of the tables, precision, activation and option, and sizes of one."""
    for size in SIZES:
        for all_options in (False, True):
            launch_update(*size, BF16, all_options=all_options)
            with_precision("tf32", *size, F32, all_options=all_options)
    for activation in ("relu", "gelu"):
        launch_update(*FIRST, BF16, activation=activation, all_options=True)
    launch_many_rows(BF16, "silu")
    launch_many_rows(BF16, "relu")
    launch_many_rows(BF16, "gelu")
    launch_update(*FIRST, F32, all_options=True)
    launch_update(*FIRST, F16, all_options=True)
    launch_update(300, 64, 256, BF16, lead=(4, 8), all_options=True)
    for size in ((1, 1, 3), (7, 5, 3), (33, 24, 40)):
        launch_update(*size, BF16, all_options=True)
        launch_update(*size, F32)
    update.update_plan.cache_clear()
    update_backward.backward_plan.cache_clear()


def launch_a_scan(
    width: int,
    hidden: int,
    dtype: torch.dtype,
    chunk: int = 64,
    activation: str = "silu",
    read_when: str = "after",
    masked: bool = False,
    clipped: bool = False,
    resting: bool = False,
    packed: bool = False,
) -> None:
    """Forward and backward of 4 rows of 5 heads; ``resting``: with a rest and a norm; ``packed``:
    with several documents in a row.
    """
    batch, tokens, heads = 4, 320, 5
    rows = torch.empty(batch, tokens, heads, width, dtype=dtype)
    state = torch.empty(batch, heads, 2, packed_size(hidden, width))
    gate = torch.empty(batch, tokens, heads)
    written = torch.empty(batch, tokens, heads, dtype=torch.bool) if masked else None
    rest = torch.empty(heads, 1, packed_size(hidden, width)) if resting else None
    resets = torch.empty(batch, -(-tokens // chunk), dtype=torch.bool) if packed else None
    options = hidden, chunk, activation, read_when, resting
    gates = gate, gate, gate, written, rest, resets
    if clipped:
        y, end, states, _, *clip = scan.clipped_forward(
            *(rows, rows, rows, state), *gates, *options, 1.0
        )
        inputs = y, end, rows, rows, rows, state, states, *clip
        scan_backward.clipped_backward(*inputs, *gates, *options, 1.0)
        return
    y, end, states, _ = scan.scan_forward(rows, rows, rows, state, *gates, *options)
    scan_backward.scan_backward(y, end, rows, rows, rows, state, states, *gates, *options)


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
        launch_a_scan(64, 256, BF16, activation=activation, read_when="before", masked=True)
    for chunk, width, hidden in ((16, 32, 64), (32, 40, 128), (48, 64, 512), (5, 3, 5)):
        launch_a_scan(width, hidden, BF16, chunk, masked=True)
    for hidden, dtype in ((128, BF16), (256, BF16), (128, F16), (128, F32)):
        launch_a_scan(64, hidden, dtype, clipped=True)
        launch_a_scan(64, hidden, dtype, resting=True, packed=True)
    launch_a_scan(64, 128, BF16, clipped=True, resting=True, packed=True)
    launch_a_scan(64, 128, BF16, resting=True)
    launch_a_scan(64, 256, BF16, masked=True, packed=True)
    launch_a_scan(3, 5, BF16, 5, clipped=True)
    launch_a_scan(33, 200, F16, clipped=True)


def launch_a_deep_scan(
    layers: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    chunk: int = 64,
    activation: str = "silu",
    read_when: str = "after",
    masked: bool = False,
    resting: bool = False,
    packed: bool = False,
) -> None:
    """Forward and backward of 4 rows of 5 heads; ``resting``: with a rest and a norm; ``packed``:
    with several documents in a row.
    """
    batch, tokens, heads = 4, 320, 5
    rows = torch.empty(batch, tokens, heads, width, dtype=dtype)
    size = deep_size(layers, hidden, width)
    state = torch.empty(batch, heads, 2, size)
    gate = torch.empty(batch, tokens, heads)
    written = torch.empty(batch, tokens, heads, dtype=torch.bool) if masked else None
    rest = torch.empty(heads, 1, size) if resting else None
    resets = torch.empty(batch, -(-tokens // chunk), dtype=torch.bool) if packed else None
    options = layers, hidden, chunk, activation, read_when, resting
    gates = gate, gate, gate, written, rest, resets
    y, end, states, _ = deep.deep_forward(rows, rows, rows, state, *gates, *options)
    deep_backward.deep_backward(y, end, rows, rows, rows, state, states, *gates, *options)


def every_deep_scan() -> None:
    """Every kernel of deeper memories at the sizes of a model, and small sizes."""
    for hidden in (128, 256):
        launch_a_deep_scan(4, 64, hidden, BF16)
    launch_a_deep_scan(3, 64, 128, BF16, resting=True)
    launch_a_deep_scan(3, 64, 128, BF16, resting=True, packed=True)
    launch_a_deep_scan(3, 64, 256, F16, activation="gelu", read_when="before", masked=True)
    launch_a_deep_scan(3, 64, 128, F32)
    launch_a_deep_scan(3, 40, 200, BF16, chunk=32, activation="relu", masked=True)
    launch_a_deep_scan(3, 3, 5, BF16, chunk=5, resting=True)


def launch_a_read(
    width: int,
    hidden: int,
    dtype: torch.dtype,
    tokens: int = 512,
    activation: str = "silu",
    halves: int = 2,
    heads: int = 5,
    wanted: tuple = ((True, True), (True, False), (False, True)),
) -> None:
    """Forward and backward of 4 rows, with both gradients, and with each alone."""
    q = torch.empty(4, heads, tokens, width, dtype=dtype).transpose(1, 2)
    state = torch.empty(4, heads, halves, packed_size(hidden, width))
    options = hidden, activation
    y = read.read_forward(q, state, *options)
    for each in wanted:
        read.read_backward(y, q, state, *options, *each)


def one_of_each_read() -> None:
    """Every kernel of the read, with tokens split among programs."""
    launch_a_read(64, 128, BF16, tokens=4096, heads=1, wanted=((True, True),))


def every_read() -> None:
    """Every line of the tables, precision and activation, and sizes of one."""
    for dtype in (BF16, F16, F32):
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
    *rows, _, last = inputs.memory_input_forward(*operands, present, *options)
    inputs.memory_input_backward(*operands, *rows, last, *options)


def launch_tokens(width: int, dtype: torch.dtype, flags: int = 5) -> None:
    """Tokens of one width, masked."""
    x = torch.empty(4, 320, width, dtype=dtype)
    mask = torch.empty(4, 320, dtype=torch.bool)
    tokens.finite_tokens(x, mask)
    tokens.finite_tokens(x, None)
    tokens.kept_tokens(x, mask.unsqueeze(-1).expand(4, 320, flags), mask, 0.0)
    tokens.kept_tokens(x, mask.unsqueeze(-1), None, 0.0)


def launch_gated(width: int, logits: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Tokens of one width and their gates, forward and backward, and counters of 5 heads."""
    x = torch.empty(4, 320, width, dtype=dtype)
    mask = torch.empty(4, 320, dtype=torch.bool)
    weight = torch.empty(logits, width, dtype=weight_dtype)
    bias = torch.empty(logits, dtype=weight_dtype)
    for some_mask in (mask, None):
        y, present, gate_logits = tokens.gated_tokens(x, weight, bias, some_mask)
    for dy in (y, None):
        tokens.gated_tokens_backward(y, present, weight, dy, gate_logits)
    counters = torch.empty(4, 5, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    written = mask.unsqueeze(-1).expand(4, 320, 5)
    tokens.count_tokens(written, *counters, mask, counters[0])
    tokens.count_tokens(written, *counters, None, None)


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
