"""How a token is drawn from logits, and how a draft of it is held against them.

Nothing here waits for the device.

Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv 1904.09751 (top-p); Leviathan,
Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token, of equal ones the
            first.
        top_p: tokens are drawn from the smallest set of the most likely ones whose probabilities
            reach it, of equally likely ones those of lower numbers first; 1 draws from all.
        vocab_size: tokens from here on are never drawn, 1 or more; None draws from all of the
            model's.
        generator: on the model's device; None takes torch's own.

    Raises:
        ValueError: a temperature below 0, a top_p that is not above 0 and at most 1, or a
            vocab_size below 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    vocab_size: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 or positive, and finite; got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1; got {self.vocab_size}")

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is drawn from.

        Args:
            logits: ``[.., V]``.

        Returns:
            Probabilities in fp32, ``[.., V]`` up to ``vocab_size``, and ``[..]``, bool: whether the
            logits over the temperature are finite. Where they are not, all tokens are as likely.
        """
        logits = logits.float()[..., : self.vocab_size]
        if self.temperature != 0.0:
            logits = logits / self.temperature
        sound = logits.isfinite().all(-1)
        logits = logits.where(sound.unsqueeze(-1), 0.0)
        if self.temperature == 0.0:
            most = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, most, 1.0), sound
        p = logits.softmax(-1)
        return p if self.top_p == 1.0 else nucleus(p, self.top_p), sound

    def draw(self, p: Tensor) -> Tensor:
        """A token for each ``p [.., V]``, ``[.., 1]``; p need not sum to 1."""
        if self.temperature == 0.0:
            return p.argmax(-1, keepdim=True)
        # What torch.multinomial draws, which waits for the device to look at p.
        return (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax(-1, True)

    def verified(self, p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        """Of a draft that was drawn from ``q [.., V]`` whether it is a token to take, and the one
        to take in its place where it is not, each ``[.., 1]``: whichever is taken has the
        distribution ``p [.., V]``.

            accept with probability min(1, p(draft) / q(draft)), else draw from max(p - q, 0)
        """
        of_p, of_q = p.gather(-1, draft), q.gather(-1, draft)
        u = torch.rand(of_p.shape, device=p.device, generator=self.generator)
        rest = (p - q).clamp(min=0.0)
        # Nothing is left where p is q, and a draft is refused there by rounding alone.
        rest = rest.where(rest.sum(-1, keepdim=True) > 0.0, p)
        return u * of_q < of_p, self.draw(rest)


def nucleus(p: Tensor, least: float) -> Tensor:
    """``p [.., V]`` of the smallest set of tokens that together have ``least`` of it, over its sum;
    0 of all others.
    """
    ordered, tokens = p.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered[..., :-1].double().cumsum(-1), (1, 0))
    # A token is needed where those before it have not reached it.
    needed = torch.zeros_like(p, dtype=torch.bool).scatter(-1, tokens, before < least)
    p = p.where(needed, 0.0)
    return p / p.sum(-1, keepdim=True)
