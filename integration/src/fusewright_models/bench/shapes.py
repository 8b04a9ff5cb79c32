"""The sizes of a step, and the operations that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ..models.transformer_np import TransformerNPConfig

ShapeT = TypeVar("ShapeT", bound=tuple[int, ...])


def parsed(kind: Callable[..., ShapeT], text: str, wanted: str, numbers: str) -> ShapeT:
    """Whole numbers by comma, of 1 and more.

    Raises:
        ValueError: it is none.
    """
    try:
        shape = kind(*map(int, text.split(",")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wanted}; got {text!r}") from error
    if min(shape) < 1:
        raise ValueError(f"{numbers} must be at least 1; got {text!r}")
    return shape


class Shape(NamedTuple):
    """M context rows, N target rows, B tasks."""

    context: int
    targets: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "64,500,64"."""
        return parsed(cls, text, "a shape is M,N,B such as 64,500,64", "M, N and B")

    @property
    def case(self) -> str:
        return f"M={self.context} N={self.targets} B={self.batch}"

    @property
    def tokens(self) -> int:
        return self.batch * (self.context + self.targets)


# A classical neural process, and four sizes of tabular foundation models.
SHAPES = (
    Shape(64, 500, 64),
    Shape(1_000, 100, 32),
    Shape(10_000, 1_000, 4),
    Shape(50_000, 2_000, 1),
    Shape(200_000, 5_000, 1),
)


def operations(config: TransformerNPConfig, shape: Shape) -> dict[str, float]:
    """Floating-point operations of the pruned model by pass, recomputation not counted.

    Two for each multiplication of a matrix product. A backward pass has twice a product's and 2.5
    times the attention's, which has five products after two.
    """
    d, used = config.width, config.feed_forward_width
    context, targets, batch = shape
    # The last block computes target rows alone.
    rows = (config.layers - 1) * (context + targets) + targets
    attention = batch * 4 * rows * context * d
    products = rows * (2 * d * d + 2 * d * used) + config.layers * context * 2 * d * d
    heads = targets * config.y_width * config.components * used * (d + 3)
    dense = batch * 2 * (products + heads)
    forward, backward = attention + dense, 2.5 * attention + 2 * dense
    return {"fwd": forward, "bwd": backward, "step": forward + backward}
