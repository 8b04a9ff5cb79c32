"""What is timed and against whom: ``python -m fusewright_testkit.bench cross-entropy``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.cross_entropy.linear import reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled, installed

# What the names in cases count, in the picture.
WORDS = {"N": "{} rows", "d": "width {}", "V": "vocabulary of {}"}
Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

OP = "linear_cross_entropy"
# Rows, width and vocabulary: of TitanMAC's preset l4, of HybridLM's 350m, and of a large model.
SIZES = (
    dict(N=16384, d=320, V=32000),
    dict(N=16384, d=1024, V=32000),
    dict(N=8192, d=4096, V=131072),
)
# All logits in fp64 are too many there: the loss is checked on fewer rows.
CHECKED = dict(N=256)
DTYPE = torch.bfloat16


def cases() -> list[Case]:
    """Sizes of models, in bf16."""
    return [case(sizes) for sizes in SIZES]


def case(sizes: dict[str, int]) -> Case:
    n, d, v = sizes["N"], sizes["d"], sizes["V"]
    operands = (n * d + v * d) * DTYPE.itemsize + n * torch.int64.itemsize
    product = 2 * n * d * v
    return Case(
        op=OP,
        sizes=sizes,
        dtype=DTYPE,
        reference=reference.linear_cross_entropy,
        inputs=functools.partial(inputs, sizes),
        # Without its logits the loss reads its operands and writes their gradients.
        bytes_moved=by_pass(operands),
        flops=by_pass(product),
        sample=functools.partial(inputs, sizes | CHECKED),
    )


def inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """x, weight and targets: logits of about 1."""
    n, d, v = sizes["N"], sizes["d"], sizes["V"]
    x = torch.randn(n, d, device=device, dtype=DTYPE)
    weight = (torch.randn(v, d, device=device) * d**-0.5).to(DTYPE)
    return [x, weight, torch.randint(v, (n,), device=device)]


def providers() -> dict[str, dict[str, Loss]]:
    """Ours, torch's two ways, torch.compile, and the libraries that are installed."""
    # As a user of plain torch writes it, the softmax in fp32.
    plain = reference.linear_cross_entropy
    found: dict[str, dict[str, Loss]] = {
        "fusewright": {OP: linear_cross_entropy},
        "torch": {OP: plain},
        "compile": {OP: compiled(plain)},
    }
    if hasattr(F, "linear_cross_entropy"):
        found["torch-linear"] = {OP: F.linear_cross_entropy}
    return found | installed(
        ("liger", "liger-kernel", liger),
        ("liger-logits", "liger-kernel", liger_logits),
        ("quack", "quack-kernels", quack),
        ("quack-logits", "quack-kernels", quack_logits),
        ("cce", "cut-cross-entropy", cut_cross_entropy),
    )


def liger() -> dict[str, Loss]:
    """Liger-Kernel's function."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(x, weight, targets)

    # It reads on the host how many targets there are.
    loss.captures = False  # type: ignore[attr-defined]
    return {OP: loss}


def liger_logits() -> dict[str, Loss]:
    """Torch's product, and Liger-Kernel's loss of all logits, which it overwrites."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return liger_cross_entropy(F.linear(x, weight), targets)

    loss.captures = False  # type: ignore[attr-defined]
    return {OP: loss}


def quack() -> dict[str, Loss]:
    """QuACK's function, in chunks of its own size."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(x, weight, targets)

    # The backward pass scales what the forward pass has saved, in its memory.
    loss.repeats = False  # type: ignore[attr-defined]
    return {OP: loss}


def quack_logits() -> dict[str, Loss]:
    """Torch's product, and QuACK's loss of all logits."""
    from quack.cross_entropy import cross_entropy

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(F.linear(x, weight), targets)

    return {OP: loss}


def cut_cross_entropy() -> dict[str, Loss]:
    """Apple's function, without any logits in memory; it leaves out what adds little to its
    gradients.
    """
    from cut_cross_entropy import linear_cross_entropy as cut

    return {OP: cut}
