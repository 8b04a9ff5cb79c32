"""The feed-forward layer with its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._core.typed import called_as
from ..common.padded_layer import PaddedLayer
from .feed_forward import feed_forward


class FeedForward(PaddedLayer):
    """SiLU(x A^T) C^T, without biases.

    Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, arXiv 1702.03118.

    A state dict holds ``[F, d]`` and ``[d, F]``, copies without the padding; one with it loads
    too, if it is zero. Of another F it is a size mismatch. States of optimizers have the stored
    shapes, and so have sharded weights (DTensors), in a state dict too.

    Args:
        dim: d, width of input and output.
        hidden_width: F, width of the hidden layer, any number. It is stored as S, F rounded up to a
            multiple of 32. Weights beyond F are zero, get gradients of exactly zero, and stay zero
            under training.
        backend: "auto", "triton" or "reference", as in :func:`feed_forward`.
        device, dtype: of the weights.

    Attributes:
        hidden: ``nn.Linear(d, S, bias=False)``, A.
        output: ``nn.Linear(S, d, bias=False)``, C.

    Example:
        >>> layer = FeedForward(512, 1365)
        >>> y = layer(x)                                  # [..., 512] to [..., 512]
    """

    first = "hidden"
    blocks = 1
    hidden: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., d]`` to the same shape, as :func:`feed_forward`, which says what it raises."""
        return feed_forward(x, self.hidden.weight, self.output.weight, backend=self.backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
