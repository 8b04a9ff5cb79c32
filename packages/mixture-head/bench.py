"""What is timed and against whom: ``python -m fusewright_testkit.bench mixture-head``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fusewright.mixture_head import grouped_heads, grouped_linear, mixture_nll
from fusewright.mixture_head.common.scale import checked_scale
from fusewright.mixture_head.grouped import reference as grouped_reference
from fusewright.mixture_head.heads import reference as heads_reference
from fusewright.mixture_head.mixture import reference as mixture_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.utils.checkpoint import checkpoint

# What the names in cases count, in the picture.
WORDS = {
    "L": "{} rows",
    "D": "width {}",
    "F": "{} hidden units",
    "K": "{} components",
    "G": "{} groups",
}
ROWS = (4000, 128000)
COMPONENTS = 10
WIDTH, HIDDEN, STORED = 512, 1365, 1376
# fp64 hidden layers of so many rows fit into memory with what is timed.
REFERENCE_ROWS = 8192

Tensor = torch.Tensor
Op = Callable[..., Tensor]


def cases() -> list[Case]:
    """The mean log-likelihood in fp32 and the heads in bf16, over one input and with one each, at
    the sizes of the model.
    """
    makers = (mixture_case, heads_case, groups_case)
    return [case_of(rows) for case_of in makers for rows in ROWS]


def mixture_case(rows: int) -> Case:
    size = rows * (3 * COMPONENTS + 1) * torch.float32.itemsize
    form = checked_scale("log_sigma", (-7.0, 5.0), 1e-3)
    return Case(
        op="mixture_nll",
        sizes={"L": rows, "K": COMPONENTS},
        dtype=torch.float32,
        reference=functools.partial(mixture_reference.mixture_nll, **form._asdict()),
        inputs=functools.partial(mixture_inputs, rows),
        # The loss itself is one number; each gradient is as large as what it belongs to.
        bytes_moved=by_pass(size),
    )


def mixture_inputs(rows: int, device: str) -> list[Tensor]:
    """params and y."""
    return [torch.randn(rows, COMPONENTS, 3, device=device), torch.randn(rows, device=device)]


def heads_case(rows: int) -> Case:
    dtype = torch.bfloat16
    units = COMPONENTS * STORED
    weights = (units * (WIDTH + 3)) * dtype.itemsize
    size = rows * (WIDTH * dtype.itemsize + 3 * COMPONENTS * torch.float32.itemsize) + weights
    # The dense product and the narrow layer, of the width that is used.
    flops = 2 * rows * COMPONENTS * HIDDEN * (WIDTH + 3)
    return Case(
        op="grouped_heads",
        sizes={"L": rows, "D": WIDTH, "F": HIDDEN, "K": COMPONENTS},
        dtype=dtype,
        reference=heads_by_rows,
        inputs=functools.partial(heads_inputs, rows, dtype),
        # The hidden layer is no input and no output.
        bytes_moved=by_pass(size),
        flops=by_pass(flops),
    )


def heads_inputs(rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, and the weights of both layers, stored padded."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    hidden, output = draw(COMPONENTS, STORED, WIDTH), draw(COMPONENTS, STORED, 3)
    for weight in (hidden, output):
        weight[:, HIDDEN:] = 0.0
    return [draw(rows, WIDTH), hidden.flatten(0, 1) / WIDTH**0.5, output / HIDDEN**0.5]


def heads_by_rows(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """The reference, which keeps the hidden layer of a part of the rows alone."""
    heads = functools.partial(checkpoint, heads_reference.grouped_heads, use_reentrant=False)
    parts = x.split(REFERENCE_ROWS)
    return torch.cat([heads(part, hidden_weight, output_weight) for part in parts])


def groups_case(rows: int) -> Case:
    dtype = torch.bfloat16
    weights = COMPONENTS * STORED * WIDTH
    inputs = functools.partial(groups_inputs, dtype=dtype)
    return Case(
        op="grouped_linear",
        sizes={"L": rows, "D": WIDTH, "F": HIDDEN, "G": COMPONENTS},
        dtype=dtype,
        reference=grouped_reference.grouped_linear,
        inputs=functools.partial(inputs, rows),
        # The reference multiplies every row by every weight.
        sample=functools.partial(inputs, min(rows, REFERENCE_ROWS)),
        bytes_moved=by_pass((rows * (WIDTH + STORED) + weights) * dtype.itemsize),
        flops=by_pass(2 * rows * WIDTH * HIDDEN),
    )


def groups_inputs(rows: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, the weights of its groups, stored padded, and where these end."""
    x, hidden, _ = heads_inputs(rows, dtype, device)
    ends = torch.tensor(ends_of(rows), device=device, dtype=torch.int32)
    return [x, hidden.unflatten(0, (COMPONENTS, STORED)), ends]


