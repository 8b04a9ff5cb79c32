"""A stack of layers that runs backwards: its states are recomputed from the last two.

With f_l(p) = layer_l(p) - p and h the step,

    p_1     = p_0 + h/2 f_0(p_0)
    p_{l+1} = p_{l-1} + 2 h f_l(p_l)        l = 1 ... L-1

is solved for p_{l-1}, so that a backward pass needs p_L and p_{L-1} alone, whatever the depth. In
floating point rounding would change it. States are therefore whole numbers of 2^-F: the force is
rounded to such, and sums of whole numbers are undone to the bit. Gradients pass rounding as if it
were not there.

States have any one shape; they are int32 and shown to layers in fp32 (in fp64 for fp64 inputs).
Saved for the backward pass: the last two states, the parameters, and what layers chose.

What a layer chose (Tape), its autocast, its persistent buffers and the random numbers that it drew
from the default generators are those of the forward pass when it is recomputed.

Midpoint rule: arXiv 2512.02056, eq. 2.4.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils import _pytree as pytree

from .._core.backends import Backend
from .._core.checks import check_floating, check_option, checked_number
from .._core.precision import wide_dtype
from .._core.typed import called_as
from ..fixed_point.fixed_point import FixedPoint, Stepped
from .replay import GPU, Forced, Generators, Surroundings, Tape

Tensor = torch.Tensor

Mode = Literal["exact", "stored", "plain"]
MODES = get_args(Mode)
# Stands for a choice's tensor, which autograd keeps.
ASIDE = object()


class Passed(NamedTuple):
    """What a stack returns.

    Attributes:
        x: the last state, fp32; NaN where the stack saturated.
        aux: sum of what the layers add to the loss, 0-d fp32.
        saturated: whether a state left the range, or a force was not finite: 0-d bool on the
            device. Gradients are NaN then.
        tape_bytes: what is kept besides states for the backward pass.
    """

    x: Tensor
    aux: Tensor
    saturated: Tensor
    tape_bytes: int


class MidpointStack(nn.Module):
    """Layers whose states are not stored.

    Args:
        layers: modules with ``force(x, *, tape, **context) -> (delta, aux)``: x and delta
            ``[...]`` of one shape, x in fp32; aux 0-d, or None; ``tape`` a `Tape` for its choices,
            or None. Its parameters get gradients, ``context`` does not. A force may be without
            a graph, as where a layer is skipped. Random numbers that it draws from torch's
            default generators, of the CPU and of x's GPU, are drawn again when it is recomputed;
            those of another generator, of Python or of NumPy are for the tape.
        step: h.
        mode: "exact" recomputes states by the inverse; "stored" keeps them, and recomputes only
            what is inside a layer; "plain" is ordinary autograd. All have the same states to
            the bit.
        fraction_bits: F. The range is +-2^(30 - F).
        backend: of the states' steps, as in `FixedPoint`.

    Raises:
        TypeError: an option is of another type.
        ValueError: no layers, or an option out of its range.
    """

    def __new__(cls, *args: Any, **options: Any) -> MidpointStack:
        # Of one that is built and of one that is unpickled, before anything compiles it.
        keep_uncompiled()
        return super().__new__(cls)

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        step: float = 0.25,
        mode: Mode = "exact",
        fraction_bits: int = 20,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        if not layers:
            raise ValueError("layers must be at least one, got none")
        for layer in layers:
            if not callable(getattr(layer, "force", None)):
                raise TypeError(f"layers must have a method force, got {type(layer).__name__}")
        check_option("mode", mode, MODES)
        self.layers: nn.ModuleList = nn.ModuleList(layers)
        self.step: float = checked_number("step", step)
        self.mode: Mode = mode
        self.states: FixedPoint = FixedPoint(fraction_bits, backend=backend)

    def forward(self, x: Tensor, **context: Any) -> Passed:
        """The last state of the stack that starts at ``x``, and what the layers add to the loss.

        Raises:
            TypeError: x is not a floating tensor.
            ValueError: a tensor of ``context`` requires gradients, or a force has another shape
                than x.
            RuntimeError: FSDP shards layers one by one, and mode is not "plain"; in the backward
                pass, where layers drew random numbers on the GPU and it is not captured into the
                CUDA graph of the forward pass, or it alone is.
        """
        check_floating("x", x)
        if not torch.is_grad_enabled():
            return self._plainly(x, context)
        if any(tensor.requires_grad for tensor in tensors_of(context)):
            raise ValueError("context must be without gradients, got a tensor that requires one")
        return (self._plainly if self.mode == "plain" else self._reversibly)(x, context)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def _reversibly(self, x: Tensor, context: dict[str, Any]) -> Passed:
        """Layers may be compiled, what keeps account of them not: `keep_uncompiled`."""
        run = Run(self, context)
        last, aux, saturated = Reversed.apply(run, x, *run.parameters)
        return Passed(last, aux, saturated, run.bytes)

    def gain(self, number: int) -> float:
        """Of the force of a layer in its step."""
        return 2.0 * self.step if number else 0.5 * self.step

    def stepped(self, number: int, before: Tensor, delta: Tensor, saturated: Tensor) -> Stepped:
        """The step of a layer whose force is ``delta``."""
        return self.states.step(before, delta.detach(), self.gain(number), saturated)

    def _plainly(self, x: Tensor, context: dict[str, Any]) -> Passed:
        states = self.states
        before, after, saturated = states.start(x)
        shown = states.shown(after, wide_dtype(x))
        x_before = x_after = Straight.apply(x, shown)
        aux = torch.zeros((), device=x.device)
        for number, layer in enumerate(self.layers):
            force: Any = layer.force
            delta, more = force(x_after, tape=None, **context)
            delta = delta.to(shown.dtype)
            new = self.stepped(number, before, delta, saturated)
            before, after = after, new.state
            moved = x_before + self.gain(number) * delta
            x_before, x_after = x_after, Straight.apply(moved, new.shown)
            aux = aux if more is None else aux + more
        return Passed(corrupted(x_after, saturated), aux, saturated, 0)


@functools.cache
def keep_uncompiled() -> None:
    """Have torch's compiler leave to Python what keeps account of layers: at the first stack and
    not at import, since it imports that compiler, and triton with it.
    """
    eager = torch.compiler.disable(MidpointStack._reversibly, recursive=False)
    MidpointStack._reversibly = eager  # type: ignore[method-assign]


class Run:
    """One pass through a stack: what its backward pass needs beside states."""

    def __init__(self, stack: MidpointStack, context: dict[str, Any]) -> None:
        self.stack, self.states, self.context = stack, stack.states, context
        # Frozen ones too: they may be another call's, or change before the backward pass.
        place_of: dict[Tensor, int] = {}
        # Of each layer's, by their names in `Forced`, and of which modules they are attributes.
        self.places: list[dict[str, int]] = []
        self.owners: list[list[tuple[nn.Module, str]]] = []
        for layer in stack.layers:
            found = parameters_of(layer)
            places = [place_of.setdefault(p, len(place_of)) for p in found]
            self.places.append(
                dict(zip([full for full, *_ in found.values()], places, strict=True))
            )
            self.owners.append([(module, name) for _, module, name in found.values()])
        self.parameters = list(place_of)
        # DTensors, whose import would take as long as all of this package's.
        if any(hasattr(p, "full_tensor") for p in self.parameters):
            raise RuntimeError(
                "wanted parameters that are whole while a reversible stack runs; got layers that "
                "FSDP shards one by one: shard what the stack is in as a whole, or take "
                'mode="plain"'
            )
        self.tapes: list[Tape] = []
        self.surroundings: list[Surroundings] = []
        self.bytes = 0

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """All states that the backward pass wants, the last two at least; the last as it is shown;
        aux; saturated.
        """
        before, after, saturated = self.states.start(x)
        shown = self.states.shown(after, wide_dtype(x))
        self.dtype = shown.dtype
        aux = torch.zeros((), device=x.device)
        kept = [after]
        self.generators = Generators(x.device)
        for number, layer in enumerate(self.stack.layers):
            self.tapes.append(Tape())
            self.surroundings.append(Surroundings(layer, x.device))
            force: Any = layer.force
            delta, more = force(shown, tape=self.tapes[-1], **self.context)
            self.surroundings[-1].random = self.generators.drawn()
            new = self.stack.stepped(number, before, delta.to(shown.dtype), saturated)
            before, after, shown = after, new.state, new.shown
            kept = [*kept, after] if self.stack.mode == "stored" else [before, after]
            aux = aux if more is None else aux + more
        return kept, shown, aux, saturated

    def put_aside(self) -> list[Tensor]:
        """What is kept beside states, choices and context, for autograd to keep: it lets go of it
        after the backward pass, even while the loss is held, and notices where it was changed.
        """
        choices = [tape.kept for tape in self.tapes]
        tensors = tensors_of(choices)
        leaves, self.shape_of_rest = pytree.tree_flatten((choices, self.context))
        self.rest = [ASIDE if isinstance(x, Tensor) else x for x in leaves]
        kept = [x for x in leaves if isinstance(x, Tensor)]
        self.tapes, self.context = [], {}
        # What is in several places is kept once.
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        self.bytes = sum(storage.nbytes() for storage in storages.values())
        return kept

    def backward(
        self,
        kept: list[Tensor],
        parameters: list[Tensor],
        beside: list[Tensor],
        g: Tensor | None,
        g_aux: Tensor,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of x and of the parameters, from those of the last state and of aux."""
        states = self.states
        given = iter(beside)
        leaves = [next(given) if x is ASIDE else x for x in self.rest]
        choices, context = pytree.tree_unflatten(leaves, self.shape_of_rest)
        gradients: list[Tensor | None] = [None] * len(parameters)
        if any(GPU in around.random for around in self.surroundings):
            self.generators.check_graph()
        # As g, of the other state at hand; None is zero.
        g_before: Tensor | None = None
        *kept, before, after = kept
        shown = states.shown(before, self.dtype)
        for number in reversed(range(len(self.stack.layers))):
            gain = self.stack.gain(number)
            x = shown.detach().requires_grad_()
            places = self.places[number]
            mine = {name: without_hooks(parameters[place]) for name, place in places.items()}
            trained = [name for name, p in mine.items() if p.requires_grad]
            delta, aux = self._again(number, x, mine, Tape(choices[number]), context)
            through, *of_mine = gradients_of(
                [(delta, None if g is None else gain * g), (aux, g_aux)],
                [x, *(mine[name] for name in trained)],
            )
            for name, dp in zip(trained, of_mine, strict=True):
                place = places[name]
                so_far = gradients[place]
                if dp is not None:
                    gradients[place] = dp if so_far is None else so_far + dp
            if number == 0:
                return added(added(g_before, through), g), gradients
            g, g_before = added(g_before, through), g
            if kept:
                before, after = kept.pop(), before
                shown = states.shown(before, self.dtype)
            else:
                earlier, shown = states.step_back(after, delta.detach().to(self.dtype), gain)
                before, after = earlier, before
        raise AssertionError("a stack has a first layer")

    def _again(
        self,
        number: int,
        x: Tensor,
        mine: dict[str, Tensor],
        tape: Tape,
        context: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """The force of a layer once more, with its graph."""
        around, layer = self.surroundings[number], self.stack.layers[number]
        owned = zip(self.owners[number], mine.values(), strict=True)
        if not around.buffers and all(getattr(module, name) is p for (module, name), p in owned):
            # The layer has them: to put others in their place takes the host as long as some of
            # its operations.
            force: Any = layer.force
            with torch.enable_grad(), around.restored(self.generators):
                return force(x, tape=tape.rewind(), **context)
        forced = Forced(layer)
        # Copies: a force that changes a buffer does so again in each backward pass.
        given = mine | {name: x.clone() for name, x in around.buffers.items()}
        with torch.enable_grad(), around.restored(self.generators):
            delta, aux = functional_call(forced, given, (x, tape.rewind()), context)
        return delta, aux


class Reversed(torch.autograd.Function):
    """A run through a stack, differentiable in x and in the parameters."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        kept, last, aux, saturated = run.forward(x)
        ctx.run, ctx.dtype = run, x.dtype
        ctx.counts = len(kept), len(parameters)
        ctx.save_for_backward(saturated, *kept, *parameters, *run.put_aside())
        ctx.mark_non_differentiable(saturated)
        return corrupted(last, saturated), aux, saturated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_aux: Tensor, _: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        saturated = next(saved)
        kept, parameters = (list(islice(saved, count)) for count in ctx.counts)
        # Without a name here the gradient of the last state goes when it has been used.
        g_x, gradients = ctx.run.backward(
            kept, parameters, list(saved), corrupted(g, saturated), g_aux
        )
        return None, g_x.to(ctx.dtype), *gradients


class Straight(torch.autograd.Function):
    """The second argument, what the first is rounded to, with the first's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def parameters_of(layer: nn.Module) -> dict[Tensor, tuple[str, nn.Module, str]]:
    """The name in `Forced`, and the module and attribute, of each, once, in the order of
    `named_parameters`, which takes the host as long as some of the layer's operations.
    """
    found: dict[Tensor, tuple[str, nn.Module, str]] = {}
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        seen.add(module)
        for name, p in module._parameters.items():
            if p is not None:
                found.setdefault(p, (f"{prefix}.{name}", module, name))
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                visit(f"{prefix}.{name}", child)

    visit("layer", layer)
    return found


def without_hooks(p: Tensor) -> Tensor:
    """What autograd gives the gradient of p for, the parameter itself if it has no hooks: autograd
    calls them when it hands them the gradient, and again when it adds this to ``grad``.
    """
    return p.detach().requires_grad_(p.requires_grad) if p._backward_hooks else p


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def gradients_of(
    results: Sequence[tuple[Any, Tensor | None]], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Those of ``leaves``, from results and theirs. A force may have no graph, as where a layer is
    skipped, and aux may be no tensor.
    """
    pairs = [
        (y, g.to(y.dtype))
        for y, g in results
        if isinstance(y, Tensor) and y.requires_grad and g is not None
    ]
    if not pairs:
        return [None] * len(leaves)
    found, given = zip(*pairs, strict=True)
    return torch.autograd.grad(found, leaves, given, allow_unused=True)


def added(some: Tensor | None, other: Tensor | None) -> Any:
    """Their sum, where None is zero."""
    if some is None or other is None:
        return other if some is None else some
    return some + other


def corrupted(x: Tensor, saturated: Tensor) -> Tensor:
    """NaN, its gradient too, where the states are not those of the stack."""
    return x + torch.where(saturated, torch.nan, 0.0) * x
