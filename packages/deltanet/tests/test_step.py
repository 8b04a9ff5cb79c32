"""gated_delta_rule_step: one token of the recurrence."""

from __future__ import annotations

import pytest
import torch
from fusewright.deltanet import gated_delta_rule, gated_delta_rule_step
from fusewright_testkit.conformance import layouts, same_bits

F32, BF16 = torch.float32, torch.bfloat16
SIZES = 2, (1, 2), 3, 5


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "sizes", [SIZES, (1, (1, 1), 1, 1), (3, (2, 2), 24, 40)], ids=["small", "one", "several-tiles"]
)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(step_op, sizes, dtype, device):
    step_op.check(step_op.draw(*sizes, dtype, device))


@pytest.mark.parametrize("layout", layouts.EVERY, ids=lambda layout: layout.__name__)
def test_strides_change_no_bit_and_outputs_are_contiguous(step_op, layout, device):
    strided = [layout(x) for x in step_op.draw(*SIZES, F32, device)]
    found = step_op.kernels(*strided)
    assert all(y.is_contiguous() for y in found)
    assert same_bits(found, step_op.kernels(*(x.contiguous() for x in strided)))


def test_steps_are_the_rule(step_op, rule_op, backend, device):
    *tensors, state = rule_op.draw(2, 5, (1, 2), 4, 4, F32, device)
    o, end = rule_op.public(*tensors, state, backend=backend)
    found = []
    for t in range(5):
        y, state = gated_delta_rule_step(*(x[:, t] for x in tensors), state, backend=backend)
        found.append(y)
    torch.testing.assert_close(torch.stack(found, 1), o)
    torch.testing.assert_close(state, end)


def test_given_state_stays_as_it_was(step_op, backend, device):
    tensors = step_op.draw(*SIZES, F32, device)
    before = tensors[5].clone()
    _, after = gated_delta_rule_step(*tensors, backend=backend)
    assert torch.equal(tensors[5], before)
    assert not torch.equal(after, before)


def test_strange_state_stays_in_its_row_and_head(step_op, backend, device):
    tensors = step_op.draw(*SIZES, F32, device)
    expected = step_op.public(*tensors, backend=backend)
    tensors[5][1, 0, 0, 0] = float("nan")
    for found, truth in zip(step_op.public(*tensors, backend=backend), expected, strict=True):
        assert torch.equal(found[0], truth[0])
        assert torch.equal(found[1, 1], truth[1, 1])
        assert found[1, 0].isnan().any()


q, k = torch.randn(2, 2, 1, 4)
v, g, beta = torch.randn(2, 2, 3), torch.zeros(2, 2), torch.rand(2, 2)
state = torch.zeros(2, 2, 4, 3)
BAD = {
    "tokens": (dict(q=q[:, None]), ValueError, r"q must be \[B, H, K\] with a width"),
    "gate": (dict(g=g[:1]), ValueError, r"g must be \[B, HV\] = \(2, 2\), got \(1, 2\)"),
    "state": (dict(state=state.mT), ValueError, r"state must be \[N, HV, K, V\] = \(2, 2, 4, 3\)"),
    "backend": (dict(backend="fla"), ValueError, '"auto", "triton" or "reference"'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    with pytest.raises(error, match=message):
        gated_delta_rule_step(**dict(q=q, k=k, v=v, g=g, beta=beta, state=state) | changed)


def test_triton_says_which_widths_it_serves():
    wide, one = torch.randn(1, 1, 257), torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match="keys of up to 256 columns, not 257"):
        gated_delta_rule_step(
            wide, wide, wide, one, one, torch.zeros(1, 1, 257, 257), backend="triton"
        )


def test_rule_of_one_token_is_the_step(step_op, device):
    tensors = step_op.draw(*SIZES, F32, device)
    o, state = gated_delta_rule_step(*tensors, scale=0.7)
    whole = gated_delta_rule(
        *(x[:, None] for x in tensors[:5]),
        scale=0.7,
        initial_state=tensors[5],
        output_final_state=True,
    )
    torch.testing.assert_close(whole.o[:, 0], o)
    torch.testing.assert_close(whole.state, state)
