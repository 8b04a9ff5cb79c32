"""The rotation that ``kernelize`` puts in place of that of ``transformers``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .positions.apply_rotary import apply_rotary


class RotaryPosEmb(nn.Module):
    """Of queries and keys whose columns j and j + D / 2 are a pair, as in LLaMA and GPT-NeoX."""

    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            q, k: ``[B, H, T, D]``, or where ``unsqueeze_dim`` is 2 ``[B, T, H, D]``.
            cos, sin: ``[B, T, D]`` or ``[1, T, D]``, whose halves are the same.
        """
        if unsqueeze_dim not in (1, 2):
            raise ValueError(f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
        wide = torch.promote_types(q.dtype, torch.float32)
        # The halves are the same.
        angles = [x[..., : x.shape[-1] // 2].to(wide) for x in (cos, sin)]
        if len(cos) == 1:
            angles = [x[0] for x in angles]
        if unsqueeze_dim == 2:
            return apply_rotary(q, *angles), apply_rotary(k, *angles)
        q, k = (apply_rotary(x.transpose(1, 2), *angles) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2)
