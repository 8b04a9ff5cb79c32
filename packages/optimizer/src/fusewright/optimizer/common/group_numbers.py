"""Numbers of parameter groups as kernels read them: those of the host are uploaded, tensors are
read in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .tables import Uploaded

Tensor = torch.Tensor


class GroupNumbers:
    """Tables of ``count`` numbers on a device.

    Attributes:
        tables: the address of each number, int64, and whether it is fp64 there rather than fp32,
            int64.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = Uploaded(count, torch.float64, device)
        self._addresses = Uploaded(count, torch.int64, device)
        self._wide = Uploaded(count, torch.int64, device)
        # The users' tensors, whose addresses are in the table.
        self.kept: list[Tensor] = []

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self._addresses.table, self._wide.table

    def point(self, numbers: Sequence[float | Tensor]) -> None:
        """Put these into the tables: numbers, or tensors of one in fp32 or fp64."""
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
