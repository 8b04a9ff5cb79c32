"""Tokens by the bytes that they are written in: a vocabulary of any size has 8192 rows.

    z = one for each of the token's bytes at its position, over sqrt(bytes)      [32 * 256]
    e = RMSNorm(W (z - mean(z)) / deviation(z))

z is never made: mean and deviation follow from the number of bytes, and W z is a sum of one row of
W for each byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from fusewright.norm import Backend, RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F

from ..._core.typed import called_as

POSITIONS, BYTES = 32, 256
ROWS = POSITIONS * BYTES
STD, EPS = 0.02, 1e-6


class ByteEmbedding(nn.Module):
    """Embedding of tokens by their bytes and these bytes' positions.

    Args:
        token_bytes: the bytes of each token, in the order of tokens; of more than 32 those that
            come first are taken, whole characters of UTF-8.
        dim: C.
        backend: of the norm.

    Raises:
        ValueError: a token has no bytes.
    """

    rows: Tensor
    counts: Tensor

    def __init__(
        self, token_bytes: Sequence[bytes], dim: int, *, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        empty = [token for token, written in enumerate(token_bytes) if not written]
        if empty:
            raise ValueError(f"wanted bytes of every token; token {empty[0]} has none")
        cut = [beginning(written) for written in token_bytes]
        counts = torch.tensor([len(written) for written in cut])
        padded = bytearray(b"".join(written.ljust(POSITIONS, b"\0") for written in cut))
        table = torch.frombuffer(padded, dtype=torch.uint8).view(len(cut), POSITIONS)
        place = torch.arange(POSITIONS)
        rows = torch.where(place < counts[:, None], table.to(place) + BYTES * place, ROWS)
        # Of the tokenizer, not of the training: no state.
        self.register_buffer("rows", rows.int(), persistent=False)
        self.register_buffer("counts", counts.float(), persistent=False)
        self.weight = nn.Parameter(torch.empty(ROWS, dim).normal_(std=STD / ROWS**0.5))
        self.norm = RMSNorm(dim, eps=EPS, backend=backend)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., C]`` of tokens ``[...]``."""
        rows = self.rows[tokens.flatten()]
        counts = self.counts[tokens.flatten(), None].to(self.weight.dtype)
        # The row after the last is nothing, for positions without a byte.
        padded = F.pad(self.weight, (0, 0, 0, 1))
        summed = F.embedding_bag(rows, padded, mode="sum", padding_idx=ROWS)
        root = counts.sqrt()
        mean, deviation = root / ROWS, (1.0 / ROWS - counts / ROWS**2).sqrt()
        standard = (summed / root - mean * self.weight.sum(0)) / deviation
        return self.norm(standard).view(*tokens.shape, self.weight.shape[1])

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def token_bytes(self) -> list[bytes]:
        """Those that it was made of, each as far as it was taken."""
        place = torch.arange(POSITIONS, device=self.rows.device)
        # Rows are of bytes and their places; the last stands for none.
        table = (self.rows - BYTES * place).tolist()  # sync: the words are written to a file
        counts = self.counts.int().tolist()  # sync: likewise
        return [bytes(row[:count]) for row, count in zip(table, counts, strict=True)]


def beginning(written: bytes) -> bytes:
    """As many whole characters as have room; all bytes that have, where they are no text."""
    cut = written[:POSITIONS]
    if len(written) <= POSITIONS:
        return cut
    # A byte 10xxxxxx goes on with a character.
    end = POSITIONS
    while end > 0 and written[end] & 0xC0 == 0x80:
        end -= 1
    return written[:end] or cut
