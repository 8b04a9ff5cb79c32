r"""The neural memory as a layer: projections, gates, the memory, the output.

    q, k = normalised(SiLU(conv(x W_q))), normalised(SiLU(conv(x W_k)))     v = SiLU(conv(x W_v))
    alpha, eta, theta = gates(x)
    S_t = eta_t S_(t-1) - theta_t (gradient of |M(k_t) - v_t|^2)
    M_t = (1 - alpha_t) M_(t-1) + alpha_t R + S_t      R: the initial weights, in the paper zero
    y_t = M_t(q_t), all heads joined, W_o

Behrouz, Zhong, Mirrokni, Titans: Learning to Memorize at Test Time, arXiv 2501.00663, sections 3.1,
3.2 and 4.4.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .._core.backends import Backend
from .._core.checks import check_option, checked_count
from .._core.documents import check_documents, layout_of
from .._core.typed import called_as
from ..common.checks import checked_positive
from ..common.weights import Weights
from ..inputs.gates import Gates
from ..inputs.projections import KEY_NORMS, KeyNorm, Projections
from ..inputs.tokens import finite_tokens, kept_tokens
from .checks import check_mask, check_rules, check_tokens, checked_head_dim, checked_starts
from .documents import check_independent, check_resets, in_rows
from .memory_state import (
    MemoryState,
    MemoryStats,
    Reads,
    detached,
    fresh_state,
    with_rows_reset,
)
from .steps import (
    Forget,
    Granularity,
    Memory,
    Read,
    Reduction,
    Rules,
    Scope,
    read,
    weights_at_end,
)
from .writing import OuterGrad, WritingMemory

OUTER_GRADS = ("full", "detach_state", "none")


class NeuralMemory(WritingMemory):
    """A memory that learns keys and values of a sequence while it is read, as a layer.

    A pure function of its arguments and parameters: the memory is a state that is passed in and
    returned. ``forward`` of a sequence cut anywhere, with that state, equals forward of the whole
    ("segment" alone makes a step of each call). No output depends on a later token.

    Args:
        dim: width of input and output.
        heads: number of memories side by side.
        head_dim: D, width of their keys and values; dim // heads where left out.
        hidden: width of a memory's hidden layers; 4 * D where left out.
        layers: of a memory. Two run on the kernels, more of granularity "token" without a clip too,
            any other number in plain torch; one is the
            linear memory W x + b.
        activation: of the hidden layers, "silu", "relu" or "gelu" (the exact one).
        chunk: tokens whose gradients are taken at the same weights.
        granularity: "token": every token is a step, with gates of its own, and reads the memory as
            ``read`` says. "chunk": one step for every chunk that is complete, with the mean of its
            tokens' gates; every query reads the memory as its chunk found it. "segment": likewise,
            one step for the tokens of a call.
        reduction: the inner loss of a step: "sum" of the squared residuals over tokens and
            features, "mean_feature" (the sum over tokens) or "mean_all", over the tokens that are
            written.
        key_norm: "l2" divides queries and keys of every head by their norm, "rms" by their root
            mean square, None leaves them.
        theta: "learned" by token and head, or a constant.
        max_step: what n * theta / (1 - eta) stays below where theta is learned, in units of the
            chosen loss, n being ``chunk``, or the tokens that a step pools where they are more. It
            starts at half of that. A step that pools n > chunk tokens takes chunk / n times their
            mean theta ("mean_all" has divided by n already, and takes the mean).
        scope: "sequence": every row of the batch has its memory. "batch_pooled": one memory serves
            all rows and every step pools their tokens, so that rows depend on one another; not for
            "token".
        convolution: taps of the causal depthwise convolution after the projections; 0 for none.
        forget: what the memory's weights tend to where they are forgotten: "initial", those of
            ``initial``, or "zero", as in the paper.
        memory_length: tokens that the memory is meant for: alpha starts at 1 / memory_length.
        eta_start, rate_start: what eta and a learned theta's fraction of its largest value start
            at, between 0 and 1.
        residual_norm: whether the memory is M(x) = x + N(layers of x), N a layer norm over D
            without gain, rather than its layers alone: what it says stays bounded, and the larger
            its weights are, the less a step changes it, so that it does not diverge. For "token"
            alone, where it is the default; the paper has neither.
        max_grad_norm: the largest norm of a step's gradient, over all tensors of a memory: of a
            pooled step's, or for "token" of each token's. Without it one token of "token" that is
            finite, but a million times as large as the others, is all that its row remembers.
            With it "token" also guards its chunks: see ``skipped`` below.
        outer_grad: "full": gradients pass through the steps, to earlier calls as well.
            "detach_state": the state that a call returns is detached. "none": no gradient passes
            through the steps; projections of queries and the output are trained, nothing else.
        read: for "token" alone: whether a token reads "after" or "before" it has written itself.
        backend: "auto", "triton" or "reference", for the memory and for its inputs: convolution,
            SiLU, normalisation, gates. Heads wider than 128 columns, more than 8 taps
            and a dim beyond 8192 have that in plain torch.
        device, dtype: of the parameters. The memory itself is fp32 (fp64 in an fp64 module).

    Attributes:
        projections, gates, output: the layers around the memory.
        initial: the memory's weights ``[heads, ...]`` at a row's start, ``w1 .. bn``.

    Gradients of a chunk or of a pooled step do not see one another. Where its keys are alike, their
    sum overshoots once tokens * theta / (1 - eta) is more than about 0.6 ("sum", keys of length 1),
    and the memory diverges: a constant theta may take it there, a learned one with the default
    ``max_step`` does not, however many tokens a step pools. Longer keys have no such bound: those
    of key_norm "rms" have length sqrt(D), and need a loss that is a mean.

    Example:
        >>> memory = NeuralMemory(512, heads=8)
        >>> y, state, stats = memory(x)                 # [B, T, 512]
        >>> more, state, stats = memory(x_later, state)
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        hidden: int | None = None,
        layers: int = 2,
        activation: str = "silu",
        chunk: int = 64,
        granularity: Granularity = "token",
        reduction: Reduction = "sum",
        key_norm: KeyNorm | None = "l2",
        theta: Literal["learned"] | float = "learned",
        max_step: float = 0.5,
        scope: Scope = "sequence",
        convolution: int = 4,
        forget: Forget = "initial",
        memory_length: float = 16384.0,
        eta_start: float = 0.9,
        rate_start: float = 0.5,
        residual_norm: bool | None = None,
        max_grad_norm: float | None = None,
        outer_grad: OuterGrad = "full",
        read: Read = "after",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        if theta != "learned":
            theta = checked_positive("theta", theta)
        if residual_norm is None:
            residual_norm = granularity == "token"
        pooling = granularity, reduction, scope, max_grad_norm
        rules = Rules(
            *(layers, activation, chunk, *pooling, read, backend, theta, forget, residual_norm)
        )
        check_rules(rules)
        head_dim = checked_head_dim(dim, heads, head_dim)
        hidden = 4 * head_dim if hidden is None else hidden
        hidden = checked_count("hidden", hidden)
        convolution = checked_count("convolution", convolution, lowest=0)
        check_option("outer_grad", outer_grad, OUTER_GRADS)
        if key_norm is not None:
            check_option("key_norm", key_norm, KEY_NORMS)
        max_step = checked_positive("max_step", max_step)
        starts = checked_starts(memory_length, eta_start, rate_start)
        super().__init__()
        self.dim: int = dim
        self.heads: int = heads
        self.head_dim: int = head_dim
        self.hidden: int = hidden
        self.rules: Rules = rules
        self.outer_grad: OuterGrad = outer_grad
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.projections: Projections = Projections(
            dim,
            heads,
            head_dim,
            convolution=convolution,
            key_norm=key_norm,
            backend=backend,
            **place,
        )
        gates: dict[str, Any] = {"theta": theta, "max_step": max_step, "starts": starts}
        self.gates: Gates = Gates(dim, heads, chunk=chunk, **gates, **place)
        self.output: nn.Linear = nn.Linear(heads * head_dim, dim, bias=False, **place)
        if residual_norm:
            # What a head reads has length sqrt(D) then, whatever it has learned: it begins as quiet
            # as an empty memory without a norm.
            with torch.no_grad():
                self.output.weight.mul_(head_dim**-0.5)
        widths = [head_dim, *(hidden,) * (layers - 1), head_dim]
        self.initial: nn.ParameterDict = nn.ParameterDict()
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), 1):
            self.initial[f"w{layer}"] = nn.Parameter(torch.empty(heads, fan_out, fan_in, **place))
            self.initial[f"b{layer}"] = nn.Parameter(torch.empty(heads, fan_out, **place))
        self.reset_initial()

    @torch.no_grad()
    def reset_initial(self) -> None:
        """Draw the memory's initial weights: Xavier-normal for every head, biases zero."""
        for name, tensor in self.initial.items():
            if name.startswith("b"):
                nn.init.zeros_(tensor)
            else:
                nn.init.normal_(tensor, std=(2.0 / (tensor.shape[1] + tensor.shape[2])) ** 0.5)

    def init_state(self, batch: int) -> MemoryState:
        """The state of ``batch`` rows before their first token; gradients reach ``initial``."""
        shared = self.rules.scope == "batch_pooled"
        initial = list(self.initial.values())
        return fresh_state(initial, batch, shared, self.head_dim, self.projections.reach)

    def detach_state(self, state: MemoryState) -> MemoryState:
        """The same state, cut from the graph: what truncates backpropagation through time."""
        return detached(state)

    def reset(self, state: MemoryState, rows: Tensor) -> MemoryState:
        """The state with the rows where ``rows [B]`` (bool) is True back at their start.

        Chunks go on for all rows together, so that such a row's first chunk may be shorter than
        others. With ``scope="batch_pooled"`` the memory stays, for it is not one row's.
        """
        batch = state.position.shape[0]
        self.check_own(state, batch)
        check_mask("rows", rows, (batch,), state.position.device)
        shared = self.rules.scope == "batch_pooled"
        return with_rows_reset(state, self.init_state(batch), rows, shared=shared)

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        queries: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState, MemoryStats]:
        """Write x and read on the way.

        Args:
            x: ``[B, T, dim]``, any T.
            state: of an earlier call; None for a new sequence.
            queries: ``[B, T, dim]``, for which the memory is read; x where left out.
            mask: ``[B, T]`` bool, False for padding: such a token is not written, is a zero to the
                convolution and to its output, and may be NaN. Before the first token of a new
                sequence or of a document it does not count among a chunk's; elsewhere it does.
            cu_seqlens: ``[N + 1]``, int32 or int64, where documents begin and end in the only row,
                or ``[B, N + 1]`` in each row, from 0 to T; some may be empty. Each has the outputs
                and gradients that it has alone; tokens of none are padding. Read on the device
                alone. The memory is called for T + N (chunk - 1) tokens, each document in whole
                chunks of its own.
            resets: ``[B, T / chunk]`` bool, in place of cu_seqlens for tokens that lie in whole
                chunks: with which of these a document begins. What fills a document's last chunk
                is masked.

        A token that is not finite, or whose sum, key, value or gates are not, is not written in
        those heads and counted in ``skipped``; its output is NaN. Other rows are not affected, nor
        are later tokens: the convolution sees a zero. Where the token is finite and its projection
        is not, the convolution sees that, and the tokens that it reaches are skipped too. A pooled
        step whose gradient is not finite is skipped and its tokens are counted. So are, for "token"
        with ``max_grad_norm``, tokens whose gradient is not finite, which then change nothing but
        what their alpha and eta do, and chunks after which the memory is not finite, which leave
        the state as it was; both once their chunk is complete. Without ``max_grad_norm`` neither is
        noticed.

        With cu_seqlens or resets the state is that of each row's last document, whose chunk has
        ended: what follows begins with another. ``position`` counts its tokens, ``skipped`` those
        of all; a pooled step's ``loss`` is that of each chunk as documents take them. They are for
        "token" and "chunk", for memories of one row each, and for calls without a state.

        Returns:
            (y ``[B, T, dim]``, in x's dtype or autocast's, without gate and residual; the new
            state; the stats).

        Raises:
            TypeError: a tensor is not floating point or not strided, a mask or resets not bool, or
                cu_seqlens no integers.
            ValueError: a shape, device or, outside autocast, dtype does not fit, the state is that
                of another kind of memory, or there are documents where they are not served.
            RuntimeError: the backend is "triton" and the kernels cannot serve this call.
        """
        options = {"queries": queries, "mask": mask, "cu_seqlens": cu_seqlens, "resets": resets}
        reads, state, stats = self.advance(x, state, **options)
        return self.outputs(reads), state, stats

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def advance(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        queries: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Reads, MemoryState, MemoryStats]:
        """:meth:`forward` up to the output, on which no later token depends: of calls that follow
        one another :meth:`outputs` can compute it at once.
        """
        self.check_call(x, state, queries, mask)
        if cu_seqlens is not None or resets is not None:
            check_independent(self.rules, state)
            if cu_seqlens is not None and resets is not None:
                raise ValueError("one of cu_seqlens and resets must be given, got both")
        if resets is not None:
            check_resets(resets, x, self.rules.chunk)
        if cu_seqlens is None:
            return self.write(x, state, queries, mask, resets)
        check_documents(cu_seqlens, x)
        rows, tokens, _ = x.shape
        layout = layout_of(rows, tokens, self.rules.chunk, cu_seqlens=cu_seqlens, mask=mask)
        x, queries = layout.laid_out(x), None if queries is None else layout.laid_out(queries)
        reads, state, stats = self.write(x, None, queries, layout.filled, layout.begins)
        by_token = self.rules.granularity == "token"
        reads, stats = in_rows(layout, reads, stats, by_token=by_token)
        return reads, state, stats

    def outputs(self, reads: Reads) -> Tensor:
        """``[B, T, dim]``: W_o of the reads; NaN where they are not kept, 0 where masked.

        Raises:
            TypeError: kept or the mask is not bool.
            ValueError: the parts of ``reads`` do not fit together.
        """
        tokens, device = reads.y.shape[:2], reads.y.device
        check_mask("reads.kept", reads.kept, (*tokens, self.heads), device)
        if reads.mask is not None:
            check_mask("reads.mask", reads.mask, tokens, device)
        y = self.output(reads.y)
        return kept_tokens(y, reads.kept, reads.mask, torch.nan, backend=self.rules.backend)

    def retrieve(
        self, queries: Tensor, state: MemoryState, *, before: Tensor | None = None
    ) -> Tensor:
        """The outputs of the memory as it is for ``queries [B, S, dim]``, without writing.

        Args:
            queries: ``[B, S, dim]``; a query that is not finite reads NaN.
            state: of :meth:`forward` or :meth:`init_state`. With "token" the running chunk is read
                too, with "chunk" the complete ones.
            before: ``[B, n, dim]``, the queries before them, which the convolution sees; zeros
                where left out.

        Returns:
            ``[B, S, dim]``, in queries' dtype or autocast's.
        """
        check_tokens("queries", queries, self.output.weight, (None, None), self.dim)
        batch = queries.shape[0]
        if before is not None:
            check_tokens("before", before, self.output.weight, (batch, None), self.dim)
        self.check_own(state, batch)
        backend = self.rules.backend
        queries, fine = finite_tokens(queries, None, backend=backend)
        if before is not None:
            before, _ = finite_tokens(before, None, backend=backend)
        if self.outer_grad == "none":
            state = detached(state)
        memory = Memory(state.weights, state.momentum, self.rest())
        weights = weights_at_end(self.rules, memory, state.tail)
        q = self.projections.queries_of(queries, before)
        y = self.output(read(self.rules, q, weights).flatten(2))
        return kept_tokens(y, fine.unsqueeze(-1), None, torch.nan, backend=backend)

    def read(self, q: Tensor, weights: Weights) -> Tensor:
        """M(q) of each head's queries ``[B, T, heads, D]``, as ``projections`` makes them, for
        ``weights`` of a state; nothing is written, and ``output`` does not follow.
        """
        return read(self.rules, q, weights)

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        sizes = f"{self.dim}, heads={self.heads}, head_dim={self.head_dim}, hidden={self.hidden}"
        rules = ", ".join(f"{name}={value!r}" for name, value in self.rules._asdict().items())
        return f"{sizes}, {rules}, outer_grad={self.outer_grad!r}"
