"""What is timed and against whom: ``python -m fusewright.optimizer.bench`` prints a short table of
this machine's GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import AdamW

Tensor = torch.Tensor
Shapes = list[tuple[int, ...]]
LR, MAX_GRAD_NORM = 1e-3, 1.0


def language_model(layers: int = 20, width: int = 2048, hidden: int = 5504) -> Shapes:
    """1.08 B parameters in 182 tensors: two norms, four projections and three products a layer."""
    layer = [(width,)] * 2 + [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    return [(32000, width), (width,), *layer * layers]


def small_model(layers: int = 19, width: int = 384) -> Shapes:
    """36.4 M parameters in 116 tensors."""
    layer = [(width,)] * 2 + [(3 * width, width), (width, width), (4 * width, width)]
    return [(7168, width), (width,), *[*layer, (width, 4 * width)] * layers]


SHAPES: dict[str, Shapes] = {
    "small": small_model(),
    "large": language_model(),
    "many": [(256,)] * 300,
}
SAMPLE: Shapes = [(1000,), (33, 70), (3,), (257, 129)]


class Case(NamedTuple):
    """A step over tensors of these shapes, with clipping or without."""

    op: str
    shapes: Shapes
    dtype: torch.dtype

    @property
    def sizes(self) -> dict[str, int]:
        return dict(params=sum(map(elements, self.shapes)), tensors=len(self.shapes))

    def inputs(self, device: str) -> list[Tensor]:
        return drawn(self.shapes, self.dtype, device)

    def sample(self, device: str) -> list[Tensor]:
        return drawn(SAMPLE, self.dtype, device)

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(torch_step, clips=self.op != "AdamW")

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Parameter, gradient and state read, parameter and state written; squares read it anew."""
        passes = 7 if self.op == "AdamW" else 8
        return {"step": passes * self.sizes["params"] * self.dtype.itemsize}

    @property
    def flops(self) -> dict[str, int]:
        return {}


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def drawn(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parameters, then their gradients."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    return [draw(shape) for shape in shapes] + [draw(shape) for shape in shapes]


def cases() -> list[Case]:
    """Both sizes in fp32 and bf16, with clipping and without; and many tensors for the host."""
    dtypes = torch.float32, torch.bfloat16
    found = [
        Case(op, SHAPES[name], dtype)
        for op in ("AdamW", "AdamW with clipping")
        for name in ("small", "large")
        for dtype in dtypes
    ]
    return [*found, Case("AdamW", SHAPES["many"], torch.float32)]


def torch_step(*tensors: Tensor, clips: bool) -> tuple[Tensor, ...]:
    """Parameters after two steps, by the formula, in at least fp32."""
    half = len(tensors) // 2
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    found = [x.detach().to(wide) for x in tensors]
    ps, gs = found[:half], found[half:]
    if clips:
        norm = torch.stack([g.square().sum() for g in gs]).sum().sqrt()
        gs = [g * (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0) for g in gs]
    results = []
    for p, g, kept in zip(ps, gs, tensors, strict=False):
        m, v = torch.zeros_like(g), torch.zeros_like(g)
        for step in (1, 2):
            m = (m + (1 - 0.9) * (g - m)).to(kept.dtype).to(wide)
            v = (0.999 * v + (1 - 0.999) * g * g).to(kept.dtype).to(wide)
            root = (v / (1 - 0.999**step)).sqrt() + 1e-8
            p = p * (1 - LR * 0.01) - LR / (1 - 0.9**step) * m / root
            p = p.to(kept.dtype).to(wide)
        results.append(p.to(kept.dtype))
    return tuple(results)


class Stepped:
    """An optimizer as the benchmark takes it: parameters after two steps, or a step to repeat.

    Args:
        make: from parameters to an optimizer.
        clips: clip_grad_norm_ before each step, for optimizers that do not clip.
        captures: a step can be captured in a CUDA graph.
    """

    def __init__(
        self, make: Callable[[list], Any], clips: bool = False, captures: bool = True
    ) -> None:
        self.make, self.clips, self.captures = make, clips, captures

    def prepare(self, tensors: list[Tensor]) -> Callable[[], None]:
        """A step on these parameters and gradients, in place."""
        half = len(tensors) // 2
        parameters = [torch.nn.Parameter(x.detach()) for x in tensors[:half]]
        for p, g in zip(parameters, tensors[half:], strict=True):
            p.grad = g.detach()
        optimizer = self.make(parameters)

        def step() -> None:
            if self.clips:
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()

        return step

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = [x.detach().clone() for x in tensors]
        step = self.prepare(copies)
        step()
        step()
        return tuple(copies[: len(copies) // 2])


def compiled(parameters: list) -> Any:
    """torch.compile's fusion of torch's own loop over tensors."""

    class Compiled:
        optimizer = torch.optim.AdamW(parameters, lr=LR, foreach=True)
        step = staticmethod(torch.compile(optimizer.step))

    return Compiled


def providers() -> dict[str, dict[str, Stepped]]:
    """Ours and torch's own, by op."""
    rivals: dict[str, dict[str, Any]] = {
        "torch-fused": dict(fused=True),
        "torch-fused-capturable": dict(fused=True, capturable=True),
        "torch-foreach": dict(foreach=True, capturable=True),
    }
    found = {
        "fusewright": {
            "AdamW": Stepped(functools.partial(AdamW, lr=LR)),
            "AdamW with clipping": Stepped(
                functools.partial(AdamW, lr=LR, max_grad_norm=MAX_GRAD_NORM)
            ),
        }
    }
    for name, options in rivals.items():
        make = functools.partial(torch.optim.AdamW, lr=LR, **options)
        captures = "capturable" in options
        found[name] = {
            "AdamW": Stepped(make, captures=captures),
            "AdamW with clipping": Stepped(make, clips=True, captures=captures),
        }
    found["compile"] = {"AdamW": Stepped(compiled, captures=False)}
    return found


def main() -> int:
    """Print what a step takes on this machine's GPU."""
    if not torch.cuda.is_available():
        print("fusewright.optimizer.bench: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds of a step,")
    print("the host's time to launch it included.")
    for case in cases():
        for name, ops in providers().items():
            if case.op in ops and name != "compile":
                step = ops[case.op].prepare(case.inputs("cuda"))
                ms = do_bench(step, return_mode="median")
                print(f"{case.op:20}{case.sizes} {case.dtype} {name:24}{ms:9.3f}", flush=True)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
