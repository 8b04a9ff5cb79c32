"""The gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._core.typed import called_as
from ..common.padded_layer import PaddedLayer
from .gated_feed_forward import gated_feed_forward


class SwiGLU(PaddedLayer):
    """(SiLU(x A^T) * x B^T) C^T, without biases; x A^T and x B^T are one product.

    Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    A state dict holds ``[2 F, d]`` and ``[d, F]``, copies without the padding; one with it loads
    too, if it is zero. Of another F it is a size mismatch. States of optimizers have the stored
    shapes, and so have sharded weights (DTensors), in a state dict too.

    Args:
        dim: d, width of input and output.
        hidden_width: F, width of the gated hidden layer, any number. It is stored as S, F rounded
            up to a multiple of 32. Weights beyond F are zero, get gradients of exactly zero, and
            stay zero under training.
        backend: "auto", "triton" or "reference": as in :func:`gated_feed_forward`.
        device, dtype: of the weights.

    Attributes:
        joint: ``nn.Linear(d, 2 * S, bias=False)``, A above B.
        output: ``nn.Linear(S, d, bias=False)``, C.

    Example:
        >>> layer = SwiGLU(512, 1365)
        >>> y = layer(x)                                  # [..., 512] to [..., 512]
    """

    first = "joint"
    blocks = 2
    joint: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., d]`` to the same shape, as :func:`gated_feed_forward`, which says what it
        raises.
        """
        return gated_feed_forward(x, self.joint.weight, self.output.weight, backend=self.backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
