"""A layer of HybridLM: tokens are mixed, then each is fed forward, both on residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fusewright.deltanet import GatedDeltaNet
from fusewright.feed_forward import SwiGLU
from fusewright.gsa import GatedSparseAttention, KeyCache, Selection
from fusewright.norm import Backend, RMSNorm
from fusewright.reversible import Tape
from torch import Tensor, nn

from ..._core.typed import called_as
from ..checkpointing import recomputed
from ..documents import Documents
from .config import HybridConfig
from .streams import StreamMixer

NORM_EPS = 1e-6
# Tokens that a first cache has room for.
ROOM = 128

Observer = Callable[[GatedSparseAttention, Tensor, Selection], None]
Caches = dict[int, Any]


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
        self.place = place
        self.checkpointing = config.checkpointing
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
                form=config.form,
                index_rotary=config.index_rotary,
                k_base=config.k_base,
                k_min=config.k_min,
                k_max=config.k_max,
                law=config.law,
                sinks=config.sinks,
                window=config.window,
                rope_base=config.rope_base,
                temperature=config.index_temperature,
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

    def force(
        self,
        x: Tensor,
        *,
        tape: Tape | None,
        given: Selection | None = None,
        observe: Observer | None = None,
        caches: Caches | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer adds to the streams ``[B, T, n, C]``, and the loss of its indexer.

        Args:
            x: the streams.
            tape: of its choices.
            given: the keys that each query attends to, in the place of choices.
            observe: is told of a sparse attention, its input and what it selected, once.
            caches: what the layers have read before, by their place; x is what follows. There are
                neither gradients nor losses then.
            documents: of the rows, without caches.
        """
        # A call of the module, which FSDP gathers its parameters for.
        return self(x, tape, given, observe, caches, documents)

    def forward(
        self,
        x: Tensor,
        tape: Tape | None,
        given: Selection | None,
        observe: Observer | None,
        caches: Caches | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`force`."""
        if self.checkpointing == "none" or tape is not None or caches is not None:
            return self._force(x, tape, given, observe, documents, caches)
        choices = Tape()

        def layer(x: Tensor) -> tuple[Tensor, Tensor | None]:
            # What was chosen, and told, when it was first computed stays.
            kept = choices.rewind() if choices.kept else choices
            return self._force(x, kept, given, observe, documents)

        return recomputed(self.checkpointing, layer, x)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def _force(
        self,
        x: Tensor,
        tape: Tape | None,
        given: Selection | None,
        observe: Observer | None,
        documents: Documents | None,
        caches: Caches | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`force` by whatever keeps what its gradients need."""
        reading = self.mixing.read(x)
        u, loss = self.mixing_norm(reading.u), None
        options = {} if documents is None else documents.options
        if caches is not None:
            y = self._read(u, caches)
        elif isinstance(self.mixer, GatedDeltaNet):
            y = self.mixer(u, **options)
        else:
            y, loss = self._attend(u, tape, given, observe, options)
        mixed = self.feeding.read(self.mixing.write(reading, y))
        fed = self.feed_forward(self.feeding_norm(mixed.u))
        return self.feeding.write(mixed, fed, origin=reading.origin), loss

    def _attend(
        self,
        u: Tensor,
        tape: Tape | None,
        given: Selection | None,
        observe: Observer | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """What the tokens have of one another, and the loss of the indexer."""
        attention = cast(GatedSparseAttention, self.mixer)
        replayed = None if tape is None else tape.replayed()
        known = given if replayed is None else replayed
        y, selection, loss = attention.forward_with_loss(u, known, **options)
        if tape is not None:
            tape.record(selection)
        if observe is not None and replayed is None:
            observe(attention, u, selection)
        return y, loss

    def _read(self, u: Tensor, caches: Caches) -> Tensor:
        """The tokens that follow what the cache has read, which takes them up."""
        cache = caches.get(self.place)
        if isinstance(self.mixer, GatedDeltaNet):
            y, caches[self.place] = self.mixer.decode(u, cache)
            return y
        attention = cast(GatedSparseAttention, self.mixer)
        cache = with_room(attention, cache, *u.shape[:2])
        y = attention.decode(u, cache)
        caches[self.place] = cache
        return y


def drawn(module: nn.Module, std: float) -> None:
    """Draw the weights of linear layers again, but those of a SwiGLU, some of which stay zero."""
    for child in module.children():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=std)
        elif not isinstance(child, SwiGLU):
            drawn(child, std)


def with_room(
    attention: GatedSparseAttention, cache: KeyCache | None, batches: int, tokens: int
) -> KeyCache:
    """The cache where it has room for so many tokens more, or one of twice the size with what it
    holds: a token is copied no more than twice on average.
    """
    length = 0 if cache is None else cache.length
    if cache is not None and length + tokens <= cache.capacity:
        return cache
    roomy = attention.new_cache(batches, max(2 * (length + tokens), ROOM))
    if cache is not None:
        held = cache.keys, cache.values, cache.index_keys
        roomy.extend(*(memory[:, :length] for memory in held))
        roomy.lengths = cache.lengths
    return roomy
