"""Text continued token by token, the model's state carried from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .tokens import Tokenizer


class StreamingModel(Protocol):
    """What is asked of a model: hidden rows and a state that stands for everything read so far."""

    def __call__(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@torch.no_grad()
def generate(
    model: StreamingModel,
    prompt: Tensor,
    *,
    tokens: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    enough: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Draw a continuation of every prompt.

    Args:
        model: in evaluation mode.
        prompt: ``[B, P]`` int64, P >= 1, on the model's device.
        tokens: how many follow, 1 or more.
        temperature: logits are divided by it; 0 takes the most likely token.
        vocab_size: tokens from here on are never drawn; None draws from all of the model's.
        generator: on the model's device; None takes torch's own.
        enough: is asked after each token, of all so far ``[B, n]``, whether no more are wanted.

    Returns:
        ``[B, tokens]`` int64, the prompt not among them; fewer columns where they were enough.

    Raises:
        ValueError: an empty prompt, no tokens, a temperature below 0, or logits that are not finite
            over it.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"wanted prompts [B, P] with P >= 1; got {list(prompt.shape)}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1; got {tokens}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or positive, and finite; got {temperature}")
    hidden, state = model(prompt)
    drawn: list[Tensor] = []
    sound: list[Tensor] = []
    while True:
        logits = model.logits(hidden[:, -1]).float()[:, :vocab_size]
        if temperature != 0.0:
            logits = logits / temperature
        sound.append(logits.isfinite().all(dim=-1, keepdim=True))
        # What cannot be drawn from would end the program, on a GPU for good.
        logits = logits.where(sound[-1], 0.0)
        drawn.append(_draw(logits, greedy=temperature == 0.0, generator=generator))
        if len(drawn) == tokens or (enough is not None and enough(torch.cat(drawn, dim=1))):
            break
        hidden, state = model(drawn[-1], state)
    if not torch.cat(sound).all():  # sync: once
        raise ValueError(f"wanted finite logits over temperature {temperature}; got others")
    return torch.cat(drawn, dim=1)


def continued(
    model: StreamingModel,
    tokenizer: Tokenizer,
    prompt: np.ndarray,
    *,
    device: torch.device,
    tokens: int,
    temperature: float,
    seed: int,
) -> bytes:
    """The text that a model puts after the tokens ``prompt [P]``, without the prompt's own."""
    given = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(device)
    drawn = generate(
        model,
        given,
        tokens=tokens,
        temperature=temperature,
        vocab_size=tokenizer.vocab_size,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return tokenizer.decode(drawn[0].cpu().numpy())


def _draw(logits: Tensor, *, greedy: bool, generator: torch.Generator | None) -> Tensor:
    """One token per row of ``logits [B, V]``, ``[B, 1]``."""
    if greedy:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
