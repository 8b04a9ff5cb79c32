"""HybridLM: three layers of Gated DeltaNet to one of gated sparse attention, on residual streams,
in a stack whose states are recomputed.

    p_0 = n copies of the embedding of each token
    p   = midpoint stack of L layers D D D G D D D G ... over p_0          [B, T, n, C]
    h_t = mean over streams of p_t
    next token:         logits = W RMSNorm(h_t)
    token after next:   z_t = W_f [h_t ; embedding of token t+1], through one layer G of its own,
                        logits = W RMSNorm(mean over streams)

    loss = CE(next) + 0.3 CE(token after next) + sum over layers G of the indexer's KL

A token sees none after it: the delta rule is a recurrence, and selection and attention are causal.

Gated DeltaNet: arXiv 2412.06464. Gated Sparse Attention: arXiv 2601.15305. mHC: arXiv 2512.24880.
Reversible stack: arXiv 2512.02056. A second token's prediction: DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.gsa import all_keys
from fusewright.norm import Backend, RMSNorm
from fusewright.reversible import MidpointStack, Passed
from torch import Tensor, nn

from ..._core.typed import called_as
from ..checks import check_backend, check_synchronised, check_targets, check_tokens
from ..documents import IGNORED, Documents, checked_documents
from ..parts import Relay, check_parts
from ..published import Published
from .byte_embedding import ByteEmbedding
from .config import HybridConfig
from .layers import NORM_EPS, Caches, HybridLayer, Observer, drawn
from .relayed import RelayedCaches
from .streams import replicated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STD = 0.02


class Losses(NamedTuple):
    """Of a batch, 0-d in fp32.

    Attributes:
        total: what is trained on; not finite where the stack saturated.
        following: mean cross entropy of the next token, in nats.
        second: of the token after next; 0 where no token has one.
        indexer: sum of the indexers' losses.
        selected: keys that a query attends to, its mean over queries and layers.
        saturated: whether a state left its range, 0-d bool.
        tape_bytes: what is kept for the backward pass beside two states.
    """

    total: Tensor
    following: Tensor
    second: Tensor
    indexer: Tensor
    selected: Tensor
    saturated: Tensor
    tape_bytes: int


class HybridLM(nn.Module, Published):
    """Language model of gated delta rule and gated sparse attention.

    Args:
        config: the shape of the model.
        backend: who computes: "auto" (Triton for CUDA tensors, plain torch for CPU ones), "triton"
            or "reference".
        token_bytes: of each token, for ``embedding="bytes"``; left out, token i is the byte i of a
            vocabulary of up to 256.

    Parameters are fp32 on the default device; train them as they are, under autocast for bf16. A
    model that was cast to bf16 or fp16 computes as under autocast of that dtype: streams, states
    and what else autocast leaves in fp32 stay so. Its gradients are rounded to its dtype, and so
    are embeddings of bytes.

    Example:
        >>> model = HybridLM(HYBRID["tiny"])
        >>> model.loss(tokens).backward()                           # tokens [B, T + 1]
        >>> logits = model.logits(model(tokens))                    # [B, T + 1, V]
    """

    config_type = HybridConfig
    extra_names = frozenset({"bytes"})

    def __init__(
        self,
        config: HybridConfig,
        *,
        backend: Backend = "auto",
        token_bytes: Sequence[bytes] | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.config, self.backend = config, backend
        self.embedding = self._make_embedding(token_bytes, backend)
        layers = [
            HybridLayer(config, place, sparse=config.is_sparse(place), backend=backend)
            for place in range(config.layers)
        ]
        self.stack = MidpointStack(
            layers,
            step=config.step,
            mode=config.mode,
            fraction_bits=config.fraction_bits,
            backend=backend,
        )
        self.fusion = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.second = HybridLayer(config, config.layers, sparse=True, backend=backend)
        self.final_norm = RMSNorm(config.dim, eps=NORM_EPS, backend=backend)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        drawn(self, STD)

    def extras(self) -> dict[str, Any]:
        if not isinstance(self.embedding, ByteEmbedding):
            return {}
        # As text: of each byte the character of its number.
        return {"bytes": [x.decode("latin-1") for x in self.embedding.token_bytes()]}

    @classmethod
    def options_from(cls, extras: dict[str, Any]) -> dict[str, Any]:
        if "bytes" not in extras:
            return {}
        return {"token_bytes": [text.encode("latin-1") for text in extras["bytes"]]}

    def _make_embedding(self, token_bytes: Sequence[bytes] | None, backend: Backend) -> nn.Module:
        config = self.config
        if config.embedding == "plain":
            if token_bytes is not None:
                raise ValueError('token_bytes are for embedding="bytes"; got them with "plain"')
            embedding = nn.Embedding(config.vocab_size, config.dim)
            nn.init.normal_(embedding.weight, std=STD)
            return embedding
        if token_bytes is None and config.vocab_size <= 256:
            token_bytes = [bytes([byte]) for byte in range(config.vocab_size)]
        if token_bytes is None or len(token_bytes) != config.vocab_size:
            got = "none" if token_bytes is None else f"those of {len(token_bytes)}"
            raise ValueError(f"wanted the bytes of {config.vocab_size} tokens; got {got}")
        return ByteEmbedding(token_bytes, config.dim, backend=backend)

    @overload
    def forward(
        self,
        tokens: Tensor,
        targets: None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        dense: bool = False,
        observe: Observer | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Losses: ...

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        dense: bool = False,
        observe: Observer | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor | Losses:
        """What the model makes of each token and those before it; all losses, where targets are
        given.

        Args:
            tokens: ``[B, T]``.
            targets: ``[B, T]``, the token after each; T >= 2. Those at a row's end may be -100:
                nothing is to be predicted there, and means are over the rest.
            dense: attention goes to all keys that a query sees, and the indexers learn from that.
            observe: is told of each sparse attention, its input and its selection.
            cu_seqlens: ``[N + 1]``, where documents that do not see one another begin and end in
                the only row, from 0 to T. What follows a document's last token is predicted if
                targets say so; the token after next is not.
            mask: ``[B, T]``, bool, False for padding before or behind the tokens of a row or
                document, whose targets are -100.
            max_seqlen: at least the tokens of the longest document, with ``dense`` and documents,
                whose memory it bounds; None takes T.

        Returns:
            ``[B, T, C]``, normed; or the losses, of which ``total`` is to be trained on.

        Raises:
            TypeError: tokens, targets, cu_seqlens or mask are no tensor of integers, or bools.
            ValueError: they are not as above, or on another device than the model, or T < 2 with
                targets.
        """
        check_tokens(tokens, self.head.weight.device)
        documents = checked_documents(tokens, cu_seqlens, mask)
        if targets is None:
            with self._precision():
                return self.final_norm(self._hidden(tokens, documents=documents).x.mean(-2))
        check_targets(targets, tokens)
        if tokens.shape[1] < 2:
            raise ValueError(f"wanted two tokens or more in a row; got {list(tokens.shape)}")
        with self._precision():
            return self._losses(tokens, targets, dense, observe, documents, max_seqlen)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    @torch.no_grad()
    def read(
        self,
        tokens: Tensor,
        caches: Caches | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Caches]:
        """:meth:`forward` of the tokens ``[B, T]`` that follow what the caches have read, none at
        first, and the caches then, which are the given ones. No gradients.

        Args:
            tokens: any T; T >= 1 without a group.
            caches: of an earlier call.
            group: the processes that share the tokens of each row: each gives its part of them,
                in their order, of any length, 0 too, and has hidden rows and caches of that, those
                of sparse attention with the keys of all parts so far. Caches go from each process
                to the next one, layer after layer.

        Raises:
            TypeError: as `forward`.
            ValueError: as `forward`; the caches have read another number of rows, or are given
                beside a group.
            RuntimeError: parameters are sharded, beside a group.
        """
        h, caches = self.read_unnormed(tokens, caches, group=group)
        return self.normed(h), caches

    @torch.no_grad()
    def read_unnormed(
        self,
        tokens: Tensor,
        caches: Caches | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Caches]:
        """`read`, but for the last norm: hidden rows ``[B, T, C]`` for `normed` and `draft`."""
        check_tokens(tokens, self.head.weight.device)
        if group is not None:
            if caches is not None:
                raise ValueError(
                    "wanted no caches beside a group, whose first process begins the rows; got some"
                )
            with self._precision():
                return self._read_part(tokens, group)
        caches = {} if caches is None else caches
        # The first layer is no sparse one.
        if caches and len(caches[0].state) != len(tokens):
            raise ValueError(
                f"wanted tokens of the {len(caches[0].state)} rows that the caches have read; "
                f"got {len(tokens)} rows"
            )
        with self._precision():
            return self._hidden(tokens, caches=caches).x.mean(-2), caches

    def normed(self, h: Tensor) -> Tensor:
        """Hidden rows ``[.., C]`` after the last norm, for `logits`."""
        with self._precision():
            return self.final_norm(h)

    @torch.no_grad()
    def draft(
        self, h: Tensor, following: Tensor, caches: Caches | None = None
    ) -> tuple[Tensor, Caches]:
        """What the second layer makes of tokens and the one after each: hidden rows ``[B, T, C]``,
        normed, for the logits of the token after next, and its cache then, which is the given one.
        No gradients.

        Args:
            h: ``[B, T, C]``, of `read_unnormed`, T >= 1: of the tokens that follow what the cache
                has been given.
            following: ``[B, T]``, the token after each.
            caches: of an earlier call of this; none of `read`'s.

        Raises:
            TypeError, ValueError: following are no tokens as in `forward`, or not as many as h.
        """
        check_tokens(following, self.head.weight.device)
        if h.shape[:2] != following.shape:
            raise ValueError(
                f"wanted a token after each of {list(h.shape[:2])}; got {list(following.shape)}"
            )
        caches = {} if caches is None else caches
        with self._precision():
            streams = self._fused(h, following)
            delta, _ = self.second.force(streams, tape=None, caches=caches)
            return self.final_norm((streams + delta).mean(-2)), caches

    def _fused(self, h: Tensor, following: Tensor) -> Tensor:
        """The streams of the second layer."""
        joined = torch.cat([h, self.embedding(following).to(h.dtype)], -1)
        return replicated(self.fusion(joined).to(h.dtype), self.config.streams)

    def _read_part(self, tokens: Tensor, group: ProcessGroup) -> tuple[Tensor, Caches]:
        """What the stack makes of this process's tokens, ``[B, T, C]``, and the caches then."""
        check_parts(self)
        caches = RelayedCaches(Relay(group, tokens.device), tokens.shape[1])
        if tokens.numel():
            h = self._hidden(tokens, caches=caches).x.mean(-2)
        else:
            h = self.embedding(tokens)
            caches.pass_by(len(self.stack.layers))
        caches.relay.finish()
        return h, {place: cache for place, cache in caches.items() if cache is not None}

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, ``[.., V]`` of ``hidden [.., C]``."""
        with self._precision():
            return self.head(hidden)

    def loss(
        self, tokens: Tensor, *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """What to train on: `losses`' total."""
        return self.losses(tokens, cu_seqlens=cu_seqlens, mask=mask).total

    def next_token_loss(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """Of ``tokens [B, T + 1]`` the mean cross entropy of each after the first, given those
        before it, in nats.

        Args:
            tokens: as above, T >= 1.
            targets: ``[B, T]``, what to predict in place of ``tokens[:, 1:]``; -100 stands for
                nothing, and the mean is over the rest.
            group: as in `read`; tokens are this process's part and the one after it, T >= 0. The
                mean is over the part's, NaN of none.

        Raises:
            TypeError: as `forward`.
            ValueError: as `forward`; fewer than two tokens.
            RuntimeError: gradients would stay those of one of several processes; autograd is on, or
                parameters are sharded, beside a group.
        """
        check_synchronised(self)
        check_tokens(tokens, self.head.weight.device, least=2 if group is None else 1)
        read = tokens[:, :-1]
        if targets is None:
            targets = tokens[:, 1:]
        else:
            check_targets(targets, read)
        with self._precision():
            if group is not None:
                return self._cross_entropy(self._read_part(read, group)[0], targets)
            return self._cross_entropy(self._hidden(read).x.mean(-2), targets)

    def losses(
        self,
        tokens: Tensor,
        *,
        dense: bool = False,
        observe: Observer | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Losses:
        """All losses of ``tokens [B, T + 1]``, each token after the first given those before it.

        Args:
            tokens: as above.
            dense: attention goes to all keys that a query sees, and the indexers learn from that.
            observe: is told of each sparse attention, its input and its selection.
            cu_seqlens: ``[N + 1]``, as in `forward`, from 0 to T + 1: each token is predicted from
                those of its own document, and the first of a document from none.
            mask: ``[B, T + 1]``, as in `forward`; padding is not predicted.

        Raises:
            TypeError: as `forward`.
            ValueError: as `forward`; fewer than three tokens.
            RuntimeError: gradients would stay those of one of several processes.
        """
        check_synchronised(self)
        check_tokens(tokens, self.head.weight.device, least=3)
        targets = tokens[:, 1:]
        documents = checked_documents(tokens, cu_seqlens, mask)
        if documents is not None:
            # The last token of a document has nothing to predict: no layer reads it.
            (cu_seqlens, mask), targets = documents.less_last(tokens, targets)
        options: dict[str, Any] = dict(cu_seqlens=cu_seqlens, mask=mask)
        return self(tokens[:, :-1], targets, dense=dense, observe=observe, **options)

    def _losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        dense: bool,
        observe: Observer | None,
        documents: Documents | None,
        max_seqlen: int | None,
    ) -> Losses:
        counts: list[Tensor] = []

        def listen(attention: Any, u: Tensor, selection: Any) -> None:
            # Of all queries but for padding, which selects none.
            count = selection.count.float()
            some = None if documents is None else (count > 0).sum().clamp(min=1)
            counts.append(count.mean() if some is None else count.sum() / some)
            if observe is not None:
                observe(attention, u, selection)

        later, rest = targets[:, 1:], None
        if documents is not None:
            rest, later = documents.less_last(tokens, later)
        batches, length = tokens.shape
        every, most = (
            all_keys(
                *(batches, n, tokens.device),
                **({} if of is None else of.options | {"max_seqlen": max_seqlen}),
            )
            if dense
            else None
            for n, of in ((length, documents), (length - 1, rest))
        )
        passed = self._hidden(tokens, given=every, observe=listen, documents=documents)
        h = passed.x.mean(-2)
        following = self._cross_entropy(h, targets)
        # Behind the last target of a row any token will do: nothing before it sees that.
        streams = self._fused(h[:, :-1], targets[:, :-1].clamp(min=0))
        context: dict[str, Any] = dict(given=most, observe=listen, documents=rest)
        delta, own = self.second.force(streams, tape=None, **context)
        second = self._cross_entropy((streams + delta).mean(-2), later)
        # The mean over no token is no number, and documents may be of two tokens each.
        second = torch.where((later != IGNORED).any(), second, 0.0)
        indexer = passed.aux if own is None else passed.aux + own
        total = following + self.config.second_weight * second + self.config.index_weight * indexer
        selected = torch.stack(counts).mean()
        return Losses(
            total, following, second, indexer, selected, passed.saturated, passed.tape_bytes
        )

    def _precision(self) -> AbstractContextManager[Any]:
        """Autocast of the parameters' dtype where they are no wider than bf16 or fp16, if the
        caller has none: layers multiply streams, which are fp32, by parameters.
        """
        weight = self.head.weight
        device = weight.device.type
        if weight.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, weight.dtype)

    def _hidden(self, tokens: Tensor, **context: Any) -> Passed:
        """What the stack makes of the tokens' streams."""
        return self.stack(replicated(self.embedding(tokens), self.config.streams), **context)

    def _cross_entropy(self, h: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(
            self.final_norm(h), self.head.weight, targets.long(), backend=self.backend
        )
