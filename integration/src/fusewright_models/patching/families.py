"""The models of ``transformers`` that can be patched, and what theirs are made of."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from ..extras import imported

EXTRA = "transformers"


class Family(NamedTuple):
    """What models of one ``model_type`` have in common.

    Attributes:
        prefix: of the names of their classes.
        folder: of their source.
        weight_offset: what their norms add to a weight.
        sandwiched: whether what attention and feed-forward network return is normalised before it
            is added to the residual.
    """

    prefix: str
    folder: str
    weight_offset: float = 0.0
    sandwiched: bool = False

    @property
    def source(self) -> ModuleType:
        return import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")

    def kind(self, name: str) -> type:
        """Of the family's classes the one of that name, without prefix."""
        return getattr(self.source, f"{self.prefix}{name}")


FAMILIES = {
    "llama": Family("Llama", "llama"),
    "mistral": Family("Mistral", "mistral"),
    "qwen2": Family("Qwen2", "qwen2"),
    "qwen3": Family("Qwen3", "qwen3"),
    "gemma": Family("Gemma", "gemma", weight_offset=1.0),
    "gemma2": Family("Gemma2", "gemma2", weight_offset=1.0, sandwiched=True),
    "gemma3_text": Family("Gemma3", "gemma3", weight_offset=1.0, sandwiched=True),
}


def family_of(model: Any) -> Family:
    """
    Raises:
        RuntimeError: ``transformers`` is not installed.
        TypeError: the model is no causal language model of a family that is known.
    """
    imported("transformers", extra=EXTRA, purpose="models of transformers")
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or type(model) is not family.kind("ForCausalLM"):
        names = ", ".join(f"{each.prefix}ForCausalLM" for each in FAMILIES.values())
        raise TypeError(f"model must be one of {names}; got {type(model).__name__}")
    return family
