"""TransformerNP: a transformer neural process for regression from a context set.

    e  = SiLU([x ; y] E1) E2                  of M context rows, then of N target rows with y = 0
    h <- h + softmax(q k^T / sqrt(D)) v Wo    q of every row; k and v of the context rows alone
    h <- h + SiLU(LN(h) W1) W2                q, k, v, each a product of LN(h)     (pre-norm form)
    (w, mu, s)_k = SiLU(LN(h_target) A_k) C_k       k = 1 ... K mixture components

Post-norm form: h <- LN(h + attention(h)), h <- LN(h + feed_forward(h)), no norm after the last.

B tasks, M context rows, N target rows, T = M + N, d width, H heads of width D = d / H, F width of
the feed-forward, K components. There is no positional term, no bias and no dropout: a prediction
does not depend on the order of the context, follows that of the targets, and sees no other target.

Two savings are exact. Targets are never keys, so keys and values are projected for context rows
only; and only target rows reach the prediction, so the last block computes its context rows as far
as keys and values and no further.

F is stored rounded up to a multiple of 32, since rows of 1365 bf16 numbers are not 16-byte aligned.
The stored columns that are not used start at zero, get gradients of exactly zero, and stay zero;
loading a state dict sets them to zero again, since it may be that of another F.

Tasks of different context sizes share a batch: ``context_lengths [B]`` lies on the device and says
how many of the M context rows each task has. Rows past a length are never keys, and are zeros where
they come in, so that nothing of what they held reaches a prediction or a gradient.
``target_lengths [B]`` says the same of the N targets: those past a length are zeros where they come
in, and have no part in a loss.

Neural processes with attention: https://arxiv.org/abs/2207.04179.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fusewright.attention import Backend
from fusewright.mixture_head import GaussianMixtureHead
from fusewright.norm import LayerNorm
from torch import Tensor, nn

from ..._core.precision import without_autocast
from ..._core.typed import called_as
from ..checkpointing import recomputed
from ..checks import check_backend, check_synchronised
from ..published import Published
from .layers import (
    Attention,
    Block,
    Embedder,
    FeedForward,
    KeysValues,
    TransformerNPConfig,
    norm_of_sum,
    shown,
    within,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (torch.int32, torch.int64)
AXES = {
    "x_context": ("B", "M", "d_x"),
    "y_context": ("B", "M", "d_y"),
    "x_target": ("B", "N", "d_x"),
    "y_target": ("B", "N", "d_y"),
}


class Prediction(NamedTuple):
    """What the model says of every target, each ``[B, N, d_y]`` in fp32.

    Attributes:
        mean: mean of the mixture.
        variance: variance of the mixture, noise of the observation included.
        sample: one draw, each target on its own.
    """

    mean: Tensor
    variance: Tensor
    sample: Tensor


class EncodedContext(NamedTuple):
    """What targets read of the context, whichever they are: keys and values of every block.

    Attributes:
        blocks: of each block, ``[B, M, H, D]`` each; 2 L M d numbers for each task.
        lengths: ``[B]``, the ``context_lengths``; None means M.
    """

    blocks: tuple[KeysValues, ...]
    lengths: Tensor | None


def _uniform_(weight: Tensor, fan_in: int, gain: float = 1.0) -> None:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)) times ``gain``; torch's own for a linear layer at 1."""
    nn.init.uniform_(weight, -gain / math.sqrt(fan_in), gain / math.sqrt(fan_in))


