"""Rows that hold more than one document, or padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.documents import bounds_in_order

# A target that is none.
IGNORED = -100


class Documents(NamedTuple):
    """Which tokens of rows ``[B, T]`` see one another.

    Attributes:
        cu_seqlens: ``[N + 1]``, where the documents of the only row begin and end, or ``[B, N +
            1]``, those of each row; None: each row is one.
        mask: ``[B, T]``, bool, False for padding before the first token of a document and behind
            its last one; None: there is none.
    """

    cu_seqlens: Tensor | None
    mask: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        """As the layers that mix tokens take them."""
        return self._asdict()

    def predicting(self, tokens: Tensor) -> Tensor:
        """``[B, T - 1]``: which of the first T - 1 tokens have their next one after them."""
        length = tokens.shape[1]
        goes_on = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        if self.mask is not None:
            goes_on = self.mask[:, :-1] & self.mask[:, 1:]
        if self.cu_seqlens is not None:
            bounds = bounds_in_order(self.cu_seqlens, len(tokens), length)
            place = torch.arange(length, device=tokens.device).expand_as(tokens).contiguous()
            document = torch.searchsorted(bounds, place, right=True)
            within = (document > 0) & (document < bounds.shape[1])
            goes_on = goes_on & within[:, :-1] & (document[:, 1:] == document[:, :-1])
        return goes_on

    def less_last(self, tokens: Tensor, targets: Tensor) -> tuple[Documents, Tensor]:
        """Of the first T - 1 tokens: those that have no next one are padding, and their targets
        ``[B, T - 1]`` -100.
        """
        goes_on = self.predicting(tokens)
        return Documents(self.cu_seqlens, goes_on), targets.where(goes_on, IGNORED)


def checked_documents(
    tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, *, by_row: bool = False
) -> Documents | None:
    """Those of tokens ``[B, T]``; None where neither is given. Nothing of them is read. Where each
    row may have documents of its own, ``by_row``.

    Raises:
        TypeError: cu_seqlens is no tensor of integers, or mask none of bool.
        ValueError: a shape or device is another.
    """
    if cu_seqlens is None and mask is None:
        return None
    if cu_seqlens is not None:
        check_kind("cu_seqlens", cu_seqlens, (torch.int64, torch.int32), tokens)
        shape = cu_seqlens.shape
        if len(shape) not in ((1, 2) if by_row else (1,)) or shape[-1] < 2:
            wanted = "[N + 1] or [B, N + 1]" if by_row else "[N + 1]"
            raise ValueError(f"wanted cu_seqlens {wanted} with N at least 1; got {list(shape)}")
        if len(tokens) != (1 if len(shape) == 1 else shape[0]):
            rows = "one row" if len(shape) == 1 else f"{shape[0]} rows"
            raise ValueError(f"wanted {rows} beside cu_seqlens; got {list(tokens.shape)}")
    if mask is not None:
        check_kind("mask", mask, (torch.bool,), tokens)
        if mask.shape != tokens.shape:
            raise ValueError(f"wanted a mask of {list(tokens.shape)}; got {list(mask.shape)}")
    return Documents(cu_seqlens, mask)


def check_kind(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], tokens: Tensor) -> None:
    """x must be a tensor of one of these dtypes on the device of the tokens."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(x, Tensor):
        raise TypeError(f"wanted {name} as a tensor of {wanted}; got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"wanted {name} in {wanted}; got {x.dtype}")
    if x.device != tokens.device:
        raise ValueError(f"wanted {name} on {tokens.device}, as tokens; got {x.device}")
