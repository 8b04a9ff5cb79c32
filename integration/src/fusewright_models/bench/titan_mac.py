"""Training steps of TitanMAC: eager, compiled, replayed from a CUDA graph, and a peer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..models.titan_mac import TitanMAC, TitanMACConfig
from .harness import SEED, Expected
from .results import version_of
from .text import TextHarness, TextShape, token_losses

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

    def name(self, provider: ProviderName) -> str:
        """The provider with what is not in the case: a peer's version, a variant of ours."""
        if provider == PEER:
            return f"{PEER}-{version_of(PEER)}"
        left_out = "" if self.config.memory else "-without-memory"
        again = "-checkpointed" if self.config.checkpointing else ""
        variant = "" if self.config.variant == "mac" else f"-{self.config.variant}"
        return f"fusewright{variant}{left_out}{again}{provider.removeprefix('fusewright')}"

    def build(self, provider: ProviderName) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
        if provider == PEER:
            return peer_model(self.config).to(self.device), peer_loss
        model = TitanMAC(self.config).to(self.device)
        if provider == "fusewright-compile":
            torch.compiler.reset()
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False)
        return model, our_loss

    @torch.no_grad()
    def expected(self, shape: TextShape) -> Expected:
        """The reference's first loss in fp32, and how far from it bf16 may be: twice what the
        reference's tokens err by under autocast, root-mean-square.
        """
        torch.manual_seed(SEED)
        model = TitanMAC(self.config, backend="reference").to(self.device)
        tokens = self.text(shape).sample(shape.batch)
        truth = token_losses(model, model(tokens[:, :-1])[0], tokens)
        with torch.autocast(self.device.type, torch.bfloat16):
            eager = token_losses(model, model(tokens[:, :-1])[0], tokens)
        return Expected.of(float(truth.mean()), float((eager - truth).square().mean().sqrt()))
