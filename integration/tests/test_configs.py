"""Shapes of models: what is refused, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusewright_models import HYBRID, HybridLM, TitanMAC, TransformerNP

from .trainers import SMALL, SMALL_TITAN_MAC

MODELS = {
    "transformer-np": (TransformerNP, SMALL),
    "titan-mac": (TitanMAC, SMALL_TITAN_MAC),
    "hybrid": (HybridLM, HYBRID["tiny"]),
}
INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [
        *(("transformer-np", "width", width, "width must be .*got") for width in (15, 24, 528)),
        ("transformer-np", "layers", 0, "layers must be at least 1; got 0"),
        ("transformer-np", "components", 0, "components must be at least 1; got 0"),
        ("transformer-np", "norm", "mid", "norm must be one of .*got 'mid'"),
        ("transformer-np", "scale", "sigma", "scale must be one of .*got 'sigma'"),
        ("titan-mac", "vocab_size", 0, "vocab_size must be at least 1; got 0"),
        ("titan-mac", "layers", 0, "layers must be at least 1; got 0"),
        ("titan-mac", "segment", 0, "segment must be at least 1; got 0"),
        ("titan-mac", "persistent", -1, "persistent must be at least 0; got -1"),
        ("titan-mac", "convolution", -1, "convolution must be at least 0; got -1"),
        ("titan-mac", "heads", 3, "dim must be divisible by heads; got dim 16, heads 3"),
        ("titan-mac", "heads", 4, "dim must be heads times a width that the attention takes; got "),
        ("titan-mac", "memory_heads", 3, "dim must be divisible by memory_heads; got dim 16, mem"),
        ("titan-mac", "memory_chunk", 3, "segment must be divisible by memory_chunk in variant 'm"),
        ("titan-mac", "variant", "mad", "variant must be one of .*got 'mad'"),
        ("titan-mac", "gate", "origin", "gate must be one of .*got 'origin'"),
        ("titan-mac", "memory_rule", "mean", "memory_rule must be one of .*got 'mean'"),
        ("titan-mac", "outer_grad", "half", "outer_grad must be one of .*got 'half'"),
        ("titan-mac", "rope_base", 1.0, "rope_base must be above 1 and finite; got 1.0"),
        ("titan-mac", "rope_base", INFINITE, "rope_base must be above 1 and finite; got inf"),
        ("transformer-np", "frequencies", -1, "frequencies must be at least 0; got -1"),
        ("hybrid", "layers", 0, "layers must be at least 1; got 0"),
        ("hybrid", "sinks", -1, "sinks must be at least 0; got -1"),
        ("hybrid", "key_heads", 0, "key_heads must be at least 1; got 0"),
        ("hybrid", "rope_base", 1.0, "rope_base must be above 1 and finite; got 1.0"),
        ("hybrid", "step", NAN, "step must be at least 0 and finite; got nan"),
        ("hybrid", "mode", "fast", "mode must be one of"),
        ("hybrid", "embedding", "x", "embedding must be one of"),
        ("hybrid", "k_min", 9, "k_min <= k_base <= k_max; got 2, 9, 8, 16"),
        ("hybrid", "window", 3, "k_min <= k_base <= k_max; got 5, 4, 8, 16"),
        ("hybrid", "sparse_width", 3, "sparse_width must be even; got 3"),
        ("hybrid", "form", "linear", "form must be one of"),
        ("hybrid", "index_rotary", -2, "index_rotary must be at least 0; got -2"),
        ("hybrid", "index_rotary", 3, "index_rotary must be even, up to index_width 16; got 3"),
        ("hybrid", "index_rotary", 18, "index_rotary must be even, up to index_width 16; got 18"),
        ("hybrid", "key_heads", 4, "sparse_heads must be a multiple of key_heads; got 2 and 4"),
        ("hybrid", "second_weight", -1.0, "second_weight must be at least 0 and finite; got -1.0"),
    ],
)
def test_values_out_of_their_range_are_refused(model, field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(MODELS[model][1], **{field: value})


@pytest.mark.parametrize(
    ("model", "field", "value", "wanted"),
    [
        ("transformer-np", "indicator", 2, "True or False"),
        ("transformer-np", "indicator", "yes", "True or False"),
        ("transformer-np", "layers", 2.0, "an int"),
        ("transformer-np", "layers", True, "an int"),
        ("transformer-np", "width", 16.0, "an int"),
        ("transformer-np", "width", "16", "an int"),
        ("transformer-np", "components", None, "an int"),
        ("transformer-np", "frequencies", 1.0, "an int"),
        ("titan-mac", "dim", 16.0, "an int"),
        ("titan-mac", "layers", True, "an int"),
        ("titan-mac", "feed_forward_width", "64", "an int"),
        ("titan-mac", "memory", 1, "True or False"),
        ("titan-mac", "checkpointing", None, "True or False"),
        ("titan-mac", "rope_base", "big", "a number"),
        ("hybrid", "dim", 2.5, "an int"),
        ("hybrid", "layers", True, "an int"),
        ("hybrid", "layers", None, "an int"),
        ("hybrid", "key_heads", "2", "an int"),
        ("hybrid", "step", "h", "a number"),
        ("hybrid", "second_weight", True, "a number"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused(model, field, value, wanted):
    with pytest.raises(TypeError, match=f"{field} must be {wanted}; got {value!r}"):
        replace(MODELS[model][1], **{field: value})


@pytest.mark.parametrize("model", MODELS)
def test_unknown_backend_is_refused(model):
    kind, config = MODELS[model]
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        kind(config, backend="cuda")
