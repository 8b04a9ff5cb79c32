"""A layer recomputed is what it was: choices, random numbers, autocast and buffers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core.typed import called_as

Tensor = torch.Tensor
# Its place among generators.
GPU = 1


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

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class Generators:
    """The default generators of the CPU and, where ``device`` is one, of the GPU: a layer that is
    given no other draws from these.

    While a CUDA graph is captured, the state of a GPU's generator is its place in that graph: a
    replay draws from there on, counted from the generator's place before the replay. The same
    graph can therefore draw the same numbers twice, and no other graph can.
    """

    def __init__(self, device: torch.device) -> None:
        self.all = [torch.default_generator]
        if device.type == "cuda":
            self.all.append(torch.cuda.default_generators[device.index])
        self.captured = self.captures()
        self.states = self.get_states()

    def captures(self) -> bool:
        """Whether the GPU's work goes into a CUDA graph."""
        return len(self.all) > GPU and torch.cuda.is_current_stream_capturing()

    def get_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.all]

    def drawn(self) -> dict[int, Tensor]:
        """Which generators have been drawn from since the last call of this, by their place in
        ``all``, and their states then.
        """
        before, self.states = self.states, self.get_states()
        return changed(before, self.states)

    def check_graph(self) -> None:
        """Raise where the backward pass is not captured as the forward pass was: one of the two
        alone, or in another graph, which has drawn less than the forward pass had at its end.
        """
        captures = self.captures()
        if captures != self.captured or (
            captures and offset(self.all[GPU].get_state()) < offset(self.states[GPU])
        ):
            raise RuntimeError(
                "a layer that draws random numbers on the GPU must have its backward pass in the "
                "CUDA graph of its forward pass, got another graph or none"
            )

    @contextmanager
    def restored(self, states: dict[int, Tensor]) -> Iterator[None]:
        """Draw from these states on, and afterwards from where all generators were: one that a
        force seeded to the state that it had is not in ``states``, and its replay moves it too.
        """
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(changed(before, self.get_states()))

    def set_states(self, states: dict[int, Tensor]) -> None:
        for place, state in states.items():
            self.all[place].set_state(state)


def changed(before: list[Tensor], after: list[Tensor]) -> dict[int, Tensor]:
    """Those of ``before`` that are others in ``after``, by their place."""
    pairs = enumerate(zip(before, after, strict=True))
    return {place: old for place, (old, new) in pairs if bytes_of(old) != bytes_of(new)}


def bytes_of(state: Tensor) -> bytes:
    """Of a state, which is on the host; not through torch, as a mode may refuse others' tensors."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def offset(state: Tensor) -> int:
    """How much a GPU's generator has drawn since its seed: the last eight bytes of its state."""
    return int.from_bytes(bytes_of(state)[-8:], sys.byteorder)


class Surroundings:
    """The surroundings of a layer when it was first computed.

    Attributes:
        buffers: copies of its persistent ones, by their names in `Forced`; what a layer derives
            from its options is in buffers that are not persistent.
        random: states of the generators that it draws from, as `Generators.drawn` has them.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            # Autocast knows no meta tensors.
            for kind in dict.fromkeys(("cpu", device.type))
            if kind != "meta"
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.random: dict[int, Tensor] = {}
        # Not from a state dict: FSDP takes back what it has gathered where one is asked for.
        self.buffers = {
            f"{prefix}.{name}": x.detach().clone()
            for prefix, module in layer.named_modules(prefix="layer")
            for name, x in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    @contextmanager
    def restored(self, generators: Generators) -> Iterator[None]:
        with ExitStack() as entered:
            for kind, enabled, dtype in self.autocast:
                options = dict(enabled=enabled, dtype=dtype, cache_enabled=self.caches)
                entered.enter_context(torch.autocast(kind, **options))  # type: ignore[arg-type]
            entered.enter_context(generators.restored(self.random))
            yield
