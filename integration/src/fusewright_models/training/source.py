"""What the training loop asks of data and of losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor


class Batch(Protocol):
    """What the loop asks of a batch; the rest is between source and loss function.

    Attributes:
        tokens: how many the model reads.

    It may also have ``padding``: how many of its tokens stand for nothing, 0-d on the device that
    trains; None, or no such attribute, where all stand for something. Of several processes each
    takes ``part(first, last)``: its rows from number ``first`` to before ``last``; where they
    share the rows of each task, ``part_of_rows(rank, group)``.
    """

    @property
    def tokens(self) -> int: ...


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


# What an evaluation computes of a batch, and what computes it: `directly`, or a stepper's `scored`,
# which may replay it.
Work = Callable[[Any], Tensor]
Compute = Callable[[Work, Any], Tensor]


def directly(work: Work, batch: Any) -> Tensor:
    return work(batch)


class Source(Protocol[BatchT_co]):
    """Endless batches, made or kept on the device that trains, whose order can be continued."""

    def sample(self, batch: int) -> BatchT_co: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Told(NamedTuple):
    """What a loss function returns that has more to say than its loss; every time the same names.

    Attributes:
        loss: to train on, 0-d.
        means: further numbers of the batch, 0-d, of which a log point shows the mean over the steps
            that were taken.
        counts: numbers of the batch, 0-d, of which a log point shows the sum over all steps, those
            that were skipped too, and over processes, where it is not zero.
    """

    loss: Tensor
    means: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]


def told_of(found: Tensor | Told) -> Told:
    return found if isinstance(found, Told) else Told(found, {}, {})
