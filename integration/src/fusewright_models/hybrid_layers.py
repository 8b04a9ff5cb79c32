"""A layer of HybridLM: tokens are mixed, then each is fed forward, both on residual streams."""

from __future__ import annotations

from typing import Any, cast

from fusewright.deltanet import GatedDeltaNet
from fusewright.feed_forward import SwiGLU
from fusewright.gsa import GatedSparseAttention
from fusewright.norm import Backend, RMSNorm
from torch import Tensor, nn

from .hybrid_config import HybridConfig
from .replay import Tape
from .streams import StreamMixer
from .vocabulary_loss import autocast_dtype

NORM_EPS = 1e-6


class HybridLayer(nn.Module):
    """Gated DeltaNet or gated sparse attention, then SwiGLU, each behind a norm and between a
    reading of the streams and a writing to them.

    Args:
        config: the model's.
        place: of the layer among all.
        sparse: which of the two mixes tokens.
        backend: of all kernels.
    """

    def __init__(
        self, config: HybridConfig, place: int, *, sparse: bool, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        dim = config.dim
        options: dict[str, Any] = dict(iterations=config.sinkhorn_iterations, backend=backend)
        self.mixing = StreamMixer(config.streams, dim, place=2 * place, **options)
        self.feeding = StreamMixer(config.streams, dim, place=2 * place + 1, **options)
        self.mixing_norm = RMSNorm(dim, eps=NORM_EPS, backend=backend)
        self.feeding_norm = RMSNorm(dim, eps=NORM_EPS, backend=backend)
        self.mixer: nn.Module = (
            GatedSparseAttention(
                dim,
                config.sparse_heads,
                key_heads=config.key_heads,
                head_width=config.sparse_width,
                index_heads=config.index_heads,
                index_width=config.index_width,
                k_base=config.k_base,
                k_min=config.k_min,
                k_max=config.k_max,
                law=config.law,
                sinks=config.sinks,
                rope_base=config.rope_base,
                backend=backend,
            )
            if sparse
            else GatedDeltaNet(
                dim,
                expand_v=1.0,
                head_dim=config.delta_width,
                num_heads=config.delta_heads,
                backend=backend,
            )
        )
        self.feed_forward = SwiGLU(dim, config.feed_forward_width, backend=backend)

    def force(self, x: Tensor, *, tape: Tape | None) -> tuple[Tensor, Tensor | None]:
        """What the layer adds to the streams ``[B, T, n, C]``, and the loss of its indexer."""
        mixed, loss = self.mixing(x, lambda u: self._mix(self._normed(u, self.mixing_norm), tape))
        fed, _ = self.feeding(
            mixed, lambda u: (self.feed_forward(self._normed(u, self.feeding_norm)), None)
        )
        return fed - x, loss

    def _mix(self, u: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mixer, GatedDeltaNet):
            return self.mixer(u), None
        attention = cast(GatedSparseAttention, self.mixer)
        if tape is None:
            y, _, loss = attention.forward_with_loss(u)
            return y, loss
        y, selection, loss = attention.forward_with_loss(u, tape.replayed())
        tape.record(selection)
        return y, loss

    def _normed(self, u: Tensor, norm: nn.Module) -> Tensor:
        # Streams are fp32: what follows is in the dtype of the layer's products.
        return norm(u.to(autocast_dtype(u.device) or u.dtype))


def drawn(module: nn.Module, std: float) -> None:
    """Draw the weights of linear layers anew, but those of a SwiGLU, some of which stay zero."""
    for child in module.children():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=std)
        elif not isinstance(child, SwiGLU):
            drawn(child, std)
