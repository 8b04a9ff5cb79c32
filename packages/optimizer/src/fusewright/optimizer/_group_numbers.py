"""Numbers of parameter groups where a kernel reads them: those of the host uploaded, tensors of
others where they lie.
"""

from __future__ import annotations

import torch

from ._tables import Uploaded

Tensor = torch.Tensor


class GroupNumbers:
    """Tables of so many numbers on a device.

    Attributes:
        addresses: where each is, int64.
        wide: whether it is fp64 there, and not fp32, int64.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = Uploaded(count, torch.float64, device)
        self._addresses = Uploaded(count, torch.int64, device)
        self._wide = Uploaded(count, torch.int64, device)
        # Others' tensors, whose addresses the table has.
        self.kept: list[Tensor] = []

    @property
    def addresses(self) -> Tensor:
        return self._addresses.table

    @property
    def wide(self) -> Tensor:
        return self._wide.table

    def point(self, numbers: list[float | Tensor]) -> None:
        """Have the tables show these: numbers, or tensors of one in fp32 or fp64."""
        self.kept = [x for x in numbers if isinstance(x, Tensor)]
        self.values.hold([0.0 if isinstance(x, Tensor) else x for x in numbers])
        base, size = self.values.table.data_ptr(), self.values.table.element_size()
        self._addresses.hold(
            [
                x.data_ptr() if isinstance(x, Tensor) else base + size * place
                for place, x in enumerate(numbers)
            ]
        )
        self._wide.hold(
            [int(not isinstance(x, Tensor) or x.dtype == torch.float64) for x in numbers]
        )
