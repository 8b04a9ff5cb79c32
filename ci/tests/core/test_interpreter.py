"""The tests' quicker interpreter computes what Triton's own does, and refuses what it refuses."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from fusewright_testkit.plugin import HAS_GPU
from triton.language import core

ROWS, COLUMNS = 24, 40
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@triton.jit
def add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def larger(a, b):
    return core.where(a > b, a, b)


@triton.jit
def half_of(x, factor: tl.constexpr):
    return x * 0.5 if factor == 1 else x / (2 * factor)


@triton.jit
def operations(x_ptr, y_ptr, sums_ptr, counts_ptr, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Operands of one type and of several; equal shapes, rows against columns, and numbers; whole
    numbers and pointers; reductions of Triton's and of our own.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    total = tl.zeros([R, C], tl.float32)
    for first in range(0, columns, C):
        column = first + tl.arange(0, C)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        places = row[:, None].to(tl.int64) * columns + column[None, :]
        x = tl.load(x_ptr + places, mask=there, other=0.0).to(tl.float32)
        y = tl.where(x > 0, half_of(x, 1), -half_of(x, 3)) + tl.exp2(-tl.abs(x)) * row[:, None]
        y = tl.maximum(y, tl.minimum(x + 1, 3 - x)) - column[None, :] % 3 // 2
        total += y
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=there)
    short = total.to(tl.float16)
    total += (short * 0.1 - 3 / (short + 7)) * (1 + tl.sum(short / 3, 1))[:, None]
    # A negative zero becomes a positive one.
    total += (
        tl.where(1 / (tl.zeros([R, C], tl.float32) * -0.0 - 0.0) < 0, 1, 2)
        + True
        + ((total > 0) + 1)
    )
    product = tl.dot(total, tl.trans(total))
    both, once = tl.reduce((total, total * total), 1, add_two)
    down = tl.sum(tl.reduce(product, 0, larger)) + tl.reduce(both, 0, larger)
    kept = tl.sum(tl.reduce(total, 1, larger, keep_dims=True))
    own = both + once + tl.sum(product, 1) + down + kept + tl.max(total, 1)
    tl.store(sums_ptr + row, own, mask=row < rows)
    # The highest bit set: a product of 64 bits and a shift of signed ones.
    halves = tl.sum((row[:, None] + 0.5) * (column[None, :] % 5 - 2.0), 1).to(tl.int32)
    count = (row.to(tl.uint32) * 2654435761 >> 7) ^ row.to(tl.uint32)
    tl.store(counts_ptr + row, count.to(tl.int32) // 3 + (row - 5) % 7 - halves, mask=row < rows)


def results(dtype: torch.dtype) -> list[list[int]]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS).to(dtype)
    y, sums = torch.full_like(x, 7), torch.full((ROWS,), 7.0)
    counts = torch.full((ROWS,), 7, dtype=torch.int32)
    operations[(2,)](x, y, sums, counts, ROWS, COLUMNS, 16, 32)
    assert not (y == 7).any(1).all()
    assert not (sums == 7).any()
    return [z.view(torch.uint8).flatten().tolist() for z in (y, sums, counts)]


@triton.jit
def odd_length(x_ptr):
    tl.store(x_ptr, tl.sum(tl.arange(0, 4) + tl.zeros([3], tl.int32)))


@triton.jit
def other_length(x_ptr):
    tl.store(x_ptr, tl.sum(tl.arange(0, 4) + tl.zeros([8], tl.int32)))


@triton.jit
def half_a_length(x_ptr):
    tl.store(x_ptr, tl.sum(tl.zeros([4.0], tl.int32)))


@triton.jit
def half_an_address(x_ptr):
    tl.store(x_ptr + 0.5, 1.0)


@triton.jit
def halves_of_addresses(x_ptr):
    tl.store(x_ptr + tl.zeros([4], tl.float32), 1.0)


@triton.jit
def half_a_bit(x_ptr):
    tl.store(x_ptr, tl.zeros([4], tl.float32) & tl.zeros([4], tl.float32))


@triton.jit
def less_than_nothing(x_ptr):
    tl.store(x_ptr + tl.arange(0, 4), (tl.arange(0, 4).to(tl.uint32) + -1).to(tl.float32))


@triton.jit
def too_much(x_ptr):
    tl.store(x_ptr + tl.arange(0, 4), (tl.arange(0, 4) * 4294967296).to(tl.float32))


@triton.jit
def sum_of_addresses(x_ptr):
    tl.store(x_ptr + x_ptr, 1.0)


REFUSED = [odd_length, other_length, half_a_length, half_an_address]
REFUSED += [halves_of_addresses, half_a_bit, less_than_nothing, too_much, sum_of_addresses]


def refusals() -> list[str]:
    said = []
    for kernel in REFUSED:
        with pytest.raises(triton.runtime.errors.InterpreterError) as error:
            kernel[(1,)](torch.zeros(4))
        said.append(str(error.value))
    return said


def compare() -> None:
    """Print what the plain interpreter finds, what the quicker one does, and the plain one after
    it.
    """
    from fusewright_testkit.interpreter import quicker

    found = []
    for context in (nullcontext, quicker, nullcontext):
        with context():
            found.append(([results(dtype) for dtype in DTYPES], refusals()))
    print(json.dumps(found))


@pytest.mark.skipif(HAS_GPU, reason="Triton was imported to compile")
def test_results_and_refusals_are_those_of_the_plain_interpreter(run_python):
    folder, name = os.path.split(__file__)
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import {name[:-3]} as tests; tests.compare()"
    )
    plain, quicker, after = json.loads(run_python(code))
    assert plain == quicker == after
    # Half an address is refused in one way, as a number and in a block.
    assert len(set(plain[1])) >= len(REFUSED) - 1
