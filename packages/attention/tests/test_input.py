"""Bad input gets an error that says what was wanted and what came."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from fusewright.attention import rectangular_attention, sdpa_backend
from fusewright_testkit.bench import load
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = (2, 5, 6, 2, 8)
bench = load(pathlib.Path(__file__).parents[1])


def operands(batches, queries, keys, heads, width):
    return [torch.randn(batches, rows, heads, width) for rows in (queries, keys, keys)]


q, k, v = operands(*SHAPE)

BAD = {
    "three axes": ((q[0], k, v), {}, ValueError, r"q must be \[batch, tokens, heads, width\]"),
    "nested": (
        (torch.nested.nested_tensor([q[0], q[1]]), k, v),
        *({}, TypeError, "q must be a strided tensor, got a nested one"),
    ),
    "width 12": ((q.repeat(1, 1, 1, 2)[..., :12], k, v), {}, ValueError, "multiple of 8 .*got 12"),
    "width 264": (operands(1, 2, 3, 1, 264), {}, ValueError, "up to 256, got 264"),
    "width 0": (operands(1, 2, 3, 1, 0), {}, ValueError, "multiple of 8 up to 256, got 0"),
    "more heads": (
        *((q, *(x.repeat(1, 1, 2, 1) for x in (k, v))), {}, ValueError),
        r"k and v must be \[2, M, G, 8\] .* one G that divides 2; got k \(2, 6, 4, 8\)",
    ),
    "heads that do not divide": (
        *((q.repeat(1, 1, 2, 1), *(x[:, :, [0, 1, 1]] for x in (k, v))), {}, ValueError),
        r"one G that divides 4; got k \(2, 6, 3, 8\), v \(2, 6, 3, 8\)",
    ),
    "no heads": ((q, k[:, :, :0], v[:, :, :0]), {}, ValueError, r"divides 2; got k \(2, 6, 0, 8\)"),
    "heads of k alone": ((q, k[:, :, :1], v), {}, ValueError, r"got k \(2, 6, 1, 8\), v \(2, 6, 2"),
    "tasks": ((q, k[:1], v[:1]), {}, ValueError, r"k and v must be \[2, M, G, 8\]"),
    "keys": ((q, k, v[:, :5]), {}, ValueError, r"k \(2, 6, 2, 8\), v \(2, 5, 2, 8\)"),
    "widths": ((q, k.repeat(1, 1, 1, 2), v), {}, ValueError, r"got k \(2, 6, 2, 16\)"),
    "values of width 12": (
        *((q, k, v.repeat(1, 1, 1, 2)[..., :12]), {}),
        *(ValueError, "multiple of 8 .*got 12"),
    ),
    "values of width 264": ((q, k, v.repeat(1, 1, 1, 33)), {}, ValueError, "up to 256, got 264"),
    "dtypes": ((q, k, v.half()), {}, ValueError, "v must have q's dtype torch.float32, got"),
    "text as scale": ((q, k, v), dict(scale="1"), TypeError, "scale must be a number, got str"),
    "true as scale": ((q, k, v), dict(scale=True), TypeError, "scale must be a number, got bool"),
    "negative scale": ((q, k, v), dict(scale=-1.0), ValueError, "scale must be from .* got -1"),
    "zero scale": ((q, k, v), dict(scale=0), ValueError, "scale must be from .* got 0"),
    "infinite scale": ((q, k, v), dict(scale=math.inf), ValueError, "scale must be .* got inf"),
    "nan scale": ((q, k, v), dict(scale=math.nan), ValueError, "scale must be .* got nan"),
    "tiny scale": ((q, k, v), dict(scale=1e-40), ValueError, "from 1.18e-38 to 2.36e[+]38, got"),
    "great scale": ((q, k, v), dict(scale=3e38), ValueError, "from 1.18e-38 to 2.36e[+]38, got"),
    "lengths as list": ((q, k, v), dict(key_lengths=[1, 2]), TypeError, "must be a tensor"),
    "float lengths": (
        *((q, k, v), dict(key_lengths=torch.ones(2))),
        *(TypeError, "int32 or int64, got torch.float32"),
    ),
    "sparse lengths": (
        *((q, k, v), dict(key_lengths=torch.ones(2, dtype=torch.int32).to_sparse())),
        *(TypeError, "key_lengths must be a strided tensor, got layout torch.sparse_coo"),
    ),
    "three lengths": (
        *((q, k, v), dict(key_lengths=torch.ones(3, dtype=torch.int32))),
        *(ValueError, r"shape \(2,\), one number for each task, got \(3,\)"),
    ),
    "sinks as list": ((q, k, v), dict(sinks=[1.0, 2.0]), TypeError, "sinks must be a tensor"),
    "whole sinks": ((q, k, v), dict(sinks=torch.ones(2).int()), TypeError, "sinks must be float"),
    "half sinks": (
        *((q, k, v), dict(sinks=torch.ones(2).half())),
        *(
            ValueError,
            "sinks must have dtype torch.float32 or q's torch.float32, got torch.float16",
        ),
    ),
    "three sinks": (
        *((q, k, v), dict(sinks=torch.ones(3))),
        *(ValueError, r"shape \(2,\), one number for each head, got \(3,\)"),
    ),
    "sinks elsewhere": (
        *((q, k, v), dict(sinks=torch.ones(2, device="meta"))),
        *(ValueError, "sinks must be on q's device cpu, got meta"),
    ),
    "lengths elsewhere": (
        *((q, k, v), dict(key_lengths=torch.ones(2, dtype=torch.int32, device="meta"))),
        *(ValueError, "key_lengths must be on q's device cpu, got meta"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(op, name):
    tensors, options, error, message = BAD[name]
    options = dict(options)
    with pytest.raises(error, match=message):
        op.public(*tensors, options.pop("key_lengths", None), **options)


def test_sdpa_backend_follows_the_context(op, device):
    tensors = op.draw((1, 4, 6, 2, 16), torch.bfloat16, device)
    for wanted in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(wanted):
            assert sdpa_backend(*tensors) == wanted
    assert sdpa_backend(*tensors) != SDPBackend.ERROR


def test_sdpa_backend_is_error_where_none_can_serve():
    tensors = [x.double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert sdpa_backend(*tensors) == SDPBackend.ERROR


def test_benchmark_states_the_backend_that_runs(capsys):
    o = bench.sdpa(SDPBackend.FLASH_ATTENTION)(q, k, v)
    assert o.shape == q.shape
    assert "((2, 5, 2, 8), (2, 6, 2, 8)) runs FLASH_ATTENTION" in capsys.readouterr().out


def test_benchmark_warns_when_another_backend_would_run():
    call = bench.sdpa(SDPBackend.CUDNN_ATTENTION)
    with (
        pytest.warns(UserWarning, match="wanted CUDNN_ATTENTION, torch takes FLASH_ATTENTION"),
        pytest.raises(RuntimeError),
    ):
        call(q, k, v)


def test_sdpa_backend_checks_its_input():
    with pytest.raises(ValueError, match="multiple of 8"):
        sdpa_backend(*operands(1, 2, 3, 1, 12))


def test_default_scale_is_that_of_torch():
    expected = rectangular_attention(q, k, v, scale=8**-0.5)
    assert torch.equal(rectangular_attention(q, k, v), expected)
