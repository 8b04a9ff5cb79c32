"""Training steps of TitanMAC: eager, compiled, replayed from a CUDA graph, and a peer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..titan_mac import TitanMAC
from ..titan_mac_layers import TitanMACConfig
from ..training import torch_adamw
from .harness import FACTOR, SEED, ULPS, Expected
from .step import Step
from .text import Text, TextHarness, TextShape, version_of

ProviderName = Literal["fusewright", "fusewright-compile", "titans-pytorch"]
PROVIDER_NAMES = get_args(ProviderName)
PEER = "titans-pytorch"

# The benchmark of dim 320 at its three sizes, and the profiled model's one.
SHAPES = {
    "tiny": (TextShape(4, 256),),
    "l4": (TextShape(4, 4096), TextShape(4, 2048), TextShape(2, 4096)),
    "profile": (TextShape(4, 512),),
    "170m": (TextShape(4, 4096),),
}


def our_loss(model: TitanMAC, tokens: Tensor) -> Tensor:
    return model.loss(tokens)


def peer_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, return_loss=True)


def peer_model(config: TitanMACConfig) -> nn.Module:
    """titans-pytorch's memory as context, with its own defaults beside these sizes."""
    from titans_pytorch import MemoryAsContextTransformer

    return MemoryAsContextTransformer(
        num_tokens=config.vocab_size,
        dim=config.dim,
        depth=config.layers,
        heads=config.heads,
        segment_len=config.segment,
    )


class TitanMACHarness(TextHarness):
    """What all measurements of TitanMAC have in common."""

    op: ClassVar[str] = "TitanMAC"
    config: TitanMACConfig

    def title(self, shape: TextShape) -> str:
        return f"{super().title(shape)}, {self.config.variant}"

    def row_name(self, provider: ProviderName) -> str:
        """The provider with what is not in the case: a peer's version, a variant of ours."""
        if provider == PEER:
            return f"{PEER}-{version_of(PEER)}"
        left_out = "" if self.config.memory else "-without-memory"
        again = "-checkpointed" if self.config.checkpointing else ""
        variant = "" if self.config.variant == "mac" else f"-{self.config.variant}"
        return f"fusewright{variant}{left_out}{again}{provider.removeprefix('fusewright')}"

    def step(self, shape: TextShape, provider: ProviderName) -> Step:
        """One training step of a new model, the same weights for all of ours."""
        torch.manual_seed(SEED)
        ours = provider != PEER
        model: nn.Module = TitanMAC(self.config) if ours else peer_model(self.config)
        model = model.to(self.device)
        if provider == "fusewright-compile":
            torch.compiler.reset()
            for block in cast(TitanMAC, model).blocks:
                block.compile(fullgraph=True, dynamic=False)
        optimizer = torch_adamw(model, lr=4e-4, weight_decay=0.1)
        text = Text(self.config.vocab_size, shape.length, self.device)
        loss: Callable[[Any, Tensor], Tensor] = our_loss if ours else peer_loss
        return Step(model, text, shape.batch, loss, optimizer)

    @torch.no_grad()
    def expected(self, shape: TextShape) -> Expected:
        """The reference's first loss in fp32, and how far from it bf16 may be: twice what the
        reference's tokens err by under autocast, root-mean-square.
        """
        torch.manual_seed(SEED)
        model = TitanMAC(self.config, backend="reference").to(self.device)
        tokens = Text(self.config.vocab_size, shape.length, self.device).sample(shape.batch)
        truth = token_losses(model, tokens)
        with torch.autocast(self.device.type, torch.bfloat16):
            eager = token_losses(model, tokens)
        loss, error = float(truth.mean()), float((eager - truth).square().mean().sqrt())
        return Expected(loss, FACTOR * error + ULPS * torch.finfo(torch.float32).eps * loss)


def token_losses(model: TitanMAC, tokens: Tensor) -> Tensor:
    """Of each token, in fp64; from all logits of one row after the other."""
    hidden, _ = model(tokens[:, :-1])
    pairs = zip(hidden, tokens[:, 1:], strict=True)
    losses = [F.cross_entropy(model.logits(x).float(), t, reduction="none") for x, t in pairs]
    return torch.stack(losses).double()
