"""How many nodes of autograd a step has: each takes the host longer than a small kernel the GPU."""

from __future__ import annotations

from collections import Counter

import torch
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.models.transformer_np import TransformerNP, TransformerNPConfig
from fusewright_testkit.nodes import nodes_of


def test_matrices_of_a_block_are_cast_once_a_step():
    torch.manual_seed(0)
    config = TransformerNPConfig(x_width=1, width=16, layers=2, heads=2, feed_forward_width=20)
    model = TransformerNP(config)
    x, y = torch.randn(2, 5, 1), torch.randn(2, 5, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(x[:, :3], y[:, :3], x[:, 3:], y[:, 3:])
    casts = [node for node in nodes_of(loss) if node.name() == "CastBackward"]
    assert sorted(len(node.next_functions) for node in casts) == [5, 5]


def test_segments_of_whole_chunks_are_not_sliced_for_the_memory():
    torch.manual_seed(0)
    config = TITAN_MAC["tiny"]
    model = TitanMAC(config)
    found = []
    for segments in (1, 2):
        tokens = torch.randint(256, (1, segments * config.segment + 1))
        found.append(Counter(node.name() for node in nodes_of(model.loss(tokens))))
    assert found[0]["AliasBackward0"] == found[1]["AliasBackward0"]


def test_projections_of_a_layer_of_hybrid_are_one_node():
    torch.manual_seed(0)
    config = HYBRID["tiny"]
    model = HybridLM(config)
    layer, x = model.stack.layers[0], torch.randn(1, 9, config.streams, config.dim)
    with torch.autocast("cpu", torch.bfloat16):
        delta, _ = layer.force(x, tape=None)
    found = Counter(node.name() for node in nodes_of(delta.sum()))
    assert found["LinearsBackward"] == found["CastBackward"] == 1
