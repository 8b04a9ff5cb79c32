"""A layer recomputed is what it was: choices, random numbers, autocast and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


class Tape:
    """What a layer chose when it was first computed, for when it is recomputed: a choice between
    keys that are nearly equal may fall the other way for a rounding error, and a gradient would be
    another function's.
    """

    def __init__(self, kept: list[Any] | None = None) -> None:
        self.kept: list[Any] = [] if kept is None else kept
        self.place: int | None = None

    def replayed(self) -> Any:
        """What was chosen at this place of the layer; None where nothing is replayed."""
        return None if self.place is None else self.kept[self.place]

    def record(self, choice: Any) -> None:
        """Go on to the layer's next choice, after this one."""
        if self.place is None:
            self.kept.append(choice)
        else:
            self.place += 1

    def rewind(self) -> Tape:
        """Replay from the start."""
        self.place = 0
        return self


class Forced(nn.Module):
    """Calls a layer's force, where other buffers can replace its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, tape: Tape, **context: Any) -> tuple[Tensor, Tensor | None]:
        force: Any = self.layer.force
        return force(x, tape=tape, **context)


class Surroundings:
    """The surroundings of a layer when it was first computed.

    Attributes:
        buffers: copies of its persistent ones, by their names in `Forced`; what a layer derives
            from its options is in buffers that are not persistent.
    """

    def __init__(self, layer: nn.Module, device: torch.device, drops: bool) -> None:
        self.device = device
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.random: list[Tensor] = []
        if drops:
            self.random.append(torch.get_rng_state())
            if device.type == "cuda":
                self.random.append(torch.cuda.get_rng_state(device))
        own = dict(layer.named_buffers())
        saved = {name: x for name, x in layer.state_dict().items() if name in own} if own else {}
        self.buffers = {f"layer.{name}": x.detach().clone() for name, x in saved.items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as entered:
            for kind, enabled, dtype in self.autocast:
                options = dict(enabled=enabled, dtype=dtype, cache_enabled=self.caches)
                entered.enter_context(torch.autocast(kind, **options))  # type: ignore[arg-type]
            if self.random:
                gpus = [self.device] if self.device.type == "cuda" else []
                entered.enter_context(torch.random.fork_rng(gpus))
                torch.set_rng_state(self.random[0])
                for state in self.random[1:]:
                    torch.cuda.set_rng_state(state, self.device)
            yield
