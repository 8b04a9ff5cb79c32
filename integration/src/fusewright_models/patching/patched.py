"""``patch(model)``: a model of ``transformers`` on the kernels of the fusewright packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from fusewright.optimizer import AdamW
from torch import nn

from ..choices import Backend
from . import attention, forwards
from .families import Family, family_of

Part = Literal["norm", "rotary", "gating", "loss", "attention"]
PARTS: tuple[Part, ...] = get_args(Part)
USUAL: tuple[Part, ...] = PARTS[:-1]


class Replacement(NamedTuple):
    """A module, and what its forward pass shall be: a function of options, it and inputs."""

    module: Any
    forward: Callable[..., Any]


class Patch:
    """What `patch` replaced in a model, and what it left.

    Attributes:
        model: the same object as before.
        replaced: how many modules of each part have another forward pass.
        left: of each part that stayed as it was, why.
        optimizer: ours, in place of the one that was given; None where none was.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.replaced: dict[str, int] = {}
        self.left: dict[str, str] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._modules: list[Any] = []
        self._attention: str | None = None

    def __repr__(self) -> str:
        replaced = ", ".join(f"{part} ({count})" for part, count in self.replaced.items())
        left = "".join(f"; {part} left: {reason}" for part, reason in self.left.items())
        return f"{type(self).__name__}: {replaced or 'nothing replaced'}{left}"

    def replace(self, part: Part, some: Sequence[Replacement], options: forwards.Options) -> None:
        """Give modules other forward passes."""
        for module, forward in some:
            module.forward = forwards.Forward(forward, options, module)
            self._modules.append(module)
        self.replaced[part] = len(some)

    def attend_by(self, name: str) -> None:
        """Let the model's attentions be those of that name."""
        self._attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        self.replaced["attention"] = self.model.config.num_hidden_layers

    def undo(self) -> None:
        """The model is as it was; an optimizer that took another's place stays.

        Where its attention was replaced, it has the one from before `patch` again, whatever has
        been set since; else the one that it has stays.
        """
        for module in self._modules:
            del module.forward
        self._modules.clear()
        if self._attention is not None:
            self.model.set_attn_implementation(self._attention)
            self._attention = None
        self.replaced.clear()


def patch(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    parts: Iterable[Part] | None = None,
    recompute: bool = True,
    backend: Backend = "auto",
) -> Patch:
    """Let a causal language model of ``transformers`` compute by the kernels of the packages.

        patched = patch(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        patched.optimizer.step()

    The model stays the object that it is: its classes, names, parameters and state dict. What it
    returns is the same but for rounding, with one exception: while it trains and is given labels,
    its logits are None, since they are never all in memory; nor are hooks on its ``lm_head`` called
    then, since its weight alone is read.

    Args:
        model: ``LlamaForCausalLM``, or that of Mistral, Qwen2, Qwen3, Gemma, Gemma2 or Gemma3.
        optimizer: ``torch.optim.AdamW`` or ``torch.optim.Adam`` over its parameters; the one that
            takes its place, with its groups and its state, is the attribute ``optimizer`` of what
            is returned. A scheduler is made of that one: it would not reach it from here.
        parts: what to replace:

            - "norm": RMS norms, of which those before a feed-forward network also add the residual;
            - "rotary": the rotation of queries and keys, by angles in fp32;
            - "gating": the product of SiLU and its gate in feed-forward networks;
            - "loss": the head and its cross entropy, in chunks of rows, while the model trains;
            - "attention": causal attention of all tokens. With a mask, of padding or of a window,
              torch's takes its place, with a warning.

            What is named and cannot be replaced is an error. None takes all but the attention, with
            a warning that tells what stays as it was, and why.
        recompute: compute what gating returns again in the backward pass, in place of keeping it:
            a fifth of what a layer of a Llama keeps.
        backend: of all operations, as in the packages.

    Returns:
        What was replaced, and how to undo it.

    Raises:
        TypeError: the model is of none of these classes, or the optimizer of neither.
        ValueError: it is patched already; a part has another name, or is named and cannot be
            replaced; the optimizer has a scheduler, or did when its state was saved.
        RuntimeError: ``transformers`` is not installed.
    """
    family, asked = family_of(model), checked_parts(parts)
    passes = (vars(module).get("forward") for module in model.modules())
    if any(isinstance(each, forwards.Forward) for each in passes):
        raise ValueError("model must have its own forward passes; got one that is patched already")
    replacements: dict[Part, list[Replacement]] = {}
    patched = Patch(model)
    for part in asked:
        obstacle = OBSTACLES[part](model, family)
        some = [] if obstacle else list(REPLACEMENTS[part](model, family))
        obstacle = obstacle or of_others(some)
        if obstacle is None:
            replacements[part] = some
        elif parts is None:
            patched.left[part] = obstacle
        else:
            raise ValueError(f"{part} cannot be replaced: {obstacle}")
    if optimizer is not None:
        patched.optimizer = adamw_in_place_of(optimizer)
    options = forwards.Options(family.weight_offset, recompute, backend)
    # First, since transformers may refuse it.
    if replacements.pop("attention", None) is not None:
        patched.attend_by(attention.register(backend))
    for part, some in replacements.items():
        patched.replace(part, some, options)
    if patched.left:
        warnings.warn(str(patched), stacklevel=2)
    return patched


