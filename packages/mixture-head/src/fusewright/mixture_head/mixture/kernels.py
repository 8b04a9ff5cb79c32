"""Triton kernels of the log-likelihood: values and slopes in one pass, the mean's second stage, and
the backward pass, which multiplies the slopes.

    log p(y) = logsumexp_k [ log pi_k - z_k^2 / 2 - log sigma_k - log(2 pi) / 2 ]
    d log p / dw = r - pi,              d log p / dmu = r z / sigma,
    d log p / dlog sigma = r (z^2 - 1),  d log p / dy = -sum_k r z / sigma

with z = (y - mu) / sigma and the responsibilities r = softmax(log pi + log N(y; mu, sigma)).

One thread has a row and loops over its components. The parameters of a row, (w, mu, s) of each
component, are consecutive in memory: the first load of a thread brings those that the next ones
read from the cache. Slopes are stored transposed, ``[K, 3, rows]``, so that neighbouring threads
write neighbouring numbers; the backward kernel transposes them back.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF_LOG_2_PI = tl.constexpr(0.9189385332046727)
# A finite target this many standard deviations away counts as just so far.
FAR = tl.constexpr(2.0**50)
# Where a search for a maximum starts, the lowest finite number: not at -inf, which a logit may be
# and whose distance to itself is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
# The head of log 2 has few enough bits that its products with small whole numbers are exact.
LOG_2_HEAD = tl.constexpr(0.693359375)
LOG_2_TAIL = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def exp_exact(x):
    """exp(x) to the last places for |x| up to 80; the hardware's own loses a place with each
    doubling of x.
    """
    whole = tl.floor(x * LOG2_E + 0.5)
    remainder = (x - whole * LOG_2_HEAD) - whole * LOG_2_TAIL
    return tl.exp2(whole) * tl.exp(remainder)


@triton.jit
def log1p_exact(x):
    """log(1 + x) for x from 0 to 1, small x included."""
    total = 1.0 + x
    lost = total - 1.0
    return tl.where(lost == 0.0, x, tl.log(total) * (x / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def kahan_add(total, lost, x):
    """(total + x, the rounding error of that): Kahan's sum, whose error does not grow with the
    number of additions.
    """
    x -= lost
    grown = total + x
    return grown, (grown - total) - x


@triton.jit
def scale_of(raw, low, high, eps, SOFTPLUS: tl.constexpr):
    """(log sigma, 1 / sigma, d log sigma / d raw). Comparisons, not minimum and maximum: NaN stays
    NaN.
    """
    if SOFTPLUS:
        decay = tl.exp(-tl.abs(raw))
        sigma = tl.where(raw > 0.0, raw, 0.0) + log1p_exact(decay) + eps
        sigma = tl.where(raw == raw, sigma, raw)
        log_sigma = tl.log(sigma)
        inverse = 1.0 / sigma
        slope = tl.where(raw > 0.0, 1.0, decay) / (1.0 + decay) * inverse
    else:
        log_sigma = tl.where(raw < low, low, tl.where(raw > high, high, raw))
        inverse = exp_exact(-log_sigma)
        slope = tl.where((raw >= low) & (raw <= high), 1.0, 0.0)
    return log_sigma, inverse, slope


@triton.jit
def load_component(param_ptrs, k, counts):
    """(w, mu, s) of component k of every row, in fp32."""
    w = tl.load(param_ptrs + 3 * k, mask=counts, other=0.0).to(tl.float32)
    mean = tl.load(param_ptrs + (3 * k + 1), mask=counts, other=0.0).to(tl.float32)
    raw = tl.load(param_ptrs + (3 * k + 2), mask=counts, other=0.0).to(tl.float32)
    return w, mean, raw


@triton.jit
def load_components(param_ptrs, counts, K: tl.constexpr):
    """The 3K parameters of every row, in fp32. Each load of a warp touches as many lines of the
    cache as it has rows, so an even number of parameters comes two at a time.
    """
    params: tl.tuple = ()
    if K % 2 == 0:
        pair = tl.arange(0, 2)[None, :]
        for i in tl.static_range(3 * K // 2):
            read = tl.load(param_ptrs[:, None] + (2 * i + pair), mask=counts[:, None], other=0.0)
            even, odd = tl.split(read.to(tl.float32))
            params += (even, odd)
    else:
        for i in tl.static_range(3 * K):
            params += (tl.load(param_ptrs + i, mask=counts, other=0.0).to(tl.float32),)
    return params


@triton.jit
def log_density(y, reach, mean, raw, low, high, eps, SOFTPLUS: tl.constexpr):
    """log N(y; mu, sigma) + log(2 pi) / 2 and its slopes by mu and s; ``reach``: how far a y counts
    that is past FAR.
    """
    log_sigma, inverse, raw_slope = scale_of(raw, low, high, eps, SOFTPLUS)
    # Of halves, because the difference of two finite numbers may overflow.
    z = (0.5 * y - 0.5 * mean) * inverse
    z += z
    far = tl.abs(z) > FAR
    distance = tl.where(far, reach, z)
    # Past FAR nothing depends on the distance any more.
    z = tl.where(far, 0.0, z)
    return -0.5 * distance * distance - log_sigma, z * inverse, (z * z - 1.0) * raw_slope


@triton.jit
def store_slopes(slope_ptrs, plane, within, by_w, by_mean, by_raw):
    """Store the slopes of one component, with the stride ``plane``."""
    dtype: tl.constexpr = slope_ptrs.dtype.element_ty
    tl.store(slope_ptrs, by_w.to(dtype), mask=within)
    tl.store(slope_ptrs + plane, by_mean.to(dtype), mask=within)
    tl.store(slope_ptrs + 2 * plane, by_raw.to(dtype), mask=within)


@triton.jit
def mixture_forward_kernel(
    params_ptr,
    y_ptr,
    mask_ptr,
    log_p_ptr,
    params_slope_ptr,
    y_slope_ptr,
    sums_ptr,
    counts_ptr,
    low,
    high,
    eps,
    y_stride,
    mask_stride,
    rows,
    K: tl.constexpr,
    PARAMS_STRIDE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program computes log p of BLOCK_ROWS rows and its slopes; for the mean, the sum over
    these rows and how many of them count. Components are HELD in registers, or read three times.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)
    within = first + row < rows
    counts = within
    if mask_ptr is not None:
        mask_ptrs = mask_ptr + (first + row) * mask_stride
        counts = counts & (tl.load(mask_ptrs, mask=counts, other=0) != 0)
    # Offsets inside the block are 32-bit numbers that the compiler knows: they cost nothing.
    param_ptrs = params_ptr + first * PARAMS_STRIDE + row * PARAMS_STRIDE
    y = tl.load(y_ptr + (first + row) * y_stride, mask=counts, other=0.0).to(tl.float32)

    # An infinite target has no density: log p is -inf, and its slopes are NaN.
    reach = tl.where(tl.abs(y) == float("inf"), float("inf"), FAR)

    # With a_k = w_k - max w and b_k = a_k + log N_k: log p = logsumexp(b) - logsumexp(a).
    top = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    largest = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    evidence = tl.zeros([BLOCK_ROWS], tl.float32)
    if HELD:
        read = load_components(param_ptrs, counts, K)
        for k in tl.static_range(K):
            top = tl.maximum(top, read[3 * k])
        held: tl.tuple = ()
        for k in tl.static_range(K):
            w, mean, raw = read[3 * k], read[3 * k + 1], read[3 * k + 2]
            log_n, by_mean, by_raw = log_density(y, reach, mean, raw, low, high, eps, SOFTPLUS)
            weight = tl.exp(w - top)
            joint = w - top + log_n
            total += weight
            largest = tl.maximum(largest, joint)
            held += ((weight, joint, by_mean, by_raw),)
        for k in tl.static_range(K):
            evidence += tl.exp(held[k][1] - largest)
    else:
        for k in range(K):
            w, _, _ = load_component(param_ptrs, k, counts)
            top = tl.maximum(top, w)
        lost_total = tl.zeros([BLOCK_ROWS], tl.float32)
        lost = tl.zeros([BLOCK_ROWS], tl.float32)
        for k in range(K):
            w, mean, raw = load_component(param_ptrs, k, counts)
            log_n, by_mean, by_raw = log_density(y, reach, mean, raw, low, high, eps, SOFTPLUS)
            total, lost_total = kahan_add(total, lost_total, tl.exp(w - top))
            joint = w - top + log_n
            before = largest
            largest = tl.maximum(largest, joint)
            shrunk = tl.exp(before - largest)
            evidence, lost = kahan_add(evidence * shrunk, lost * shrunk, tl.exp(joint - largest))
    log_p = largest + (tl.log(evidence) - tl.log(total)) - HALF_LOG_2_PI
    log_p = tl.where(counts, log_p, 0.0)

    if params_slope_ptr is not None:
        # r: responsibilities. Masked rows are read as zeros; their slopes are zeros.
        per_evidence = tl.where(evidence == 0.0, float("nan"), 1.0 / evidence)
        per_evidence = tl.where(counts, per_evidence, 0.0)
        per_total = tl.where(counts, 1.0 / total, 0.0)
        y_slope = tl.zeros([BLOCK_ROWS], tl.float32)
        slope_ptrs = params_slope_ptr + first + row
        plane = tl.cast(rows, tl.int64)
        if HELD:
            for k in tl.static_range(K):
                weight, joint, by_mean, by_raw = held[k]
                r = tl.exp(joint - largest) * per_evidence
                by_mean *= r
                y_slope -= by_mean
                by_w = r - weight * per_total
                store_slopes(slope_ptrs, plane, within, by_w, by_mean, r * by_raw)
                slope_ptrs += 3 * plane
        else:
            lost = tl.zeros([BLOCK_ROWS], tl.float32)
            for k in range(K):
                w, mean, raw = load_component(param_ptrs, k, counts)
                log_n, by_mean, by_raw = log_density(y, reach, mean, raw, low, high, eps, SOFTPLUS)
                r = tl.exp(w - top + log_n - largest) * per_evidence
                by_mean *= r
                y_slope, lost = kahan_add(y_slope, lost, -by_mean)
                by_w = r - tl.exp(w - top) * per_total
                store_slopes(slope_ptrs, plane, within, by_w, by_mean, r * by_raw)
                slope_ptrs += 3 * plane
        tl.store(y_slope_ptr + first + row, y_slope, mask=within)

    # Last, when the sum over the block may use the registers that held the components.
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0), tl.sum(log_p, 0))
        if counts_ptr is not None:
            tl.store(counts_ptr + tl.program_id(0), tl.sum(counts.to(tl.int32), 0))
    else:
        tl.store(log_p_ptr + first + row, log_p, mask=within)


@triton.jit
def mean_kernel(
    sums_ptr,
    counts_ptr,
    loss_ptr,
    factor_ptr,
    rows,
    parts,
    BLOCK: tl.constexpr,
):
    """One program, the only one, adds the partial sums in their order and divides by the number of
    rows that count.
    """
    sums = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.int64)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        sums += tl.load(sums_ptr + part, mask=part < parts, other=0.0).to(tl.float64)
        if counts_ptr is not None:
            counts += tl.load(counts_ptr + part, mask=part < parts, other=0).to(tl.int64)
    if counts_ptr is not None:
        count = tl.maximum(tl.sum(counts, 0), 1).to(tl.float64)
    else:
        # One row would arrive as a constant, which has no dtype to change.
        count = tl.sum(tl.full([1], rows, tl.float64), 0)
    tl.store(loss_ptr, (-tl.sum(sums, 0) / count).to(tl.float32))
    tl.store(factor_ptr, (-1.0 / count).to(tl.float32))


@triton.jit
def mixture_backward_kernel(
    upstream_ptr,
    mask_ptr,
    factor_ptr,
    params_slope_ptr,
    y_slope_ptr,
    dparams_ptr,
    dy_ptr,
    upstream_stride,
    mask_stride,
    rows,
    COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program transposes a tile of the slopes of the parameters and multiplies it by the
    upstream gradient; the programs of the first columns do so with those of y.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = tl.arange(0, BLOCK_ROWS)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    within = first + row < rows
    if factor_ptr is not None:
        upstream = tl.load(upstream_ptr).to(tl.float32) * tl.load(factor_ptr)
        upstream = tl.full([BLOCK_ROWS], 1.0, tl.float32) * upstream
    else:
        upstream_ptrs = upstream_ptr + (first + row) * upstream_stride
        upstream = tl.load(upstream_ptrs, mask=within, other=0.0).to(tl.float32)
    if mask_ptr is not None:
        # The slopes of masked rows are zeros, but times an upstream NaN they would be NaN.
        mask_ptrs = mask_ptr + (first + row) * mask_stride
        counts = tl.load(mask_ptrs, mask=within, other=0) != 0
        upstream = tl.where(counts, upstream, 0.0)

    slope_ptrs = params_slope_ptr + col.to(tl.int64)[:, None] * rows + (first + row)[None, :]
    inside = (col < COLS)[:, None] & within[None, :]
    slope = tl.load(slope_ptrs, mask=inside, other=0.0).to(tl.float32)
    dparams = tl.trans((slope * upstream[None, :]).to(dparams_ptr.dtype.element_ty))
    dparams_ptrs = dparams_ptr + first * COLS + (row[:, None] * COLS + col[None, :])
    tl.store(dparams_ptrs, dparams, mask=within[:, None] & (col < COLS)[None, :])
    if dy_ptr is not None and tl.program_id(1) == 0:
        dy = tl.load(y_slope_ptr + first + row, mask=within, other=0.0) * upstream
        tl.store(dy_ptr + first + row, dy.to(dy_ptr.dtype.element_ty), mask=within)
