"""Bad input of memory_update gets an error that says what was wanted and what came."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_update

k, v = torch.randn(2, 3, 5, 4)
weights = MemoryWeights(
    torch.randn(3, 6, 4), torch.randn(3, 6), torch.randn(3, 4, 6), torch.randn(3, 4)
)
momentum = weights.map(torch.zeros_like)
gate = torch.rand(3)

# The arguments that differ from a good call, the error, and its message.
BAD = {
    "one axis": (dict(k=k[0, 0]), ValueError, r"k must be \[\*lead, N, D\]"),
    "no width": (dict(k=k[..., :0]), ValueError, "with D at least 1, got"),
    "rows": (dict(v=v[:, :4]), ValueError, r"v must have k's shape \(3, 5, 4\), got \(3, 4, 4\)"),
    "dtypes": (dict(v=v.half()), ValueError, "v must have k's dtype torch.float32, got"),
    "devices": (dict(v=v.to("meta")), ValueError, "v must be on k's device cpu, got meta"),
    "tuple as weights": (
        *(dict(weights=tuple(weights)), TypeError),
        "weights must be a MemoryWeights, got tuple",
    ),
    "tuple as momentum": (
        *(dict(momentum=tuple(momentum)), TypeError),
        "momentum must be a MemoryWeights, got tuple",
    ),
    "leading axes": (
        *(dict(weights=weights.map(lambda x: x[:2])), ValueError),
        r"weights.w1 must have k's leading axes \(3,\) or none, got shape \(2, 6, 4\)",
    ),
    "flat w1": (
        *(dict(weights=weights._replace(w1=gate)), ValueError),
        r"weights.w1 must be \[\*lead, hidden, D\]",
    ),
    "no hidden units": (
        *(dict(weights=weights._replace(w1=torch.zeros(3, 0, 4))), ValueError),
        "at least one hidden unit",
    ),
    "transposed w2": (
        *(dict(weights=weights._replace(w2=weights.w1)), ValueError),
        r"weights.w2 must be \(3, 4, 6\) for 6 hidden units and keys of 4, got \(3, 6, 4\)",
    ),
    "narrow momentum": (
        *(dict(momentum=momentum._replace(b1=momentum.b1[:, :5])), ValueError),
        r"momentum.b1 must be \(3, 6\)",
    ),
    "half a state": (
        *(dict(weights=weights.map(torch.Tensor.half)), ValueError),
        "weights.w1 must be torch.float32, got torch.float16",
    ),
    "fp64 keys": (
        *(dict(k=k.double(), v=v.double()), ValueError),
        "weights.w1 must be torch.float64, got torch.float32",
    ),
    "state elsewhere": (
        *(dict(momentum=momentum._replace(b2=momentum.b2.to("meta"))), ValueError),
        "momentum.b2 must be on k's device cpu, got meta",
    ),
    "two gates": (
        *(dict(alpha=gate[:2]), ValueError),
        r"alpha must be a number or a tensor of shape \(3,\), one for each memory, got \(2,\)",
    ),
    "text as gate": (dict(eta="1"), TypeError, "eta must be a tensor or a number, got str"),
    "true as gate": (dict(theta=True), TypeError, "theta must be .* a number, got bool"),
    "nan as gate": (dict(alpha=math.nan), ValueError, "alpha must be a finite number, got nan"),
    "integer gates": (dict(eta=gate.int()), TypeError, "eta must be float32"),
    "gates elsewhere": (
        dict(eta=gate.to("meta")),
        ValueError,
        "eta must be on k's device cpu, got meta",
    ),
    "row weights": (
        *(dict(row_weights=gate), ValueError),
        r"row_weights must have shape \(3, 5\), one for each row of k, got \(3,\)",
    ),
    "activation": (dict(activation="tanh"), ValueError, 'activation must be "silu" or "relu"'),
    "reduction": (dict(reduction="mean"), ValueError, 'reduction must be "sum" or "mean_fea'),
    "no norm": (
        dict(max_grad_norm=0.0),
        ValueError,
        "max_grad_norm must be a finite number above 0, got 0",
    ),
    "endless norm": (
        dict(max_grad_norm=math.inf),
        ValueError,
        "max_grad_norm must be a finite number, got inf",
    ),
    "text as norm": (dict(max_grad_norm="1"), TypeError, "max_grad_norm must be a number, got str"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    good = dict(k=k, v=v, weights=weights, momentum=momentum, alpha=gate, eta=gate, theta=gate)
    with pytest.raises(error, match=message):
        memory_update(**good | changed)
