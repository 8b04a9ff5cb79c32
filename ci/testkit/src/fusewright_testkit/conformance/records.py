"""What a package states once: what it offers, and its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..yardstick import Tensors, Yardstick, as_tuple

Sizes = tuple[Any, ...]
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


class Package(NamedTuple):
    """What a package offers, beside what every package does.

    Args:
        module: as it is imported, "fusewright.memory_mlp".
        names: public ones, spaces between them.
        registered: ops of its namespace, likewise.
        without_triton: a program that uses the package where there is no triton.
        absent: further distributions that are never imported by the package alone.
    """

    module: str
    names: str
    registered: str
    without_triton: str
    absent: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        return self.module.replace(".", "_")


class Operation:
    """A function of a flat list of tensors. A package's class below this one has the functions
    without a body, and the sizes, which are what its ``draw`` takes.
    """

    name: str
    # Few numbers, for transforms and compilers.
    small: Sizes
    # As few as possible, for Jacobians, third derivatives and numerical ones.
    tiny: Sizes
    # Several programs, where bits are compared.
    several: Sizes
    # One compiled graph serves them all.
    growing: tuple[Sizes, ...]
    empty: tuple[Sizes, ...] = ()
    # Where operands have other strides; as ``small`` where left out.
    strided: Sizes = ()
    # Those of a model, for what only a GPU can show.
    gpu: tuple[Sizes, ...]
    gpu_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    # The short dtype in which bits are compared, and values without a GPU: fp16 of kernels that
    # leave it to the machine to round to bf16, where the interpreter truncates.
    low: torch.dtype = torch.bfloat16
    # An output that is changed in place must not be needed by the derivative, or torch says so.
    saves_outputs = False
    # The place of an operand that the derivative reads.
    saves = -1
    # Tests, or modules of the suite, that do not hold, and why.
    exempt: Mapping[str, str] = MappingProxyType({})

    def public(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        """The function, of tensors that gradients are asked of, and ``backend``."""
        raise NotImplementedError

    def draw(self, sizes: Sizes, dtype: torch.dtype, device: str) -> list:
        """Operands."""
        raise NotImplementedError

    # torch's own function, whose output has the dtype that autocast gives.
    twin: Callable | None = None

    def autocast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands as autocast to bfloat16 has the function take them."""
        return list(tensors)

    def kept(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """How many numbers are saved for the derivative beside the operands; None where that is
        not stated.
        """
        return None

    def opchecks(self, registered: str) -> tuple[str, ...]:
        """The parts of torch's check that hold of a registered op."""
        return OPCHECKS

    def kernels(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        """The Triton kernels."""
        return self.public(*tensors, **{"backend": "triton"} | options)

    def reference(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        return self.public(*tensors, **{"backend": "reference"} | options)

    def sample(self, sizes: Sizes, dtype: torch.dtype, device: str) -> list:
        """What the suite draws."""
        return self.draw(sizes, dtype, device)

    def check(self, tensors: Tensors, grads: Tensors | None = None, **options: Any) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        yardstick = Yardstick(partial(self.reference, **options), tensors, grads)
        yardstick.check(partial(self.kernels, **options))

    def first(self, outputs: Any) -> torch.Tensor:
        return as_tuple(outputs)[0]

    def leaves(self, sizes: Sizes, dtype: torch.dtype, device: str) -> list:
        """What the suite draws, of which gradients are asked."""
        drawn = self.sample(sizes, dtype, device)
        return [x.requires_grad_() if is_float(x) else x for x in drawn]


def is_float(x: torch.Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def ramp(y: torch.Tensor) -> torch.Tensor:
    """A number for each element of y."""
    return torch.linspace(-1.0, 2.0, y.numel(), device=y.device).view_as(y).to(y.dtype)


def everything(
    call: Callable,
    leaves: Sequence[torch.Tensor | None],
    upstream: Sequence | None = None,
    create_graph: bool = False,
) -> list[torch.Tensor]:
    """Outputs, and the gradients of the leaves that ask for one."""
    outputs = as_tuple(call(*leaves))
    used = [y for y in outputs if y.requires_grad]
    asked = [x for x in leaves if x is not None and x.requires_grad]
    upstream = [ramp(y) for y in used] if upstream is None else upstream
    if not used:
        return list(outputs)
    grads = torch.autograd.grad(
        used, asked, upstream, create_graph=create_graph, materialize_grads=True
    )
    return [*(y.detach() for y in outputs), *grads]


def same_bits(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))
