"""What holds of the package as a whole."""

from __future__ import annotations

from fusewright_testkit.conformance import Package
from fusewright_testkit.conformance.package import *  # noqa: F403

PACKAGE = Package(
    "fusewright.hyper_connections",
    names="StreamReading stream_coefficients stream_read stream_write",
    registered="stream_read stream_read_backward stream_write stream_write_backward",
    without_triton=(
        "x = torch.randn(3, 2, 4, requires_grad=True)\n"
        "found = stream_read(x, torch.randn(8, 8), torch.ones(3), torch.zeros(8))\n"
        "res = found.logits.softmax(-1)\n"
        "stream_write(found.mixed, res, found.post, found.u).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    ),
)
