"""torch.export and AOTInductor of the operations, of any number of tasks and tokens."""

from __future__ import annotations

import pytest
import torch
from fusewright.attention import (
    apply_rotary,
    rectangular_attention_with_lse,
    rotary,
    sliding_window_attention,
)
from torch import nn
from torch.export import Dim

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Rectangle(nn.Module):
    """Tasks with numbers of keys of their own."""

    def forward(self, q, k, v, key_lengths):
        return rectangular_attention_with_lse(q, k, v, key_lengths=key_lengths, backend="triton")


class Window(nn.Module):
    """Queries and keys with positions, in a window."""

    def forward(self, q, k, v, cos, sin):
        q, k = (apply_rotary(x, cos, sin, backend="triton") for x in (q, k))
        return sliding_window_attention(q, k, v, window=3, prefix=2, backend="triton")


class Packed(nn.Module):
    """Documents in a window."""

    def forward(self, q, k, v, cu_seqlens):
        options = dict(window=3, prefix=2, cu_seqlens=cu_seqlens, backend="triton")
        return sliding_window_attention(q, k, v, **options)


class Joint(nn.Module):
    """Keys with their values, behind a prefix."""

    def forward(self, rows, cos, sin, prefix):
        return rotary(rows, cos, sin, prefix=prefix, backend="triton")


def drawn(name: str, batches: int, tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    def normal(*shape):
        return torch.randn(shape, device=device)

    heads = batches, tokens, 2, 8
    angles = normal(tokens, 4)
    if name == "rectangle":
        lengths = torch.arange(batches, device=device) + 3
        keys = batches, 130 + tokens, 2, 8
        return normal(batches, 5, 2, 8), normal(*keys), normal(*keys), lengths
    if name == "packed":
        ends = torch.arange(4, device=device) * (tokens - 2) // 3
        return normal(*heads), normal(*heads), normal(*heads), ends.repeat(batches, 1)
    if name == "window":
        return normal(*heads), normal(*heads), normal(*heads), angles.cos(), angles.sin()
    rows, prefix = normal(batches, tokens, 2, 2, 8), normal(3, 2, 2, 8)
    return rows, angles.cos(), angles.sin(), prefix


BATCHES, TOKENS = Dim("batches", min=2, max=64), Dim("tokens", min=4, max=4096)
# Whether keys are one tile is decided when a graph is traced.
KEYS = Dim("keys", min=129, max=4096)
# The module, and which axes vary of each operand.
MODULES = {
    "rectangle": (Rectangle(), ({0: BATCHES}, *[{0: BATCHES, 1: KEYS}] * 2, {0: BATCHES})),
    "window": (Window(), (*[{0: BATCHES, 1: TOKENS}] * 3, {0: TOKENS}, {0: TOKENS})),
    "packed": (Packed(), (*[{0: BATCHES, 1: TOKENS}] * 3, {0: BATCHES})),
    "joint": (Joint(), ({0: BATCHES, 1: TOKENS}, {0: TOKENS}, {0: TOKENS}, None)),
}


def as_list(outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_exported_operation_serves_any_number_of_tasks_and_tokens(name, strict, device):
    module, varies = MODULES[name]
    program = torch.export.export(
        module, drawn(name, 3, 7, device), dynamic_shapes=varies, strict=strict
    )
    for sizes in ((3, 7), (2, 19), (5, 200)):
        inputs = drawn(name, *sizes, device)
        for actual, expected in zip(
            as_list(program.module()(*inputs)), as_list(module(*inputs)), strict=True
        ):
            assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 ends the process where it loads a package")
@pytest.mark.parametrize("name", MODULES)
def test_package_of_aotinductor_gives_the_bits_of_eager_calls(name, tmp_path, device):
    module, varies = MODULES[name]
    program = torch.export.export(module, drawn(name, 3, 7, device), dynamic_shapes=varies)
    path = str(tmp_path / "operation.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    packaged = torch._inductor.aoti_load_package(path)
    for sizes in ((3, 7), (5, 200)):
        inputs = drawn(name, *sizes, device)
        for actual, expected in zip(
            as_list(packaged(*inputs)), as_list(module(*inputs)), strict=True
        ):
            assert torch.equal(actual, expected)
