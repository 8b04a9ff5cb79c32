"""Who computes the loss of a step: ours, and plain torch as far as one takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args
from unittest.mock import patch

import torch
from fusewright.attention import sdpa_backend
from fusewright.attention.rectangular import launch_backward
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..choices import Checkpointing
from ..data import Task
from ..models.transformer_np import TransformerNP
from ..models.transformer_np.layers import Block
from . import plain
from .results import ABSENT, version_of
from .shapes import Shape

ProviderName = Literal[
    "sdpa-unpruned",
    "sdpa",
    "sdpa-compile",
    "fa4",
    "fa4-compile",
    "fusewright",
    "fusewright-compile",
    "fusewright-two-kernels",
    "fusewright-fp8",
    "fusewright-captured",
]
PROVIDER_NAMES = get_args(ProviderName)
SdpaChoice = Literal["auto", "flash", "cudnn", "efficient", "math"]
SDPA_CHOICES = get_args(SdpaChoice)
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FA4 = "flash-attn-4"
LossFunction = Callable[[TransformerNP, Task], Tensor]


def our_loss(model: TransformerNP, task: Task) -> Tensor:
    return model.loss(task.x_context, task.y_context, task.x_target, task.y_target)


def plain_log_likelihood(model: TransformerNP, task: Task, **options: Any) -> Tensor:
    params = plain.forward(model, task.x_context, task.y_context, task.x_target, **options)
    return plain.log_likelihood(params, task.y_target, model.config.scale)


def plain_loss(model: TransformerNP, task: Task, **options: Any) -> Tensor:
    return -plain_log_likelihood(model, task, **options).mean()


def flash_attention_4() -> plain.Attend:
    """FlashAttention-4's, which torch.compile leaves to Python."""
    from flash_attn.cute import flash_attn_func

    @torch.compiler.disable
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v)
        return found[0] if isinstance(found, tuple) else found

    return attend


@contextmanager
def two_kernels() -> Iterator[None]:
    """The backward pass of our attention over many keys in two kernels, one for dq and one for dk
    and dv, where it would be Hopper's, which makes all three.
    """
    plans = launch_backward.backward_plan
    with patch.object(launch_backward, "hopper_backward_config", lambda *_, **__: None):
        plans.cache_clear()
        try:
            yield
        finally:
            plans.cache_clear()


@dataclass(frozen=True)
class Provider:
    """One row of the comparison.

    Attributes:
        kind: what computes.
        sdpa: which of torch's attentions it was asked to take; ours takes none.
    """

    kind: ProviderName
    sdpa: SdpaChoice = "auto"

    @property
    def ours(self) -> bool:
        return self.kind.startswith("fusewright")

    @property
    def on_torch(self) -> bool:
        """Whether it takes torch's attention."""
        return self.kind.startswith("sdpa")

    @property
    def name(self) -> str:
        return self.kind if self.sdpa == "auto" else f"{self.kind}-{self.sdpa}"

    @property
    def pruned(self) -> bool:
        return self.kind != "sdpa-unpruned"

    @property
    def compiled(self) -> bool:
        return self.kind.endswith("compile")

    @property
    def captured(self) -> bool:
        """Whether it is the whole step of a training that is timed, replayed from one CUDA graph:
        the draw of the data, both passes, clipping and the step of our optimizer.
        """
        return self.kind.endswith("captured")

    def loss_function(self) -> LossFunction:
        """A new one: what torch.compile keeps for it goes with it."""
        options: dict[str, Any] = {"pruned": self.pruned}
        if not self.ours and not self.on_torch:
            options["attend"] = flash_attention_4()
        function: LossFunction = our_loss if self.ours else partial(plain_loss, **options)
        if not self.compiled:
            return function
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    def absent(self, device: torch.device, checkpointing: Checkpointing) -> str | None:
        """What is lacking here for it to run; None where nothing is."""
        if self.kind == "fusewright-fp8":
            return "this build has no attention in 8 bits"
        if self.ours or self.on_torch:
            return None
        if version_of(FA4) == ABSENT:
            return f"{FA4} is not installed"
        if device.type != "cuda":
            return f"{FA4} needs a CUDA device"
        if checkpointing == "keep-attention":
            return f"{FA4} is no op of torch's, whose outputs could be kept"
        return None

    def context(self) -> AbstractContextManager:
        """The choice of an attention, to be held while the loss and its gradients are computed."""
        if self.kind == "fusewright-two-kernels":
            return two_kernels()
        return nullcontext() if self.sdpa == "auto" else sdpa_kernel(SDPA_BACKENDS[self.sdpa])

    def backends_taken(self, model: TransformerNP, shape: Shape) -> list[SDPBackend]:
        """The attentions that torch takes for operands like those of the first and last block.

        Eagerly: what a compiler makes of the same call cannot be asked.
        """
        if not self.on_torch:
            return []
        context, device = shape.context, model.embedder.output.weight.device
        sizes = shape.batch, context + shape.targets, model.config.width
        rows = torch.zeros(sizes, dtype=torch.bfloat16, device=device)
        layer, options = cast(Block, model.blocks[0]).attention, {"pruned": self.pruned}
        with self.context(), torch.autocast(device.type, torch.bfloat16):
            firsts = (0, context) if self.pruned else (0,)
            operands = (
                plain.attention_operands(layer, rows, context, n, **options) for n in firsts
            )
            return list(dict.fromkeys(sdpa_backend(*each) for each in operands))

    def attention(self, taken: list[SDPBackend]) -> str:
        """Whose attention it is, in words."""
        if self.ours:
            return "fusewright"
        if not self.on_torch:
            return f"{FA4} {version_of(FA4)}"
        names = "+".join(backend.name.lower().removesuffix("_attention") for backend in taken)
        return f"eagerly {names}" if self.compiled else names

    def row_name(self, attention: str) -> str:
        """The name in a result file, which has no column of its own for the attention."""
        return self.name if self.ours else f"{self.name} ({attention})"

    def warning(self, taken: list[SDPBackend]) -> str | None:
        """What to say where torch does not take the attention that was asked for."""
        if self.sdpa == "auto" or taken == [SDPA_BACKENDS[self.sdpa]]:
            return None
        return f"{self.name}: wanted {self.sdpa} attention, torch takes {self.attention(taken)}"


def chosen_providers(kinds: str, choices: str) -> list[Provider]:
    """Providers by comma, those on torch's attention once for each choice of it, by comma.

    Raises:
        ValueError: a name is none of those.
    """
    asked: list[ProviderName] = by_comma("provider", kinds, PROVIDER_NAMES)
    chosen: list[SdpaChoice] = by_comma("sdpa", choices, SDPA_CHOICES)
    found: list[Provider] = []
    for kind in asked:
        provider = Provider(kind)
        found += [Provider(kind, sdpa) for sdpa in chosen] if provider.on_torch else [provider]
    return found


def by_comma(what: str, text: str, names: tuple[str, ...]) -> list[Any]:
    """The names in ``text``, each once; all for "all"."""
    found = list(names) if text == "all" else list(dict.fromkeys(text.split(",")))
    if not set(found) <= set(names):
        raise ValueError(f"{what} must be of {', '.join(names)}, by comma; got {text!r}")
    return found
