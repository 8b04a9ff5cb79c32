"""A network for ``LearnedOptimizer`` that comes with the package."""

from __future__ import annotations

from importlib.resources import files

import torch

from .update_mlp import UpdateMLP


def trained_update_mlp() -> UpdateMLP:
    """The network that ``fusewright.optimizer.meta_training`` has trained, on small perceptrons,
    convolutions, embeddings and attention over up to 1000 steps, for ``lr=1`` and no decay of
    weights. Nothing is fetched.

    Its time features beyond 300 steps have no weight: after 1000 steps it moves on as it did then.
    The README tells where it helps and where AdamW is better.

    Returns:
        An ``UpdateMLP`` of fp32 on the CPU, without gradients. ``requires_grad_()`` of its
        ``weights()`` makes it live; with gradients to its offsets too only plain torch serves.
    """
    with files(__package__).joinpath("trained_update_mlp.pt").open("rb") as file:
        kept = torch.load(file, map_location="cpu", weights_only=True)
    mlp = UpdateMLP(exp_mult=kept["exp_mult"], step_mult=kept["step_mult"])
    mlp.load_state_dict(kept["weights"])
    return mlp.requires_grad_(False)
