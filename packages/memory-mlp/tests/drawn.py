"""What records of operations on flat lists of tensors share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from fusewright.memory_mlp.common.weights import weight_shapes
from fusewright_testkit.conformance import Operation
from fusewright_testkit.yardstick import as_tuple

Tensor = torch.Tensor
F32, F64 = torch.float32, torch.float64

INTERNAL = dict.fromkeys(
    ("test_refused_input_touches_no_memory", "test_tensors_on_two_devices_are_refused"),
    "the layer that calls it has checked its operands",
)
PARTIAL = INTERNAL | {"test_transform_is_right": "the first output is not one of all operands"}
MANY = {"test_any_choice_of_inputs_may_require_gradients": "a few choices among its many are tests"}


def normal(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """Draws tensors of normal numbers, in fp64 beside fp64 operands, else in fp32."""
    state = F64 if dtype == F64 else F32

    def draw(*shape: int, spread: float = 1.0) -> Tensor:
        return spread * torch.randn(*shape, device=device, dtype=state)

    return draw


def drawn_memory(
    draw: Callable[..., Tensor], lead: tuple[int, ...], hidden: int, width: int
) -> list[Tensor]:
    """Weights whose outputs are of the size of their inputs."""
    spreads = width**-0.5, 0.1, hidden**-0.5, 0.1
    shapes = weight_shapes(lead, hidden, width)
    return [draw(*shape, spread=s) for shape, s in zip(shapes, spreads, strict=True)]


@dataclass(frozen=True)
class FlatOp(Operation):
    """An op on flat lists of tensors, with options of its own."""

    options: dict[str, Any] = field(default_factory=dict)
    form: str = ""

    low = torch.float16
    gpu_dtypes = (torch.bfloat16, torch.float32)
    function: ClassVar[str]

    @property
    def name(self) -> str:
        return self.function + self.form

    def having(self, **options: Any) -> Self:
        """The op with options of its own."""
        return replace(self, options=self.options | options)

    def sample(self, sizes: tuple, dtype: torch.dtype, device: str) -> list[Tensor]:
        return self.draw(*sizes, dtype, device)


class AnyStridesOp(FlatOp):
    """The kernels' outputs are contiguous, the reference's have any strides."""

    def reference(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        outputs = as_tuple(super().reference(*tensors, **options))
        return tuple(y.contiguous() for y in outputs)
