"""Training steps of HybridLM: ours, the same model in plain torch, and fla's Gated DeltaNet.

fusewright           the reversible stack: eager, and replayed from a CUDA graph
fusewright-plain     the same kernels under ordinary autograd, which keeps everything
  -block             that with layers computed again
  -keep-attention    that with layers but for what mixes tokens computed again
reference            plain torch, under ordinary autograd
reference-compile    that with each layer through torch.compile, but for the delta rule's recurrence
fla                  flash-linear-attention's GatedDeltaNetForCausalLM of as many parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from fusewright.deltanet import GatedDeltaNet
from torch import Tensor, nn

from ..choices import Checkpointing
from ..models.hybrid import HybridConfig, HybridLM, Losses
from .harness import SEED, Expected
from .results import version_of
from .text import TextHarness, TextShape, token_losses

ProviderName = Literal[
    "fusewright",
    "fusewright-plain",
    "fusewright-plain-block",
    "fusewright-plain-keep-attention",
    "reference",
    "reference-compile",
    "fla",
]
PROVIDER_NAMES = get_args(ProviderName)
PLAIN = "fusewright-plain"
PEER = "fla"

SHAPES = {
    "tiny": (TextShape(4, 256),),
    "mini": (TextShape(4, 4096),),
    "350m": (TextShape(2, 4096),),
    "1b": (TextShape(1, 4096),),
}


def our_loss(model: HybridLM, tokens: Tensor) -> Tensor:
    return model.losses(tokens).total


def peer_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """fla shifts labels itself: it reads the last token, too, and predicts nothing for it."""
    return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


def peer_model(config: HybridConfig) -> nn.Module:
    """Every layer a Gated DeltaNet, with the heads of ours; the width of the feed-forward layers
    makes the number of parameters ours, as nearly as multiples of 32 do.
    """
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    def made(width: int) -> nn.Module:
        return GatedDeltaNetForCausalLM(
            GatedDeltaNetConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.dim,
                num_hidden_layers=config.layers,
                num_heads=config.delta_heads,
                head_dim=config.delta_width,
                expand_v=1.0,
                intermediate_size=width,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )

    def count(build: Callable[[], nn.Module]) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in build().parameters())

    least, more = count(lambda: made(32)), count(lambda: made(64))
    wanted = count(lambda: HybridLM(config))
    return made(32 * max(1, round(1 + (wanted - least) / (more - least))))


class HybridHarness(TextHarness):
    """What all measurements of HybridLM have in common."""

    op: ClassVar[str] = "HybridLM"
    config: HybridConfig

    def name(self, provider: ProviderName) -> str:
        if provider != PEER:
            return provider
        versions = version_of("fla-core"), version_of("triton")
        return f"fla-{versions[0]} (triton {versions[1]})"

    def build(self, provider: ProviderName) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
        if provider == PEER:
            return peer_model(self.config).to(self.device), peer_loss
        return self.model(provider), our_loss

    def model(self, provider: ProviderName) -> HybridLM:
        plain = provider.startswith("reference")
        config = self.config if provider == "fusewright" else replace(self.config, mode="plain")
        if provider.startswith(f"{PLAIN}-"):
            checkpointing = cast(Checkpointing, provider.removeprefix(f"{PLAIN}-"))
            config = replace(config, checkpointing=checkpointing)
        model = HybridLM(config, backend="reference" if plain else "auto").to(self.device)
        if provider == "reference-compile":
            compile_layers([*model.stack.layers, model.second])
        return model

    @torch.no_grad()
    def expected(self, shape: TextShape) -> Expected:
        """The reference's first loss in fp32, and how far from it bf16 may be: twice what the
        reference's tokens err by under autocast, root-mean-square, in both their losses, and twice
        what its indexers' loss does.
        """
        torch.manual_seed(SEED)
        config = replace(self.config, mode="plain")
        model = HybridLM(config, backend="reference").to(self.device)
        tokens = self.text(shape).sample(shape.batch)

        def found() -> tuple[Losses, Tensor]:
            return model.losses(tokens), token_losses(model, model(tokens[:, :-1]), tokens)

        truth, per_token = found()
        with torch.autocast(self.device.type, torch.bfloat16):
            eager, rounded = found()
        of_tokens = float((rounded - per_token).square().mean().sqrt())
        of_indexers = abs(float(eager.indexer - truth.indexer))
        error = (1.0 + config.second_weight) * of_tokens + config.index_weight * of_indexers
        return Expected.of(float(truth.total), error)


def compile_layers(layers: Iterable[Any]) -> None:
    """All but the recurrence: unrolled over 64 chunks it takes more than four minutes."""
    torch.compiler.reset()
    for layer in layers:
        for part in layer.modules():
            if isinstance(part, GatedDeltaNet):
                part.recurrence = torch.compiler.disable(part.recurrence)  # type: ignore[method-assign]
        layer.force = torch.compile(layer.force, dynamic=False)
