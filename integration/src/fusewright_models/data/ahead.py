"""Batches of one shape, many of them drawn at once.

A draw is some thirty small launches, a Cholesky factor among them, or hundreds, of `PriorTasks`,
however many tasks it makes: for a small model as long as the step that they are for, or longer.
Drawn for many steps at once, they take nothing of it; memory is that of the tasks.

Where sizes are drawn, all batches of a draw have those of one. So there are several draws, and each
batch is of the next of them: steps that follow one another have other sizes.
"""

from __future__ import annotations

from typing import Any

from .task import Sampler, Task

# Draws of other sizes side by side.
TURNS = 8


class DrawnAhead:
    """A source of a sampler's tasks, drawn for many batches at a time.

    The tasks are of the sampler's kind, not the ones that it gives batch by batch.

    Args:
        sampler: whose tasks they are.
        batches: how many are drawn at once, at least 1.

    Raises:
        ValueError: ``batches`` is below 1.
    """

    def __init__(self, sampler: Sampler, batches: int) -> None:
        if batches < 1:
            raise ValueError(f"wanted 1 batch or more to draw ahead; got {batches}")
        self.sampler, self.batches = sampler, batches
        self.before = sampler.state_dict()
        self.drawn: Task | None = None
        self.batch = self.taken = 0

    def sample(self, batch: int) -> Task:
        """The next ``batch`` tasks, views of what was drawn."""
        if self.drawn is None or self.taken == self.batches or batch != self.batch:
            self._draw(batch)
        assert self.drawn is not None
        first = self.taken * batch
        self.taken += 1
        return self.drawn.part(first, first + batch)

    def _draw(self, batch: int) -> None:
        self.before = self.sampler.state_dict()
        self.drawn = self.sampler.sample(batch * self.batches)
        self.batch, self.taken = batch, 0

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state before the draw, and how much of it was taken."""
        counts = {"batches": self.batches, "batch": self.batch, "taken": self.taken}
        return {"before": self.before, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: what was drawn is drawn again.

        Raises:
            ValueError: it was taken of other tasks, or of draws of another size.
        """
        if state.keys() != self.state_dict().keys() or state["batches"] != self.batches:
            got = state.get("batches", "none")
            raise ValueError(f"wanted a run that draws {self.batches} batches ahead; got {got}")
        self.sampler.load_state_dict(state["before"])
        self.before, self.drawn = state["before"], None
        self.batch, self.taken = state["batch"], 0
        if state["taken"]:
            self._draw(state["batch"])
            self.taken = state["taken"]


class DrawnInTurn:
    """A source of the tasks of several `DrawnAhead`, one batch of each in its turn.

    Args:
        sampler: whose tasks they are.
        batches: of each draw, at least 1.

    Raises:
        ValueError: ``batches`` is below 1.
    """

    def __init__(self, sampler: Sampler, batches: int) -> None:
        self.sampler = sampler
        self.draws = [DrawnAhead(sampler, batches) for _ in range(TURNS)]
        self.turn = 0

    def sample(self, batch: int) -> Task:
        """The next ``batch`` tasks, views of what was drawn."""
        draw = self.draws[self.turn]
        self.turn = (self.turn + 1) % TURNS
        return draw.sample(batch)

    def state_dict(self) -> dict[str, Any]:
        """The state of every draw, whose turn it is, and the sampler's for the draw to come."""
        draws = [draw.state_dict() for draw in self.draws]
        return {"turn": self.turn, "draws": draws, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: what was drawn is drawn again.

        Raises:
            ValueError: it was taken of other tasks, or of draws of another size or number.
        """
        found = state.get("draws", ())
        if len(found) != TURNS:
            raise ValueError(f"wanted a run of {TURNS} draws in turn; got {len(found) or 'none'}")
        for draw, each in zip(self.draws, found, strict=True):
            draw.load_state_dict(each)
        self.sampler.load_state_dict(state["sampler"])
        self.turn = state["turn"]


def drawn_ahead(sampler: Sampler, batches: int) -> DrawnAhead | DrawnInTurn:
    """A source of the sampler's tasks, ``batches`` of them drawn at once: of several draws in turn
    where they have several sizes.

    Raises:
        ValueError: ``batches`` is below 1.
    """
    sizes = sampler.sizes()
    one = len(sizes) == 1 and all(each.is_one for each in sizes.values())
    return DrawnAhead(sampler, batches) if one else DrawnInTurn(sampler, batches)
