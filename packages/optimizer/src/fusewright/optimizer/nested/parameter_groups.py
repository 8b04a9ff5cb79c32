"""Parameter groups of a model and how deep each lies.

Depth is relative: 0 for an embedding, (i + 1) / L for tensors of layer i of L, 1 for the head and
the norm before it, 1/2 for tensors whose names have no layer. A group has the mean of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Named = Iterable[tuple[str, Tensor]]
Grouping = Callable[[str, Tensor], str] | Sequence[Mapping[str, Any]]

LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")
HEADS = "lm_head", "final_norm", "norm_f", "ln_f"
EMBED, CORE = "embed", "core"
UNKNOWN = 0.5


def group_of(name: str, parameter: Tensor) -> str:
    """ "embed" for embeddings, norms, routers, gates and all tensors that are no matrices; "core"
    for the other matrices: projections to a gate too, such as SwiGLU's "gate_proj".
    """
    low = name.lower()
    outside = any(word in low for word in ("embed", "norm", "router"))
    outside = outside or any(map(is_gate, low.split(".")))
    return EMBED if outside or parameter.ndim != 2 else CORE


def is_gate(part: str) -> bool:
    """Whether a part of a name is that of a gate."""
    words = part.split("_")
    projects = any(word.startswith("proj") for word in words)
    return not projects and not {"gate", "gates"}.isdisjoint(words)


def relative_depths(names: Sequence[str]) -> list[float]:
    """Of each parameter, by its name among those of a model."""
    layers = [None if found is None else int(found[1]) for found in map(LAYER.search, names)]
    count = max((layer + 1 for layer in layers if layer is not None), default=0)
    return [depth(name, layer, count) for name, layer in zip(names, layers, strict=True)]


def depth(name: str, layer: int | None, count: int) -> float:
    if "embed" in name:
        return 0.0
    if layer is not None:
        return (layer + 1) / count
    top = name.rsplit(".", 1)[0]
    return 1.0 if top == "norm" or any(word in name for word in HEADS) else UNKNOWN


def parameter_groups(
    model: torch.nn.Module | Named, grouping: Grouping | None = None
) -> list[dict[str, Any]]:
    """Groups of tensors as torch.optim takes them, each with "name" and "depth".

    Args:
        model: or its named parameters; those that need no gradient are left out.
        grouping: a function of a parameter's name and the parameter that gives the name of its
            group, ``group_of`` where left out; or groups with "params", tensors or (name, tensor),
            with options of their own, "name" and "depth" among them where they are known.

    Raises:
        TypeError: model or grouping is neither.
        ValueError: no parameter is left.
    """
    named = named_of(model)
    relative = relative_depths([name for name, _ in named])
    depths = {id(p): depth for (_, p), depth in zip(named, relative, strict=True)}
    if grouping is None or callable(grouping):
        groups = grouped_by_name(named, grouping or group_of)
    else:
        groups = [completed(group, number) for number, group in enumerate(grouping)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("there must be parameters that need gradients, got none")
    for group in groups:
        of_group = [depths.get(id(p), UNKNOWN) for p in group["params"]]
        group.setdefault("depth", sum(of_group) / len(of_group))
    return groups


def named_of(model: torch.nn.Module | Named) -> list[tuple[str, Tensor]]:
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    wanted = "model must be a module or pairs of a name and a parameter"
    if isinstance(named, Tensor) or not isinstance(named, Iterable):
        raise TypeError(f"{wanted}, got {type(model).__name__}")
    pairs = list(named)
    for pair in pairs:
        if not is_named(pair):
            raise TypeError(f"{wanted}, got one of {type(pair).__name__}")
    return [(name, p) for name, p in pairs if p.requires_grad]


def is_named(x: Any) -> bool:
    pair = isinstance(x, (tuple, list)) and len(x) == 2
    return pair and isinstance(x[0], str) and isinstance(x[1], Tensor)


def tensor_of(x: Any) -> Tensor:
    return x[1] if is_named(x) else x


def grouped_by_name(
    named: list[tuple[str, Tensor]], grouping: Callable[[str, Tensor], str]
) -> list[dict[str, Any]]:
    """Groups by the name that grouping gives, in the order of their first tensors."""
    groups: dict[str, dict[str, Any]] = {}
    for name, p in named:
        group = grouping(name, p)
        if not isinstance(group, str):
            raise TypeError(f"grouping must give the name of a group, got {group!r} for {name}")
        groups.setdefault(group, {"name": group, "params": []})["params"].append(p)
    return list(groups.values())


def completed(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A caller's group, without parameters that need no gradient."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(f'groups must be mappings with "params", got {group!r}')
    params = group["params"]
    some = [params] if isinstance(params, Tensor) else list(params)
    trained = [p for p in map(tensor_of, some) if p.requires_grad]
    return {"name": f"group_{number}"} | dict(group) | {"params": trained}
