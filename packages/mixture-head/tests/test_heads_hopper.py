"""The backward pass of the narrow second layer in one kernel, which runs on GPUs of compute
capability 9.0 alone: it serves here whatever size is asked.
"""

from __future__ import annotations

import pytest
import torch
from fusewright.mixture_head.heads import launch, launch_hopper_backward, reference
from fusewright_testkit import Yardstick

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but this kernel: a call that it does not serve fails."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    monkeypatch.setattr(launch_hopper_backward, "FEWEST_ROWS", 0)

    def plain(*args):
        raise AssertionError("the plain kernel ran")

    monkeypatch.setattr(launch.kernels, "silu_heads_backward_kernel", plain)


def draw(rows, heads, stored, weight_dtype=F32):
    u = 2 * torch.randn(rows, heads, stored, device="cuda").to(BF16)
    weight = torch.randn(heads, stored, 3, device="cuda").to(weight_dtype)
    return torch.randn(rows, heads, 3, device="cuda"), u, weight


# Tiles that are whole and such that are not, in rows and in units of a head; programs with rows of
# one panel and of several, several programs a panel, one row, one head.
SHAPES = [
    *((4000, 10, 1376), (64, 1, 128), (1, 3, 72), (129, 2, 8), (7, 40, 1376), (40000, 1, 200)),
    *((100, 300, 8), (65, 2, 264)),
]


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_as_near_to_fp64_as_torch(shape, weight_dtype):
    operands = list(draw(*shape, weight_dtype))
    Yardstick(reference.silu_heads_backward, operands).check(launch.silu_heads_backward)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_every_time_and_in_the_place_of_u(shape):
    dparams, u, weight = draw(*shape)
    first = launch.silu_heads_backward(dparams, u, weight)
    for _ in range(3):
        found = launch.silu_heads_backward(dparams, u, weight)
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    over = u.clone()
    assert torch.equal(launch.silu_heads_backward_(dparams, over, weight), first[1])
    assert torch.equal(over, first[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 1e-38])
@pytest.mark.parametrize("operand", range(3))
def test_special_values_are_where_torch_has_them(operand, value):
    operands = list(draw(300, 3, 264))
    operands[operand][1, 2, 1] = value
    found = launch.silu_heads_backward(*operands)
    truth = reference.silu_heads_backward(*operands)
    for ours, theirs in zip(found, truth, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
