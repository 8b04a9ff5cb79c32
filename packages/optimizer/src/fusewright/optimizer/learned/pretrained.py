"""Networks with trained weights for ``LearnedOptimizer``: the one that comes with the package, and
the public ones from a local file.
"""

from __future__ import annotations

import os
from importlib.resources import files

import torch

from ..common.weights_file import check_names, check_shapes, read_weights
from .learned_update import UpdateMLP


def trained_update_mlp() -> UpdateMLP:
    """The network that the repository's ``packages/optimizer/meta_training`` has trained, on small
    perceptrons, convolutions, embeddings and attention over up to 1000 steps, for ``lr=1`` and no
    weight decay. Nothing is downloaded.

    Its time features beyond 300 steps have no weight: after 1000 steps it goes on as at step 1000.
    The README says where it helps and where AdamW is better.

    Returns:
        An ``UpdateMLP`` of fp32 on the CPU, without gradients. ``requires_grad_()`` of its
        ``weights()`` makes it live; with gradients to its offsets too only plain torch serves.
    """
    with files(__package__).joinpath("trained_update_mlp.pt").open("rb") as file:
        trained = torch.load(file, map_location="cpu", weights_only=True)
    mlp = UpdateMLP(exp_mult=trained["exp_mult"], step_mult=trained["step_mult"])
    mlp.load_state_dict(trained["weights"])
    return mlp.requires_grad_(False)


# The public file's name of each weight, and ours.
PUBLIC_NAMES = {
    "network.input.weight": "first.weight",
    "network.input.bias": "first.bias",
    "network.linear_0.weight": "second.weight",
    "network.linear_0.bias": "second.bias",
    "network.output.weight": "last.weight",
    "network.output.bias": "last.bias",
}
# Learned with the public weights, but not in their file: defaults of PyLO's AdafacLO.
PUBLIC_OFFSETS = {
    "momentum_offsets": (0.15216392, 0.14245212, 0.06812963),
    "square_offsets": (0.01079706,),
    "factored_offsets": (0.18621896, -0.10864615, -0.06185547),
}


def load_update_mlp(path: str | os.PathLike[str], *, step_mult: float = 0.01) -> UpdateMLP:
    """The public weights from a local file: model.safetensors of the Hugging Face model
    btherien/mulo, with the decays that were learned with them.

    Args:
        path: of the file; nothing is downloaded.
        step_mult: of the update; the public weights go with 0.01.

    Returns:
        A network without gradients. ``requires_grad_()`` of its ``weights()`` makes it live; with
        gradients to its offsets too only plain torch serves.

    Raises:
        ImportError: the package safetensors is not installed.
        ValueError: the file is no safetensors file, or has other names or shapes than those of the
            public weights.
    """
    public = read_weights(path, "load_update_mlp")
    mlp = UpdateMLP(step_mult=step_mult)
    check_names("the file", public, PUBLIC_NAMES)
    state = mlp.state_dict()
    check_shapes(public, {theirs: state[name].shape for theirs, name in PUBLIC_NAMES.items()})
    offsets = {name: torch.tensor(values) for name, values in PUBLIC_OFFSETS.items()}
    mlp.load_state_dict({PUBLIC_NAMES[name]: x for name, x in public.items()} | offsets)
    return mlp.requires_grad_(False)
