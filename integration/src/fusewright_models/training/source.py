"""What the training loop asks of data."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Batch(Protocol):
    """What the loop asks of a batch; the rest is between source and loss function."""

    @property
    def tokens(self) -> int: ...


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


class Source(Protocol[BatchT_co]):
    """Endless batches, made or kept on the device that trains, whose order can be continued."""

    def sample(self, batch: int) -> BatchT_co: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
