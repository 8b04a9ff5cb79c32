"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from fusewright.example import scale
from fusewright.example.elementwise import reference
from fusewright_testkit.conformance import Operation, Package

PACKAGE = Package(
    "fusewright.example",
    names="scale",
    registered="scale",
    without_triton="assert scale(torch.ones(3), 2.0).tolist() == [2.0, 2.0, 2.0]\n",
)


class ScaleOp(Operation):
    """scale by 0.3."""

    name = "scale"
    small = (4, 3)
    tiny = (2, 2)
    several = (33, 65)
    growing = ((4, 3), (6, 3), (9, 3))
    empty = ((0, 3), (0,))
    gpu = ((1000,), (300, 70))
    # Its derivative is the op itself, of the gradient alone.
    exempt: ClassVar = {
        "test_input_changed_after_the_forward_pass_is_noticed": "nothing is saved",
        "test_traced_graph_calls_the_op_and_its_backward": "the op is its own derivative",
    }

    def public(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return scale(x, 0.3, **options)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return reference.scale(x, 0.3)

    def draw(self, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        return [torch.randn(sizes, device=device).to(dtype)]

    def kept(self, tensors: list[torch.Tensor]) -> int:
        return 0


SCALE = ScaleOp()
OPERATIONS = {SCALE.name: SCALE}
