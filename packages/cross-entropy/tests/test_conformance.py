"""What holds of the package as a whole."""

from __future__ import annotations

from fusewright_testkit.conformance import Package
from fusewright_testkit.conformance.package import *  # noqa: F403

PACKAGE = Package(
    "fusewright.cross_entropy",
    names="Reduction linear_cross_entropy",
    # Its launch overwrites its argument: a function, where an op would return a second tensor.
    registered="",
    without_triton=(
        "x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)\n"
        "weight = torch.randn(5, 8, dtype=torch.bfloat16)\n"
        "linear_cross_entropy(x, weight, torch.tensor([0, 4, 2])).backward()\n"
        "assert x.grad.isfinite().all()\n"
    ),
)
