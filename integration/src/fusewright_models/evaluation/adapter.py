"""The model ``fusewright`` of lm-eval (extra ``[eval]``); importing this registers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from .loading import load_scorer
from .scoring import generation_options


@register_model("fusewright")
class FusewrightLM(LM):
    """A TitanMAC or HybridLM, for lm-eval.

    Args:
        pretrained: folder of a run, of `fusewright-train export` or of ``save_pretrained``, or a
            repository of the Hugging Face hub.
        batch_size: windows or prompts that go through the model together.
        device: None takes cuda where there is one.
        max_batch_size: for lm-eval, which hands it over; not used.
        options: of `load_scorer`: tokenizer, max_length, dtype, backend, revision.

    Raises:
        ValueError: the batch size is no number; or as `load_scorer`.
        OSError: as `load_scorer`.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"wanted a batch_size of 1 or more; got {batch_size}")
        self.scorer = load_scorer(
            pretrained,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            batch_size=int(batch_size),
            **options,
        )
        self._device = self.scorer.device

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Of each context and continuation: log p of the latter, and whether it is what the model
        would write.
        """
        pairs = [request.args for request in requests]
        return self._cached("loglikelihood", requests, self.scorer.log_likelihoods(pairs))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Of each text: its log p."""
        texts = [request.args[0] for request in requests]
        return self._cached("loglikelihood_rolling", requests, self.scorer.of_texts(texts))

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model writes after each context, up to a text of ``until``."""
        found = [""] * len(requests)
        for options, places in _by_options(requests):
            contexts = [requests[place].args[0] for place in places]
            texts = self.scorer.continuations(contexts, **options)
            for place, text in zip(places, texts, strict=True):
                found[place] = text
        return self._cached("generate_until", requests, found)

    def _cached(self, kind: str, requests: list[Any], found: list[Any]) -> list[Any]:
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return found


def _by_options(requests: list[Any]) -> Iterable[tuple[dict[str, Any], list[int]]]:
    """Requests that ask for the same, by their places."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, request in enumerate(requests):
        options = generation_options(request.args[1])
        groups.setdefault(repr(options), (options, []))[1].append(place)
    return groups.values()