class TransformerNP(nn.Module, Published):
    """Transformer neural process with a Gaussian mixture for every target.

    Args:
        config: the shape of the model.
        backend: who computes norms, attention, feed-forward layers and mixtures: "auto" (Triton for
            CUDA tensors, plain torch for CPU ones), "triton" or "reference".

    Parameters are fp32 on the default device; train them as they are, under autocast for bf16.

    Example:
        >>> model = TransformerNP(TransformerNPConfig(x_width=1))
        >>> params = model(x_context, y_context, x_target)        # [B, N, 1, 10, 3]
        >>> model.loss(x_context, y_context, x_target, y_target).backward()
        >>> mean, variance, sample = model.predict(x_context, y_context, x_target)
    """

    config_type = TransformerNPConfig

    def __init__(self, config: TransformerNPConfig, *, backend: Backend = "auto") -> None:
        super().__init__()
        check_backend(backend)
        self.config = config
        self.embedder = Embedder(config, backend=backend)
        self.blocks = nn.ModuleList(Block(config, backend=backend) for _ in range(config.layers))
        self.final_norm = None
        if config.norm == "pre":
            self.final_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.head = GaussianMixtureHead(
            config.width,
            config.feed_forward_width,
            config.components,
            outputs=config.y_width,
            stored_width=config.stored_width,
            scale=config.scale,
            backend=backend,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights.

        Uniform by fan-in; in the pre-norm form the two products that write to the residual stream
        are scaled by 1 / sqrt(2 L), so that its variance does not grow with depth; the head draws
        its own.
        """
        config = self.config
        residual_gain = 1.0 / math.sqrt(2 * config.layers) if config.norm == "pre" else 1.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _uniform_(module.weight, module.in_features)
            elif isinstance(module, LayerNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Attention):
                _uniform_(module.output.weight, config.width, residual_gain)
            elif isinstance(module, FeedForward):
                _uniform_(module.output.weight, config.feed_forward_width, residual_gain)
                module.clear_padding()
        self.head.reset_parameters()

    def padding(self) -> list[Tensor]:
        """Views of every stored weight that is not part of the model: zero, and zero for ever."""
        padded = [m for m in self.modules() if isinstance(m, FeedForward | GaussianMixtureHead)]
        return [unused for module in padded for unused in module.padding()]

    def parameter_count(self) -> int:
        """Parameters of the model, the padding of its storage left out."""
        stored = sum(parameter.numel() for parameter in self.parameters())
        return stored - sum(unused.numel() for unused in self.padding())

    def forward(
        self,
        x_context: Tensor,
        y_context: Tensor,
        x_target: Tensor,
        context_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        y_target: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """Mixture parameters of every target; the loss, where its y is given.

        Args:
            x_context: ``[B, M, d_x]``, floating point (fp32, bf16, fp16 or fp64), on the model's
                device, as all inputs; M >= 1.
            y_context: ``[B, M, d_y]``.
            x_target: ``[B, N, d_x]``, N >= 1.
            context_lengths: ``[B]``, int32 or int64: task b has only its first
                ``context_lengths[b]`` context rows; what the others hold, NaN too, counts for
                nothing. Numbers below 0 count as 0, beyond M as M; a task without any context is
                predicted from x_target alone. Nothing is read on the host: one compiled or captured
                step serves every length. None means M.
            target_lengths: likewise of the targets; None means N.
            y_target: ``[B, N, d_y]``.
            group: the processes that share the rows of the tasks: each gives its part of the
                context rows, as many as every other, and its targets, and gets what belongs to
                these. Everything is as of the whole tasks, where the loss, and the gradient of
                every parameter, is then the mean over the processes, which a wrapper such as
                ``DistributedDataParallel`` takes of gradients; not beside lengths.

        Returns:
            ``[B, N, d_y, K, 3]`` raw parameters (w, mu, s) in fp32, under autocast too, or in fp64
            from a model in fp64; past a task's targets they are finite and mean nothing. The order
            of the context does not matter beyond rounding. With y_target, what ``loss`` returns.

        Raises:
            TypeError: an input is no tensor or not floating point, or lengths are not int32 or
                int64.
            ValueError: a shape or device is not as above, M = 0 or N = 0; or there are lengths
                beside a group.
        """
        inputs = {"x_context": x_context, "y_context": y_context, "x_target": x_target}
        if y_target is not None:
            inputs["y_target"] = y_target
        self._check(inputs, context_lengths, target_lengths)
        if group is not None and not (context_lengths is None and target_lengths is None):
            raise ValueError("wanted tasks without lengths, whose rows a group shares; got lengths")
        context_rows = x_context.shape[1]
        x_context, y_context = (shown(rows, context_lengths) for rows in (x_context, y_context))
        shown_targets = shown(x_target, target_lengths)
        h, update = self.embedder(x_context, y_context, shown_targets), None
        run = partial(recomputed, self.config.checkpointing)
        *blocks, last = self.blocks
        for block in blocks:
            h, update = run(block, h, update, context_rows, context_lengths, group=group)
        t, update = run(
            last, h, update, context_rows, context_lengths, targets_only=True, group=group
        )
        t = self._normed(t, update)
        params: Tensor = self.head(t)
        if y_target is None:
            return params
        return self.head.loss(params, y_target, _mask(y_target, target_lengths))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def encode(
        self, x_context: Tensor, y_context: Tensor, context_lengths: Tensor | None = None
    ) -> EncodedContext:
        """What ``decode`` needs of the context: computed once for any number of targets.

        Arguments and errors as in ``forward``. It is of the weights as they are now.
        """
        inputs = {"x_context": x_context, "y_context": y_context}
        self._check(inputs, context_lengths, None)
        x_context, y_context = (shown(rows, context_lengths) for rows in inputs.values())
        h, update = self.embedder(x_context, y_context, x_context[:, :0]), None
        kept: list[KeysValues] = []
        blocks: list[Any] = list(self.blocks)
        for block in blocks:
            last = block is blocks[-1]
            h, update = block.of_context(h, update, context_lengths, kept, last=last)
        return EncodedContext(tuple(kept), context_lengths)

    def decode(self, context: EncodedContext, x_target: Tensor) -> Tensor:
        """What ``forward`` returns for targets ``[B, N, d_x]``, without computing anything of the
        context again: the same but for rounding, however targets are spread over calls.

        Errors as in ``forward``; B is that of the context.
        """
        keys = context.blocks[0].keys
        self._check({"x_target": x_target}, None, None, batch=len(keys))
        nothing = x_target.new_empty(len(keys), 0, self.config.x_width + self.config.y_width)
        x, y = nothing.split((self.config.x_width, self.config.y_width), dim=-1)
        t, update = self.embedder(x, y, x_target), None
        blocks: list[Any] = list(self.blocks)
        for block, kept in zip(blocks, context.blocks, strict=True):
            t, update = block.of_targets(t, update, kept, context.lengths)
        params: Tensor = self.head(self._normed(t, update))
        return params

    def _normed(self, t: Tensor, update: Tensor | None) -> Tensor:
        """What the head reads of the last block."""
        if self.final_norm is None:
            return t
        with without_autocast(t.device):
            return norm_of_sum(self.final_norm, t, update)[0]

    def loss(
        self,
        x_context: Tensor,
        y_context: Tensor,
        x_target: Tensor,
        y_target: Tensor,
        context_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Minus the mean over B, N and outputs of log p(y_target), ``y_target [B, N, d_y]``.

        With ``target_lengths`` that is over the targets that the tasks have, all alike whichever
        task they are of; what the others hold, NaN too, counts for nothing, and 0, with gradients
        of zero, is the loss of none at all. Everything else, and errors, as in ``forward``.

        Raises:
            RuntimeError: in one of several processes, gradients of it would stay this process's.
        """
        check_synchronised(self)
        # None would ask ``forward`` for parameters.
        _check_tensor("y_target", y_target, FLOATING, self.embedder.hidden.weight.device)
        rows = x_context, y_context, x_target, context_lengths, target_lengths
        return self(*rows, y_target=y_target)

    def log_likelihood(
        self,
        x_context: Tensor,
        y_context: Tensor,
        x_target: Tensor,
        y_target: Tensor,
        context_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """log p(y_target | x_target, context) in nats, ``[B, N, d_y]``, each target on its own; 0
        past a task's targets.

        Arguments and errors as in ``loss``.
        """
        check_synchronised(self)
        rows = x_context, y_context, x_target, y_target
        params = self._params(context_lengths, target_lengths, *rows)
        return self.head.log_likelihood(params, y_target, _mask(y_target, target_lengths))

    @torch.no_grad()
    def predict(
        self,
        x_context: Tensor,
        y_context: Tensor,
        x_target: Tensor,
        context_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Mean, variance and one draw of every target; shapes and errors as in ``forward``."""
        params = self(x_context, y_context, x_target, context_lengths, target_lengths)
        return Prediction(
            self.head.mean(params),
            self.head.variance(params),
            self.head.sample(params, generator=generator),
        )

    def _params(
        self, context_lengths: Tensor | None, target_lengths: Tensor | None, *rows: Tensor
    ) -> Tensor:
        """``forward``, with y_target refused before it where it does not fit."""
        inputs = dict(zip(AXES, rows, strict=True))
        self._check(inputs, context_lengths, target_lengths)
        x_context, y_context, x_target = rows[:3]
        return self(x_context, y_context, x_target, context_lengths, target_lengths)

    def _check(
        self,
        inputs: dict[str, Tensor],
        context_lengths: Tensor | None,
        target_lengths: Tensor | None,
        *,
        batch: int | None = None,
    ) -> None:
        """Refuse what does not fit, before anything is computed."""
        device = self.embedder.hidden.weight.device
        for name, rows in inputs.items():
            _check_tensor(name, rows, FLOATING, device)
        widths = {"d_x": self.config.x_width, "d_y": self.config.y_width}
        if batch is not None:
            widths["B"] = batch
        shapes = {name: list(rows.shape) for name, rows in inputs.items()}
        if not _fit(shapes, widths):
            axes = {
                name: ", ".join(str(widths.get(axis, axis)) for axis in AXES[name])
                for name in shapes
            }
            wanted = ", ".join(f"{name} [{axes[name]}]" for name in shapes)
            got = ", ".join(map(str, shapes.values()))
            raise ValueError(f"wanted {wanted} with M >= 1 and N >= 1; got {got}")
        batch = next(iter(shapes.values()))[0]
        for name, lengths in (
            ("context_lengths", context_lengths),
            ("target_lengths", target_lengths),
        ):
            if lengths is None:
                continue
            _check_tensor(name, lengths, LENGTHS, device)
            if list(lengths.shape) != [batch]:
                raise ValueError(
                    f"wanted {name} [{batch}], a number for each task; got {list(lengths.shape)}"
                )


def _mask(y_target: Tensor, target_lengths: Tensor | None) -> Tensor | None:
    """Where ``y_target [B, N, d_y]`` counts, ``[B, N, 1]``; None where it does everywhere."""
    return None if target_lengths is None else within(y_target, target_lengths).unsqueeze(-1)


def _check_tensor(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"wanted {name} as a tensor; got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"wanted {name} as a strided tensor; got {value.layout}")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"wanted {name} in one of {names}; got {value.dtype}")
    if value.device != device:
        raise ValueError(f"wanted {name} on the model's device, {device}; got it on {value.device}")


def _fit(shapes: dict[str, list[int]], widths: dict[str, int]) -> bool:
    """Whether every axis has one size wherever it stands, M and N at least 1."""
    if any(len(shape) != len(AXES[name]) for name, shape in shapes.items()):
        return False
    given = [pair for name, shape in shapes.items() for pair in zip(AXES[name], shape, strict=True)]
    sizes = dict(given) | widths
    fits = all(sizes[axis] == size for axis, size in given)
    return fits and all(size > 0 for axis, size in sizes.items() if axis in ("M", "N"))
