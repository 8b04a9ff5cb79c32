"""TitanMAC: a language model whose blocks have a memory that learns while it reads.

Each block, pre-norm, N being RMSNorm, with M the block's memory of one row of the batch:

    mac    S = [p | h_1, n_1, h_2, n_2, ...]   n = N(x) of one segment, h_t = M_before(n_t)
           y_t = h_t + attention of n_t over p and all h_j, n_j with j <= t
           x <- x + (y * gate(M(y + n))) W     M learns y_t + n_t, then reads it
    mag    y = attention of n over p and a window of n
           x <- x + (y * gate(M(n))) W         M learns n_t, then reads n_t
    mal    x <- x + M(N(x));  x <- x + (attention of n over p and a window of n) W
    lmm    x <- x + M(N(x))

and then x <- x + SwiGLU(N(x)) in all of them. M_before is the memory as the segments before left
it; p are P learned persistent rows of each block. B rows, T tokens, d width, H heads of width D.

Nothing sees the future. A token reads the memory after its own write and never a later one's. In
"mac" the paper's order [p | h | n] under a causal mask would show every token the whole of h, whose
later rows come of later tokens; here h_t stands beside its own token, and a causal mask over the
pairs is exactly what a token may know: h_j is a function of n_j and of earlier segments.

In "mac" the token's own rows h_t and n_t are added to what the attention makes of them, one for the
stream, both for the memory. The mean over a segment that attention is at first tells its tokens
hardly apart: without the sums a model learns which values there were and not to which keys they
belong (fusewright_models.studies.recall).

Positions are rotary and relative, within the segment ("mac", where h_t has its token's) or the
window; persistent rows have none. The memory has its order.

Where the paper leaves a choice. Persistent rows are given to the attention of each block, after its
norm, rather than once as tokens: rows that see themselves alone are the same for every input at
every layer, so nothing is lost, and none is computed. The memory is not made to learn them: what it
would know afterwards is again the same for every input, and its initial weights are learned. The
projection W comes after the gate, so that the memory reads what the attention says of each head.

Behrouz, Zhong and Mirrokni, Titans: Learning to Memorize at Test Time, arXiv 2501.00663.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from fusewright.attention import Backend
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.norm import RMSNorm
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..._core.typed import called_as
from ..checkpointing import recomputed
from ..checks import (
    autocast_dtype,
    check_backend,
    check_synchronised,
    check_targets,
    check_tokens,
)
from ..documents import IGNORED, checked_documents
from ..parts import Relay, check_parts
from ..published import Published
from .config import TitanMACConfig
from .layers import Attention, Block, LayerState
from .packed import Packed
from .rotation import Rotation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EMBEDDING_STD = 0.02

TITAN_MAC: dict[str, TitanMACConfig] = {
    # Bytes, minutes on a CPU.
    "tiny": TitanMACConfig(
        vocab_size=256,
        dim=64,
        layers=2,
        heads=4,
        segment=64,
        persistent=4,
        memory_chunk=16,
        memory_heads=2,
        memory_hidden=64,
    ),
    "l4": TitanMACConfig(),
    "profile": TitanMACConfig(vocab_size=49152, dim=512),
    "170m": TitanMACConfig(dim=768, layers=14, heads=12),
}


class TitanMACState(NamedTuple):
    """Where a sequence has come to: a pytree of tensors and one host number.

    Attributes:
        position: tokens read so far.
        blocks: what the layers of each block carry.
    """

    position: int
    blocks: tuple[tuple[LayerState, ...], ...]


class TitanMAC(nn.Module, Published):
    """Language model with a neural memory in every block.

    Args:
        config: the shape of the model.
        backend: who computes norms, attention, gating and memory: "auto" (Triton for CUDA tensors,
            plain torch for CPU ones), "triton" or "reference".

    Parameters are fp32 on the default device; train them as they are, under autocast for bf16.

    Example:
        >>> model = TitanMAC(TITAN_MAC["tiny"])
        >>> model.loss(tokens).backward()                           # tokens [B, T + 1]
        >>> hidden, state = model(tokens[:, :100])
        >>> hidden, state = model(tokens[:, 100:], state)           # goes on where that ended
        >>> logits = model.logits(hidden)                           # [B, T, V]
    """

    config_type = TitanMACConfig

    def __init__(self, config: TitanMACConfig, *, backend: Backend = "auto") -> None:
        super().__init__()
        check_backend(backend)
        self.config, self.backend = config, backend
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, backend=backend) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.dim, backend=backend)
        self._scale_parameters()

    @torch.no_grad()
    def _scale_parameters(self) -> None:
        """Every layer has drawn its own weights, by fan-in. Products that write to the stream are
        scaled by 1 / sqrt(2 L), so that its variance does not grow with depth.
        """
        residual_gain = 1.0 / math.sqrt(2 * self.config.layers)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        for module in self.modules():
            if isinstance(module, Block):
                for product in module.writers():
                    product.weight.mul_(residual_gain)
            elif isinstance(module, Attention) and module.persistent is not None:
                nn.init.normal_(module.persistent, std=EMBEDDING_STD)

    @overload
    def forward(
        self,
        tokens: Tensor,
        state: TitanMACState | None = None,
        *,
        targets: None = None,
        group: ProcessGroup | None = None,
    ) -> tuple[Tensor, TitanMACState]: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        state: TitanMACState | None = None,
        *,
        targets: Tensor,
        group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        room: int | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor,
        mask: Tensor | None = None,
        room: int | None = None,
    ) -> tuple[Tensor, None]: ...

    @overload
    def forward(
        self, tokens: Tensor, *, mask: Tensor, room: int | None = None
    ) -> tuple[Tensor, None]: ...

    def forward(
        self,
        tokens: Tensor,
        state: TitanMACState | None = None,
        *,
        targets: Tensor | None = None,
        group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        room: int | None = None,
    ) -> tuple[Tensor, TitanMACState | None] | Tensor:
        """What the model makes of each token and those before it; the loss, where targets are
        given.

        Args:
            tokens: ``[B, T]``, int64 or int32, on the model's device, each below V; they are not
                read for a check: torch's embedding fails on others as it does. Any T, 0 too.
            state: of the tokens before, from an earlier call with the same B; None at the start.
            targets: ``[B, T]``, int64 or int32, what to predict of each token; -100 stands for
                nothing, and the mean is over the rest. NaN where there is nothing at all.
            group: the processes that share the tokens of each row: each gives its part of them,
                in their order, of any length, 0 too, and has hidden rows, state and loss of that.
                States go from each process to the next one, block after block. No gradients.
            cu_seqlens: ``[N + 1]``, where documents begin and end in the only row, or ``[B, N +
                1]`` in each row, from 0 to T; some may be empty. Each is read as it is alone, from
                position 0 and the first memory on; tokens of none are padding. What follows a
                document's last token is predicted if targets say so.
            mask: ``[B, T]``, bool, False for padding before or behind the tokens of a row or
                document, whose targets are -100.
            room: places that a row's documents take at most, each in whole units of
                ``config.document_unit``, of which it is a multiple: the model reads as many.
                Tokens beyond are padding. None: as many as any N documents take, T + N (unit - 1).

        Returns:
            ``hidden [B, T, d]``, normed, in the compute dtype, and the state after the last token.
            Reading a sequence in pieces, down to one token at a time, gives what reading it whole
            gives. Gradients go through the state; ``detach_state`` ends them. With cu_seqlens or a
            mask there is no state, but None, and hidden rows of padding are 0. With targets, their
            mean cross entropy in nats, a scalar in fp32 (fp64 for a model in fp64); the logits are
            never all in memory.

        Raises:
            TypeError: tokens or cu_seqlens are no tensor of integers, mask none of bool, or state
                is none of a TitanMAC.
            ValueError: a shape or device is not as above, the state is of another batch or
                model, there is one beside a group, or either beside cu_seqlens or a mask.
            RuntimeError: autograd is on, or parameters are sharded, beside a group.
        """
        self._check(tokens, state)
        if targets is not None:
            check_targets(targets, tokens)
        if group is not None:
            check_parts(self)
            if state is not None:
                raise ValueError(
                    "wanted no state beside a group, whose first process begins the rows; got one "
                    f"of {state.position} tokens"
                )
        relay = None if group is None else Relay(group, tokens.device)
        packed = None
        documents = checked_documents(tokens, cu_seqlens, mask, by_row=True)
        if documents is not None:
            self._check_documents(state, group, room)
            packed = Packed.of(documents, tokens, self.config.document_unit, room)
            tokens = packed.layout.laid_out(tokens)
            targets = None if targets is None else packed.layout.laid_out(targets, IGNORED)
        hidden, after = self._read(tokens, state, relay, packed)
        if relay is not None:
            relay.finish()
        if targets is None:
            return (hidden, after) if packed is None else (packed.layout.in_rows(hidden), None)
        head = self.embedding.weight
        return linear_cross_entropy(hidden, head, targets.long(), backend=self.backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def _read(
        self,
        tokens: Tensor,
        state: TitanMACState | None,
        relay: Relay | None,
        packed: Packed | None,
    ) -> tuple[Tensor, TitanMACState]:
        x = self.embedding(tokens)
        x = x.to(autocast_dtype(x.device) or x.dtype)
        position = 0 if state is None else state.position
        if relay is not None:
            position = relay.take() or 0
            relay.give(position + tokens.shape[1])
        # A block makes its first state by itself, where FSDP has gathered its parameters.
        states = [None] * len(self.blocks) if state is None else state.blocks
        rotation = self._rotation(position, x, packed)
        after = []
        for block, before in zip(cast(list[Block], self.blocks), states, strict=True):
            carried = before if relay is None else relay.take()
            if tokens.numel():
                x, carried = self._run(block, x, rotation, carried, position, packed)
            elif carried is None:
                carried = block.init_state(len(tokens))
            if relay is not None:
                relay.give(carried)
            after.append(carried)
        hidden = self.final_norm(x) if tokens.numel() else x
        return hidden, TitanMACState(position + tokens.shape[1], tuple(after))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, ``[.., V]`` of ``hidden [.., d]``."""
        return nn.functional.linear(hidden, self.embedding.weight)

    def loss(
        self,
        tokens: Tensor,
        state: TitanMACState | None = None,
        *,
        targets: Tensor | None = None,
        group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        room: int | None = None,
    ) -> Tensor:
        """Mean cross entropy in nats per token of ``tokens[:, 1:]`` given those before each.

        Args:
            tokens: ``[B, T + 1]``, as in ``forward``.
            state: as in ``forward``, of the tokens before the first.
            targets: ``[B, T]``, as in ``forward``, in place of ``tokens[:, 1:]``.
            group: as in ``forward``; tokens are this process's part and the one after it.
            cu_seqlens: as in ``forward``, from 0 to T + 1: each token is predicted from those of
                its own document, and the first of a document from none.
            mask: ``[B, T + 1]``, as in ``forward``; padding is not predicted.
            room: as in ``forward``; the last token of a document is not read.

        Returns:
            What ``forward`` returns of ``tokens[:, :-1]`` and the targets.

        Raises:
            RuntimeError: in one of several processes, gradients of it would stay this process's;
                as ``forward``.
            ValueError: as ``forward``; there is no token.
        """
        check_synchronised(self)
        self._check(tokens, state)
        if tokens.shape[1] < 1:
            raise ValueError(f"wanted tokens [B, T + 1], at least one; got {list(tokens.shape)}")
        targets = tokens[:, 1:].long() if targets is None else targets
        options: dict[str, Any] = {"group": group, "room": room}
        documents = checked_documents(tokens, cu_seqlens, mask, by_row=True)
        if documents is not None:
            check_targets(targets, tokens[:, :-1])
            documents, targets = documents.less_last(tokens, targets)
            options |= documents.options
        return self(tokens[:, :-1], state, targets=targets, **options)

    def init_state(self, batch: int) -> TitanMACState:
        """The state before the first token of ``batch`` sequences."""
        return TitanMACState(
            0, tuple(block.init_state(batch) for block in cast(list[Block], self.blocks))
        )

    @staticmethod
    def detach_state(state: TitanMACState) -> TitanMACState:
        """The same state, through which no gradient goes."""
        return pytree.tree_map_only(Tensor, Tensor.detach, state)

    def _run(self, block: nn.Module, *arguments: Any) -> tuple[Tensor, tuple[LayerState, ...]]:
        return recomputed("block" if self.config.checkpointing else "none", block, *arguments)

    def _rotation(self, position: int, x: Tensor, packed: Packed | None) -> Rotation | None:
        config = self.config
        if not config.attends:
            return None
        positions = torch.arange(position, position + x.shape[1], device=x.device)
        if packed is not None and config.variant != "mac":
            positions = packed.positions()
        if config.variant == "mac":
            positions = positions % config.segment
        dtype = torch.promote_types(x.dtype, torch.float32)
        return Rotation.at(positions, config.dim // config.heads, config.rope_base, dtype)

    def _check_documents(
        self, state: TitanMACState | None, group: ProcessGroup | None, room: int | None
    ) -> None:
        """Refuse what does not go with documents."""
        for name, given in (("state", state), ("group", group)):
            if given is not None:
                raise ValueError(
                    f"wanted no {name} beside cu_seqlens or a mask, whose documents are read "
                    "whole; got one"
                )
        unit = self.config.document_unit
        if room is not None and (room < 1 or room % unit):
            raise ValueError(f"wanted room of whole units of {unit} tokens; got {room}")

    def _check(self, tokens: Tensor, state: TitanMACState | None) -> None:
        """Refuse what does not fit, before anything is computed."""
        check_tokens(tokens, self.embedding.weight.device)
        if state is None:
            return
        if not isinstance(state, TitanMACState):
            raise TypeError(f"wanted the state of a TitanMAC; got {type(state).__name__}")
        if len(state.blocks) != self.config.layers:
            raise ValueError(
                f"wanted the state of {self.config.layers} blocks; got one of {len(state.blocks)}"
            )
        batches = {part.shape[0] for part in pytree.tree_leaves(state) if isinstance(part, Tensor)}
        if batches - {len(tokens)}:
            raise ValueError(
                f"wanted the state of {len(tokens)} rows, as of tokens; got one of {max(batches)}"
            )