def ends_of(rows: int) -> list[int]:
    """Where groups end of which the second has twice the rows of the first, the third three times,
    and so on.
    """
    whole = COMPONENTS * (COMPONENTS + 1)
    return [rows * group * (group + 1) // whole for group in range(1, COMPONENTS + 1)]


def providers() -> dict[str, dict[str, Op]]:
    """Ours, with the hidden layer stored and computed again, torch, torch.compile,
    torch.distributions, the loop over the heads or groups that one writes first, compiled and not,
    and torch's own grouped product.
    """
    plain: dict[str, Op] = {"mixture_nll": torch_mixture_nll, "grouped_heads": torch_heads}
    return {
        "fusewright": {
            "mixture_nll": mixture_nll,
            "grouped_heads": grouped_heads,
            "grouped_linear": grouped_linear,
        },
        "fusewright-recompute": {
            "grouped_heads": functools.partial(grouped_heads, recompute=True),
        },
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
        "distributions": {"mixture_nll": distributions_mixture_nll},
        "loop": {"grouped_linear": looped_linear},
        "compile-loop": {
            "grouped_heads": compiled(looped_heads),
            "grouped_linear": compiled(looped_linear),
        },
        "grouped_mm": {"grouped_linear": torch_grouped_mm},
    }


def torch_mixture_nll(params: Tensor, y: Tensor) -> Tensor:
    """The loss as a user of plain torch writes it."""
    logits, mean, raw = params.unbind(-1)
    log_sigma = raw.clamp(-7.0, 5.0)
    z = (y[..., None] - mean) * torch.exp(-log_sigma)
    component = (
        logits.log_softmax(-1) - 0.5 * z.square() - log_sigma - mixture_reference.HALF_LOG_2_PI
    )
    return -component.logsumexp(-1).mean()


def distributions_mixture_nll(params: Tensor, y: Tensor) -> Tensor:
    """The loss from torch's own mixture; arguments unchecked, as a check waits for the GPU."""
    logits, mean, raw = params.unbind(-1)
    mixture = MixtureSameFamily(
        Categorical(logits=logits, validate_args=False),
        Normal(mean, raw.clamp(-7.0, 5.0).exp(), validate_args=False),
        validate_args=False,
    )
    return -mixture.log_prob(y).mean()


def torch_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """All heads at once: one dense product, then one batched product."""
    hidden = F.silu(F.linear(x, hidden_weight)).unflatten(-1, output_weight.shape[:2])
    return torch.einsum("lgs,gsp->lgp", hidden, output_weight).float()


def looped_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """One head after the other."""
    heads = zip(hidden_weight.unflatten(0, output_weight.shape[:2]), output_weight, strict=True)
    return torch.stack([F.silu(F.linear(x, a)) @ c for a, c in heads], -2).float()


def looped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One group after the other, whose numbers of rows the host knows."""
    begins = [0, *ends_of(len(x))[:-1]]
    sizes = [end - begin for begin, end in zip(begins, ends_of(len(x)), strict=True)]
    groups = zip(x.split(sizes), weight, strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def torch_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's own, for bf16 alone."""
    return torch._grouped_mm(x, weight.mT, offs=ends)
