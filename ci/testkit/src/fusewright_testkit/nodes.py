"""What autograd has recorded."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node


def nodes_of(y: Tensor) -> set[Node]:
    """All nodes that a backward pass from y goes through, those of leaves included."""
    nodes: set[Node] = set()
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [following for following, _ in node.next_functions]
    return nodes
