"""Documents that lie one after the other in rows of tokens, and a layout of the rows in which each
begins with a block of its own.

Nothing here reads on the host where documents begin: the layout has room for any documents of their
number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .checks import check_device, check_integers

Tensor = torch.Tensor


def check_documents(cu_seqlens: Tensor, x: Tensor) -> None:
    """cu_seqlens must be integers, [N + 1] beside one row of x or [B, N + 1]."""
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim not in (1, 2) or cu_seqlens.shape[-1] < 2:
        raise ValueError(
            "cu_seqlens must be [N + 1] or [B, N + 1] with N at least 1, "
            f"got {tuple(cu_seqlens.shape)}"
        )
    rows = 1 if cu_seqlens.ndim == 1 else len(cu_seqlens)
    if len(x) != rows:
        raise ValueError(
            f"cu_seqlens must be [N + 1] beside one row or [B, N + 1] with B = {len(x)}, "
            f"got {tuple(cu_seqlens.shape)}"
        )
    check_device("cu_seqlens", cu_seqlens, "x", x)


class Layout(NamedTuple):
    """Where the T tokens of rows stand among L places, in which documents begin with blocks.

    Attributes:
        places: ``[B, T]`` int64, of each token.
        present: ``[B, T]`` bool, which tokens are some document's, and no padding.
        tokens: ``[B, L]`` int64, which token stands at each place.
        filled: ``[B, L]`` bool, whether one does that is present.
        begins: ``[B, L / block]`` bool, which blocks a document begins with.
        bounds: ``[B, N + 1]`` int64, at which places documents begin, and where the blocks of the
            last one end.
    """

    places: Tensor
    present: Tensor
    tokens: Tensor
    filled: Tensor
    begins: Tensor
    bounds: Tensor

    def laid_out(self, x: Tensor, other: float = 0) -> Tensor:
        """``x [B, T, ...]`` of the tokens as ``[B, L, ...]``, ``other`` where none stands."""
        return of_tokens(x, self.tokens, self.filled, other)

    def in_rows(self, x: Tensor, other: float = 0) -> Tensor:
        """``x [B, L, ...]`` of the places as ``[B, T, ...]``, ``other`` for padding."""
        return of_tokens(x, self.places, self.present, other)


def of_tokens(x: Tensor, index: Tensor, wanted: Tensor | None = None, other: float = 0) -> Tensor:
    """``x[b, index[b, n]]`` of ``x [B, T, ...]``, ``[B, n, ...]``; ``other`` where not wanted.
    Each token is wanted at one place at most, so that its gradient is one value plus zeros, the
    same in any order.
    """
    shape = *index.shape, *x.shape[2:]
    if not x.numel():
        return x.new_full(shape, other)
    rows = torch.arange(len(x), device=x.device).unsqueeze(1) * x.shape[1]
    y = x.flatten(0, 1).index_select(0, (rows + index).flatten()).view(shape)
    if wanted is None:
        return y
    return y.masked_fill(~wanted.view(*wanted.shape, *(1,) * (x.ndim - 2)), other)


def bounds_in_order(cu_seqlens: Tensor, rows: int, tokens: int) -> Tensor:
    """``[B, N + 1]`` int64 of ``[N + 1]`` or ``[B, N + 1]``: numbers out of range or order count as
    the nearest that are not, since no check has read them.
    """
    return cu_seqlens.long().clamp(0, tokens).cummax(-1).values.expand(rows, -1).contiguous()


def layout_of(
    rows: int,
    tokens: int,
    block: int,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    blocks: int | None = None,
) -> Layout:
    """The layout of rows of T tokens in blocks of ``block`` places.

    Args:
        rows, tokens, block: B, T and the block's size.
        cu_seqlens: ``[N + 1]`` or ``[B, N + 1]``, where documents begin and end, from 0 to T; None:
            a row is one document. Numbers out of range or order count as the nearest that are not.
            Tokens of no document are padding.
        mask: ``[B, T]`` bool, False for padding, or None. Before the first token of a document, or
            behind its last one, padding has no place; between them it has.
        blocks: that a row's documents take at most; tokens that find no place are padding. None: as
            many as any documents of their number may take.
    """
    given = mask if cu_seqlens is None else cu_seqlens
    assert given is not None
    place = torch.arange(tokens, device=given.device).expand(rows, tokens).contiguous()
    if cu_seqlens is None:
        bounds = (tokens * torch.arange(2, device=given.device)).expand(rows, 2).contiguous()
    else:
        bounds = bounds_in_order(cu_seqlens, rows, tokens)
    documents = bounds.shape[1] - 1
    document = torch.searchsorted(bounds, place, right=True) - 1
    present = (document >= 0) & (document < documents)
    document = document.clamp(0, documents - 1)
    first, last = bounds[:, :-1], bounds[:, 1:]
    if mask is not None:
        present = present & mask
        none = torch.full_like(first, tokens)
        first = none.scatter_reduce(1, document, place.where(present, tokens), "amin")
        last = torch.zeros_like(none).scatter_reduce(
            1, document, (place + 1).where(present, 0), "amax"
        )
    taken = (last - first).clamp(min=0).add(block - 1) // block
    ends = taken.cumsum(1)
    begins = ends - taken
    places = begins.gather(1, document) * block + place - first.gather(1, document)
    count = (tokens + min(documents, tokens) * (block - 1)) // block
    if blocks is not None:
        count = blocks
        present = present & (places < count * block)
    number = torch.arange(count, device=given.device).expand(rows, count).contiguous()
    owner = torch.searchsorted(ends, number, right=True)
    some = owner < documents
    owner = owner.clamp(max=documents - 1)
    within = number - begins.gather(1, owner)
    start = first.gather(1, owner) + within * block
    token = start.unsqueeze(-1) + torch.arange(block, device=given.device)
    filled = (some.unsqueeze(-1) & (token < last.gather(1, owner).unsqueeze(-1))).flatten(1)
    # Empty places read some token, each another one: their zero gradients would wait for each other
    # at one row.
    spare = torch.arange(count * block, device=given.device) % max(tokens, 1)
    token = torch.where(filled, token.flatten(1), spare)
    if mask is not None and tokens:
        filled = filled & mask.gather(1, token)
    return Layout(
        places.where(present, place % max(count * block, 1)),
        present,
        token,
        filled,
        some & (within == 0),
        torch.cat([begins, ends[:, -1:]], 1).clamp(max=count) * block,
    )


def beginnings(begins: Tensor) -> Tensor:
    """``[B, blocks]`` int64: the block with which the document of each block of ``begins`` begins;
    the first one where none does before it.
    """
    number = torch.arange(begins.shape[1], device=begins.device)
    return torch.where(begins, number, 0).cummax(1).values


def rows_before(x: Tensor, begins: Tensor, reach: int) -> Tensor:
    """Of ``x [B, L, n]``, in the blocks of ``begins [B, blocks]``, the ``reach`` rows before each
    block, ``[B, blocks, reach, n]``; zeros for those from before its document.
    """
    count = begins.shape[1]
    size = x.shape[1] // count
    blocks = x.unflatten(1, (count, size))
    parts, missing, back = [blocks[:, :, :0]], reach, 1
    while missing:
        part = min(size, missing)
        kept = max(count - back, 0)
        before = F.pad(blocks[:, :kept, size - part :], (0, 0, 0, 0, count - kept, 0))
        parts.insert(0, before)
        missing, back = missing - part, back + 1
    number = torch.arange(count, device=x.device)
    own = size * (number - beginnings(begins)).unsqueeze(-1)
    seen = own >= torch.arange(reach, 0, -1, device=x.device)
    return torch.where(seen.unsqueeze(-1), torch.cat(parts, 2), 0.0)
