"""What holds of the package as a whole."""

from __future__ import annotations

from fusewright_testkit.conformance import Package
from fusewright_testkit.conformance.package import *  # noqa: F403

PACKAGE = Package(
    "fusewright.reversible",
    names="FixedPoint MidpointStack Mode Passed Stepped Tape",
    # A step sets a flag that it is given: a function, where an op would return another.
    registered="",
    without_triton=(
        "class Layer(torch.nn.Linear):\n"
        "    def force(self, x, *, tape):\n"
        "        return torch.tanh(self(x)), None\n"
        "stack = MidpointStack([Layer(4, 4) for _ in range(3)])\n"
        "stack(torch.randn(2, 4)).x.square().sum().backward()\n"
        "assert all(p.grad.isfinite().all() for p in stack.parameters())\n"
    ),
)
