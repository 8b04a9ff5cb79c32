"""Which group the name of a parameter stands for."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import group_of

CORE = (
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.gate_up_proj.weight",
    "layers.0.mlp.gate_projection.weight",
    "layers.0.mlp.projections_gate.weight",
    "layers.0.mlp.w1.weight",
    "layers.0.attention.q_proj.weight",
    "propagated.weight",
    "layers.0.aggregate.weight",
)
OUTSIDE = (
    "model.embed_tokens.weight",
    "tok_embeddings.weight",
    "layers.0.mlp.gate.weight",
    "layers.0.mlp.gate.projection.weight",
    "layers.0.memory.gates.linear.weight",
    "layers.0.mixer.value_gate.weight",
    "layers.0.router.weight",
    "layers.0.input_layernorm.weight",
)


@pytest.mark.parametrize("name", CORE)
def test_projections_are_core(name):
    assert group_of(name, torch.empty(2, 3)) == "core"


@pytest.mark.parametrize("name", OUTSIDE)
def test_embeddings_norms_routers_and_gates_are_outside(name):
    assert group_of(name, torch.empty(2, 3)) == "embed"


@pytest.mark.parametrize("name", CORE)
def test_what_is_no_matrix_is_outside(name):
    assert group_of(name, torch.empty(3)) == "embed"
