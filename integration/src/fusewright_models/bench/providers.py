"""Who computes the loss of a step: ours, and plain torch as far as one takes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from fusewright.attention import sdpa_backend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..data import Task
from ..models.transformer_np import TransformerNP
from ..models.transformer_np.layers import Block
from . import plain
from .shapes import Shape

ProviderName = Literal[
    "sdpa-unpruned",
    "sdpa",
    "sdpa-compile",
    "fusewright",
    "fusewright-compile",
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
LossFunction = Callable[[TransformerNP, Task], Tensor]


def our_loss(model: TransformerNP, task: Task) -> Tensor:
    return model.loss(task.x_context, task.y_context, task.x_target, task.y_target)


def plain_log_likelihood(model: TransformerNP, task: Task, *, pruned: bool) -> Tensor:
    params = plain.forward(model, task.x_context, task.y_context, task.x_target, pruned=pruned)
    return plain.log_likelihood(params, task.y_target, model.config.scale)


def plain_loss(model: TransformerNP, task: Task, *, pruned: bool) -> Tensor:
    return -plain_log_likelihood(model, task, pruned=pruned).mean()


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
        function: LossFunction = our_loss if self.ours else partial(plain_loss, pruned=self.pruned)
        if not self.compiled:
            return function
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    def context(self) -> AbstractContextManager:
        """The choice of torch's attention, to be held while the loss is computed."""
        return nullcontext() if self.sdpa == "auto" else sdpa_kernel(SDPA_BACKENDS[self.sdpa])

    def backends_taken(self, model: TransformerNP, shape: Shape) -> list[SDPBackend]:
        """The attentions that torch takes for operands like those of the first and last block.

        Eagerly: what a compiler makes of the same call cannot be asked.
        """
        if self.ours:
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
        names = "+".join(backend.name.lower().removesuffix("_attention") for backend in taken)
        return f"eagerly {names}" if self.compiled else names

    def row_name(self, attention: str) -> str:
        """The name in a result file, which has no column of its own for the attention."""
        return self.name if self.ours else f"{self.name} ({attention})"

    def warning(self, taken: list[SDPBackend]) -> str | None:
        """What to say where torch does not take the attention that was asked for."""
        if self.ours or self.sdpa == "auto" or taken == [SDPA_BACKENDS[self.sdpa]]:
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
        found += [provider] if provider.ours else [Provider(kind, sdpa) for sdpa in chosen]
    return found


def by_comma(what: str, text: str, names: tuple[str, ...]) -> list[Any]:
    """The names in ``text``, each once; all for "all"."""
    found = list(names) if text == "all" else list(dict.fromkeys(text.split(",")))
    if not set(found) <= set(names):
        raise ValueError(f"{what} must be of {', '.join(names)}, by comma; got {text!r}")
    return found