def checked_parts(parts: Iterable[Part] | None) -> Sequence[Part]:
    """
    Raises:
        ValueError: one has another name.
    """
    if parts is None:
        return USUAL
    asked = parts if isinstance(parts, str) else tuple(parts)
    if isinstance(asked, str) or any(part not in PARTS for part in asked):
        raise ValueError(f"parts must be some of {', '.join(PARTS)}; got {asked!r}")
    return asked


def adamw_in_place_of(optimizer: torch.optim.Optimizer) -> AdamW:
    """Ours, with its groups and its state.

    Raises:
        TypeError: it is neither torch's AdamW nor its Adam.
        ValueError: a scheduler has its learning rates.
    """
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise TypeError(
            "optimizer must be torch.optim.AdamW or torch.optim.Adam; got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    # Schedulers write this into the groups, and go on with the optimizer that they were made of.
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "optimizer must have no scheduler yet; got groups with initial_lr: make the scheduler "
            "of patched.optimizer, and load what was saved into that one"
        )
    # How torch's is computed, which ours decides by itself.
    ways = ("foreach", "fused", "differentiable")
    groups = [
        {name: value for name, value in group.items() if name not in ways}
        for group in optimizer.param_groups
    ]
    ours = AdamW(groups)
    if optimizer.state:
        ours.load_state_dict(optimizer.state_dict())
    return ours


def modules_of(model: nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def unlike(model: nn.Module, *kinds: type) -> str | None:
    """What there is in place of modules of these very classes."""
    for kind in kinds:
        found = modules_of(model, kind)
        if not found:
            return f"the model has no {kind.__name__}"
        others = {type(module).__name__ for module in found if type(module) is not kind}
        if others:
            return f"wanted {kind.__name__}; got {', '.join(sorted(others))}"
    return None


def of_others(some: Sequence[Replacement]) -> str | None:
    """Of which modules another library or the caller has set the forward pass."""
    found = {type(module).__name__ for module, _ in some if "forward" in vars(module)}
    if not found:
        return None
    return f"wanted forward passes of the classes; got another of {', '.join(sorted(found))}"


def of_norm(model: Any, family: Family) -> str | None:
    return unlike(model, family.kind("RMSNorm"), family.kind("DecoderLayer"))


def of_rotary(model: Any, family: Family) -> str | None:
    return unlike(model, family.kind("RotaryEmbedding"), family.kind("Attention"))


def of_gating(model: Any, family: Family) -> str | None:
    act = getattr(model.config, "hidden_act", None) or model.config.hidden_activation
    if act not in SILU:
        return f"wanted networks gated by SiLU; got {act}"
    return unlike(model, family.kind("MLP"))


def of_loss(model: Any, family: Family) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    capping = getattr(model.config, "final_logit_softcapping", None)
    if capping is not None:
        return f"wanted logits as they are; got a softcapping of {capping}"
    if model.loss_function is not ForCausalLMLoss:
        return f"wanted ForCausalLMLoss; got {model.loss_function!r}"
    if not forwards.is_plain(model.lm_head):
        return f"wanted a head that is a Linear without bias; got {model.lm_head}"
    return None


def of_attention(model: Any, family: Family) -> str | None:
    capping = getattr(model.config, "attn_logit_softcapping", None)
    if capping is not None:
        return f"wanted scores as they are; got a softcapping of {capping}"
    return unlike(model, family.kind("Attention"))


def norms(model: Any, family: Family) -> Iterator[Replacement]:
    for norm in modules_of(model, family.kind("RMSNorm")):
        yield Replacement(norm, forwards.normed)
    layer_forward = forwards.layer_forward
    if family.sandwiched:
        layer_forward = forwards.sandwiched_layer_forward
    for layer in modules_of(model, family.kind("DecoderLayer")):
        yield Replacement(layer, layer_forward)


def rotaries(model: Any, family: Family) -> Iterator[Replacement]:
    forwards.take_angles(family.kind("RotaryEmbedding"))
    for rotary in modules_of(model, family.kind("RotaryEmbedding")):
        yield Replacement(rotary, forwards.angles)


def networks(model: Any, family: Family) -> Iterator[Replacement]:
    for network in modules_of(model, family.kind("MLP")):
        yield Replacement(network, forwards.gated)


def heads(model: Any, family: Family) -> Iterator[Replacement]:
    yield Replacement(model, forwards.causal_forward)


def nothing(model: Any, family: Family) -> Iterator[Replacement]:
    """Attentions are called by name."""
    return iter(())


SILU = ("silu", "swish")
# Why a part cannot be replaced in this model; None where it can.
OBSTACLES: dict[Part, Callable[[Any, Family], str | None]] = {
    "norm": of_norm,
    "rotary": of_rotary,
    "gating": of_gating,
    "loss": of_loss,
    "attention": of_attention,
}
REPLACEMENTS: dict[Part, Callable[[Any, Family], Iterator[Replacement]]] = {
    "norm": norms,
    "rotary": rotaries,
    "gating": networks,
    "loss": heads,
    "attention": nothing,
}
