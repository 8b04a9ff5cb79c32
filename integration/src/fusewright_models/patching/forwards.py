"""Forward passes that take the place of those of ``transformers``' modules.

Each is a function of options and the module, whose parameters, names and hooks stay as they are.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fusewright.attention import apply_rotary
from fusewright.cross_entropy import Reduction, linear_cross_entropy
from fusewright.feed_forward import silu_mul
from fusewright.norm import add_rms_norm, rms_norm
from torch import Tensor, nn

from ..choices import Backend
from ..models.checkpointing import recomputed

ROTATION = "apply_rotary_pos_emb"


class Options(NamedTuple):
    """
    Attributes:
        weight_offset: what norms add to their weight.
        recompute: whether what gating returns is computed again in the backward pass.
        backend: of all operations.
    """

    weight_offset: float
    recompute: bool
    backend: Backend


class Forward(partial[Any]):
    """``Forward(function, options, module)``: a forward pass that is bound to its module as methods
    are, for libraries that bind the function again; but a pickle takes it, too.
    """

    @property
    def __func__(self) -> partial[Any]:
        return partial(self.func, *self.args[:1])


def norm_options(norm: Any, options: Options) -> dict[str, Any]:
    # The name differs by family.
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return {"eps": eps, "weight_offset": options.weight_offset, "backend": options.backend}


def normed(options: Options, norm: Any, hidden_states: Tensor) -> Tensor:
    """Of a norm."""
    return rms_norm(hidden_states, norm.weight, **norm_options(norm, options))


def added_and_normed(
    norm: Any, options: Options, x: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum; of the wider dtype, since autocast leaves the residual as it
    is.
    """
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return add_rms_norm(x.to(dtype), residual.to(dtype), norm.weight, **norm_options(norm, options))


def layer_forward(options: Options, layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Of a decoder layer whose norms stand before attention and feed-forward network."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    x, residual = added_and_normed(layer.post_attention_layernorm, options, attended, hidden_states)
    return residual + layer.mlp(x)


def sandwiched_layer_forward(
    options: Options, layer: Any, hidden_states: Tensor, **kwargs: Any
) -> Tensor:
    """Of a decoder layer with norms before and behind both."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    x, residual = added_and_normed(
        layer.pre_feedforward_layernorm,
        options,
        layer.post_attention_layernorm(attended),
        hidden_states,
    )
    return residual + layer.post_feedforward_layernorm(layer.mlp(x))


def gated(options: Options, mlp: Any, x: Tensor) -> Tensor:
    """Of a feed-forward network that is gated by SiLU.

    What gating returns is the widest tensor of a layer, and the one that costs least to have again:
    the checkpoint keeps gate and up, which gating keeps anyway, and ends before the product.
    """
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    # A compiler decides by itself, and what is not plain, such as an adapter, may draw at random.
    again = options.recompute and is_plain(mlp.down_proj) and not torch.compiler.is_compiling()
    down = partial(gated_down, mlp.down_proj, options.backend)
    return recomputed("block" if again else "none", down, gate, up)


def gated_down(down: nn.Module, backend: Backend, gate: Tensor, up: Tensor) -> Tensor:
    return down(silu_mul(gate, up, backend=backend))


class Angles:
    """In place of ``transformers``' cos, for `rotated` alone.

    No tuple and no dataclass: what shards a model casts the tensors that it finds in those.

    Attributes:
        cos, sin: ``[T, D / 2]`` or ``[B, T, D / 2]``, of each pair of columns once.
        backend: of the rotation.
    """

    def __init__(self, cos: Tensor, sin: Tensor, backend: Backend) -> None:
        self.cos = cos
        self.sin = sin
        self.backend = backend


def angles(options: Options, rotary: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of a rotary embedding: in fp32, where its own are rounded to x's dtype; no sine beside."""
    if not torch.compiler.is_compiling():
        # Of a model that was read from a pickle, nothing has been patched here.
        take_angles(type(rotary))
    wide = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
    # The halves of the last axis are the same.
    whole = type(rotary).forward(rotary, wide, *args, **kwargs)
    cos, sin = (each[..., : each.shape[-1] // 2] for each in whole)
    if len(cos) == 1:
        cos, sin = cos[0], sin[0]
    return Angles(cos, sin, options.backend), None


def take_angles(rotary: type) -> None:
    """Let the function that attentions of this embedding's source look up there take `Angles`.

    It stays when a patch is undone, for copies of its model: all else it rotates as before.
    """
    source = sys.modules[rotary.__module__]
    original = getattr(source, ROTATION)
    if hasattr(original, "takes_angles"):
        return

    @wraps(original)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cos, Angles):
            return rotated(q, cos), rotated(k, cos)
        return original(q, k, cos, sin, *args, **kwargs)

    rotate.takes_angles = True  # type: ignore[attr-defined]
    setattr(source, ROTATION, rotate)


def rotated(x: Tensor, by: Angles) -> Tensor:
    """``x [B, H, T, D]``, which lies in memory as ``[B, T, H, D]``, as the result does."""
    # The layers of a model may lie on several devices.
    cos, sin = by.cos.to(x.device), by.sin.to(x.device)
    return apply_rotary(x.transpose(1, 2), cos, sin, backend=by.backend).transpose(1, 2)


def causal_forward(
    options: Options,
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> Any:
    """Of a causal language model: while it trains, with labels, the loss is computed without
    logits, which are None then. Everything else is as it was.
    """
    given = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
    )
    all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
    wanted = model.training and all_logits
    if labels is not None and wanted and not is_plain(model.lm_head):
        warnings.warn(f"logits are computed, by a head that is {model.lm_head}", stacklevel=2)
    if labels is None or not wanted or not is_plain(model.lm_head):
        return type(model).forward(
            model, **given, labels=labels, logits_to_keep=logits_to_keep, **kwargs
        )
    from transformers.modeling_outputs import CausalLMOutputWithPast

    of_loss = {name: kwargs.pop(name) for name in LOSS_OPTIONS if name in kwargs}
    as_tuple = kwargs.pop("return_dict", True) is False
    outputs = model.model(**given, **kwargs)
    loss = vocabulary_loss(
        outputs.last_hidden_state, model.lm_head.weight, labels, options.backend, **of_loss
    )
    found = CausalLMOutputWithPast(
        loss=loss,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    return found.to_tuple() if as_tuple else found


def is_plain(head: nn.Module) -> bool:
    """Whether a head is its weight and nothing else."""
    return type(head) is nn.Linear and head.bias is None and "forward" not in vars(head)


# That ``transformers``' own loss takes.
LOSS_OPTIONS = "num_items_in_batch", "ignore_index", "shift_labels"


def vocabulary_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    backend: Backend,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The mean cross entropy of each next token; over ``num_items_in_batch`` tokens, where a batch
    comes in parts.

    Args:
        hidden: ``[B, T, d]``.
        weight: ``[V, d]``.
        labels: ``[B, T]``, the tokens that were read; or ``shift_labels``, those that follow.
    """
    if shift_labels is None:
        # The last token has none that follows.
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden,
        weight,
        shift_labels.to(hidden.device),
        ignore_index=ignore_index,
        reduction=reduction,
        backend=backend,
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(hidden.device)
    return loss / num_items_in_batch
