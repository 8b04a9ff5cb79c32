"""What a step of heads and loss launches: products, kernels and one small copy, no casts and no
zeros.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.mixture_head._core import product_hopper
from fusewright.mixture_head._core.backends import DeviceProperties
from fusewright.mixture_head._core.launches import DescribedLaunch, Launch
from fusewright.mixture_head.heads import launch_grouped, launch_hopper
from fusewright.mixture_head.mixture import launch as mixture_launch
from torch.utils._python_dispatch import TorchDispatchMode

F32, BF16 = torch.float32, torch.bfloat16
ROWS, WIDTH, HEADS, STORED = 3, 16, 10, 32


class Launched(TorchDispatchMode):
    """The names of kernels and of torch's operations, but those that only make a tensor or a view:
    a fill is the tests' own, of memory that is fresh.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "fill_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """Kernels are noted instead of run."""
    mode = Launched()
    for kind in (Launch, DescribedLaunch):
        monkeypatch.setattr(
            kind, "__call__", lambda self, *_: mode.names.append(self.kernel.__name__)
        )
    return mode


@pytest.fixture(params=[False, True], ids=["apart", "epilogue"])
def in_epilogue(request, monkeypatch):
    """Whether the second layers are in the epilogue of the product of the first ones."""
    gpu = DeviceProperties(multiprocessors=1, shared_bytes=227 << 10, capability=90)
    monkeypatch.setattr(product_hopper, "device_properties", lambda device: gpu)
    monkeypatch.setattr(launch_grouped, "has_epilogue", lambda *_: request.param)
    launch_hopper.plan_heads.cache_clear()
    yield request.param
    launch_hopper.plan_heads.cache_clear()


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_heads_launch_three_products_and_a_few_kernels(weight_dtype, in_epilogue, launched):
    x = torch.randn(ROWS, WIDTH, dtype=BF16)
    hidden_weight = torch.randn(HEADS * STORED, WIDTH, dtype=BF16)
    output_weight = torch.randn(HEADS, STORED, 3, dtype=weight_dtype)
    with launched:
        out, u = launch_grouped.grouped_heads(x, hidden_weight, output_weight)
    fused = ["copy_", "hopper_heads_kernel", "add_outputs_kernel"]
    apart = ["mm", "copy_", "silu_heads_kernel"]
    assert launched.names == (fused if in_epilogue else apart)
    launched.names.clear()
    with launched:
        launch_grouped.grouped_heads_backward(
            out, x, hidden_weight, output_weight, u, (True, True, True)
        )
    assert launched.names == ["silu_heads_backward_kernel", "add_parts_kernel", "mm", "mm"]


def test_the_loss_launches_three_kernels(launched):
    params, y = torch.randn(ROWS, HEADS, 3), torch.randn(ROWS)
    with launched:
        value, params_slope, y_slope, factor = mixture_launch.mixture_forward(
            params, y, None, False, -7.0, 5.0, 1e-3, True
        )
        mixture_launch.mixture_backward(value, factor, None, params_slope, y_slope, F32, F32, False)
    assert launched.names == ["mixture_forward_kernel", "mean_kernel", "mixture_backward_kernel"]
