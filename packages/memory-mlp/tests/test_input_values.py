"""What stands between the joint projection and the memory: near to fp64, however tokens are cut."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright.memory_mlp.inputs import reference
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
NAN, INFINITY = math.nan, math.inf

# Rows, tokens, D, dtype; options of the op; the history's dtype where it is another one.
CASES = {
    "T5-D5-float32-taps4-l2": ((2, 5, 5, F32), {}),
    "T2-D8-float16-taps4-l2": ((1, 2, 8, F16), {}),
    "T4-D40-bfloat16-taps8-rms": ((1, 4, 40, BF16), dict(taps=8, key_norm="rms", heads=1)),
    "T5-D3-float32-taps1-plain": ((2, 5, 3, F32), dict(taps=1, key_norm=None)),
    "T6-D4-float16-no-taps": ((1, 6, 4, F16), dict(taps=0)),
    "T4-D1-float32-taps2-constant-theta": ((1, 4, 1, F32), dict(taps=2, theta=0.02, heads=3)),
    "T5-D5-bfloat16-queries": ((2, 5, 5, BF16), dict(queries=True)),
    "T3-D6-float16-queries-no-taps": ((1, 3, 6, F16), dict(queries=True, taps=0)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("many_input_programs")
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(input_op, name, device):
    sizes, options = CASES[name]
    op = input_op.having(**options)
    op.check(op.draw(*sizes, device))


def test_tables_as_they_are_give_the_bits_of_small_tiles(input_op, device, request):
    tensors = input_op.draw(2, 9, 5, F32, device)
    expected = input_op.kernels(*tensors)
    request.getfixturevalue("many_input_programs")
    assert same_bits(input_op.kernels(*tensors), expected)


@pytest.mark.usefixtures("many_input_programs")
def test_wider_history_is_as_near_to_fp64_as_torch(input_op, device):
    """As autocast has it: the state in fp32, the projection in bf16."""
    for dtype, wider in ((BF16, F32), (F32, F16)):
        input_op.check(input_op.draw(2, 2, 5, dtype, device, history_dtype=wider))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("taps", "lengths"), [(4, [1] * 5), (4, [2, 0, 3]), (4, [4, 1]), (1, [2, 3])], ids=str
)
@pytest.mark.usefixtures("many_input_programs")
def test_sequence_in_parts_is_the_sequence(input_op, taps, lengths, device):
    """To the bit forward; gradients pass on through the history."""
    op = input_op.having(taps=taps)
    tensors = op.draw(1, 5, 3, F32, device)

    def streamed(joint, history, own_taps, logits):
        parts = []
        for rows, gates in zip(joint.split(lengths, 1), logits.split(lengths, 1), strict=True):
            *outputs, history = op.kernels(rows, history, own_taps, gates)
            parts.append(outputs)
        return *(torch.cat(pieces, 1) for pieces in zip(*parts, strict=True)), history

    assert same_bits(streamed(*tensors), op.kernels(*tensors))
    Yardstick(op.reference, tensors).check(streamed)


def test_next_history_is_the_last_rows_of_both(input_op, device):
    for tokens in (0, 1, 3, 5):
        joint, history, *others = input_op.draw(2, tokens, 5, F16, device)
        last = input_op.kernels(joint, history, *others)[-1]
        assert torch.equal(last, torch.cat((history, joint), 1)[:, -3:])
        assert last.data_ptr() not in (joint.data_ptr(), history.data_ptr())


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("taps", [0, 1, 4])
def test_empty_calls_pass_and_hand_the_history_on(input_op, shape, taps, backend, device):
    op = input_op.having(taps=taps)
    leaves = [x.requires_grad_() for x in op.draw(*shape, 5, F32, device)]
    outputs = op.public(*leaves, backend=backend)
    assert outputs[0].shape == (*shape, 2, 5)
    grads = torch.autograd.grad([y.sum() for y in outputs], leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    assert bool((grads[1] == 1).all()) == (shape[1] == 0 or not grads[1].numel())
    if taps:
        assert not grads[2].any()


@pytest.mark.parametrize("strange", [NAN, INFINITY, -INFINITY])
def test_what_is_not_finite_stays_where_it_is_in_torch_and_is_not_written(
    input_op, strange, device
):
    """A key of the first head, a value and a gate of the second, and a token that is left out."""
    present = torch.ones(1, 9, dtype=torch.bool, device=device)
    present[0, 8] = False
    op = input_op.having(present=present)
    tensors = op.draw(1, 9, 5, F32, device)
    joint, _, _, logits = tensors
    joint[0, 1, 10] = strange
    joint[0, 4, 29] = strange
    logits[0, 2, 3] = NAN
    op.check(tensors)
    found, truth = (op.whole(*tensors, backend=b).writes.written for b in ("triton", "reference"))
    assert torch.equal(found, truth)
    assert found[0, :, 0].tolist() == [True, *(False,) * 4, *(True,) * 3, False]
    assert found[0, :, 1].tolist() == [*(True,) * 2, False, True, *(False,) * 5]


def test_key_that_fp16_cannot_hold_is_not_written(input_op, backend, device):
    """The value is finite in fp32, and infinite once it is rounded."""
    op = input_op.having(taps=1)
    joint, history, taps, logits = op.draw(1, 3, 5, F16, device)
    joint[0, 1, -1], taps[-1] = 6e4, 2.0
    written = op.whole(joint, history, taps, logits, backend=backend).writes.written
    assert written[0].tolist() == [[True, True], [True, False], [True, True]]


def test_large_rows_are_as_near_to_fp64_as_torch(input_op, device):
    """Squares that fp32 cannot hold, and rows of zeros."""
    op = input_op.having(taps=1)
    joint, history, taps, logits = op.draw(1, 4, 5, F32, device)
    joint[0, 1] = 0.0
    joint[0, 2] *= 1e3
    logits *= 30.0
    op.check([joint, history, taps, logits])


def test_unused_keys_and_gates_leave_no_gradient_and_no_nan(input_op, device):
    leaves = [x.requires_grad_() for x in input_op.draw(1, 5, 3, F32, device)]
    with torch.no_grad():
        leaves[0][0, 2, 8] = NAN
    q, *_ = input_op.kernels(*leaves)
    djoint, _, dtaps, dlogits = torch.autograd.grad(q.sum(), leaves, allow_unused=True)
    assert dlogits is None
    assert djoint[..., :6].any()
    assert not djoint[..., 6:].any()
    assert not dtaps[6:].any()


@pytest.mark.parametrize(
    "options", [dict(taps=9), dict(queries=True, taps=9), dict(heads=1)], ids=["reach", "q", "wide"]
)
def test_what_the_kernels_do_not_serve_is_the_references(input_op, options, device):
    op = input_op.having(**options)
    tensors = op.draw(1, 3, 129 if "heads" in options else 2, F32, device)
    assert same_bits(op.kernels(*tensors), op.reference(*tensors))


def strange_tokens(dtype, device, width=7):
    x = torch.randn(2, 9, width, device=device).to(dtype)
    x[0, 1, 3], x[0, 4, 0], x[1, 8, 6] = NAN, INFINITY, -INFINITY
    mask = torch.rand(2, 9, device=device) > 0.3
    return x, mask


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("many_input_programs")
def test_finite_tokens_are_the_references(dtype, masked, device):
    x, mask = strange_tokens(dtype, device)
    # A part of a sequence, and a gradient that is not finite where the token is not.
    mask = mask[:, 1:] if masked else None
    results = []
    for backend in ("triton", "reference"):
        leaf = x.clone().requires_grad_()
        y, present = token_ops.finite_tokens(leaf[:, 1:], mask, backend=backend)
        upstream = torch.where(present.unsqueeze(-1), torch.ones_like(y).cumsum(1), NAN)
        results.append((y.detach(), present, torch.autograd.grad(y, leaf, upstream)[0]))
    assert same_bits(*results)
    assert results[0][0].isfinite().all()
    assert results[0][2].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("flags", [1, 3])
@pytest.mark.usefixtures("many_input_programs")
def test_kept_tokens_are_the_references(dtype, flags, device):
    x, mask = strange_tokens(dtype, device)
    kept = torch.rand(2, 9, flags, device=device) > 0.2
    for given in (None, mask):
        results = []
        for backend in ("triton", "reference"):
            leaf = x.clone().requires_grad_()
            y = token_ops.kept_tokens(leaf, kept, given, NAN, backend=backend)
            gradient = torch.autograd.grad(y, leaf, torch.ones_like(y))[0]
            results.append((y.detach().nan_to_num(7.0), y.isnan(), gradient))
        assert same_bits(*results)
        assert results[0][1].any()


GATED = {
    "T9-dim7-float32-6": (2, 9, 7, 6, F32, None),
    "T21-dim40-float16-15": (1, 21, 40, 15, F16, None),
    "T5-dim33-bfloat16-17": (3, 5, 33, 17, BF16, None),
    "T4-dim1-float32-1": (1, 4, 1, 1, F32, None),
    "T6-dim5-bfloat16-3-bfloat16-weights": (1, 6, 5, 3, BF16, BF16),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("many_input_programs")
def test_gated_tokens_are_as_near_to_fp64_as_torch(gated_op, name, masked, device):
    """A token that is not finite has the logits of zeros, which are the biases."""
    *sizes, dtype, weight_dtype = GATED[name]
    mask = torch.rand(sizes[:2], device=device) > 0.3 if masked else None
    op = gated_op.having(mask)
    tensors = op.draw(*sizes, dtype, device, weight_dtype=weight_dtype)
    tensors[0][0, 1, 0] = NAN
    op.check(tensors)
    _, logits = op.kernels(*tensors)
    assert logits.dtype == F32
    assert torch.equal(logits[0, 1], tensors[2].float())


@pytest.mark.usefixtures("many_input_programs")
def test_gated_tokens_are_finite_tokens(gated_op, device):
    """Of any strides, and with a gradient that is not finite where the token is not."""
    x, mask = strange_tokens(F32, device)
    _, weight, bias = gated_op.draw(2, 9, 7, 6, F32, device)
    results = []
    for gated in (True, False):
        leaf = x.clone().requires_grad_()
        if gated:
            y, present, logits = token_ops.gated_tokens(
                leaf[:, 1:], weight, bias, mask[:, 1:], backend="triton"
            )
            assert logits.isfinite().all()
        else:
            y, present = token_ops.finite_tokens(leaf[:, 1:], mask[:, 1:], backend="triton")
        upstream = torch.where(present.unsqueeze(-1), torch.ones_like(y).cumsum(1), NAN)
        results.append((y.detach(), present, torch.autograd.grad(y, leaf, upstream)[0]))
    assert same_bits(*results)


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2)], ids=["tokens", "logits"])
def test_part_of_the_gated_tokens_gives_part_of_the_gradients(gated_op, used, backend, device):
    leaves = [x.requires_grad_() for x in gated_op.draw(1, 5, 4, 3, F32, device)]
    (output,) = gated_op.public(*leaves, backend=backend)[used]
    found = torch.autograd.grad(output.sum(), leaves, allow_unused=True)
    truth = torch.autograd.grad(
        gated_op.public(*leaves, backend="reference")[used][0].sum(), leaves, allow_unused=True
    )
    assert [x is None for x in found] == [x is None for x in truth]
    pairs = [(x, y) for x, y in zip(found, truth, strict=True) if x is not None]
    for x, y in pairs:
        torch.testing.assert_close(x, y)


def test_gated_tokens_that_the_kernels_do_not_serve_are_the_references(gated_op, device):
    for sizes, weight_dtype in (((1, 2, 8193, 1), F32), ((1, 2, 3, 1), F64)):
        tensors = gated_op.draw(*sizes, F32, device, weight_dtype=weight_dtype)
        assert same_bits(gated_op.kernels(*tensors), gated_op.reference(*tensors))


@pytest.mark.parametrize("shape", [(2, 11, 3), (1, 0, 2), (3, 1, 1), (0, 4, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.usefixtures("many_input_programs")
def test_counted_tokens_are_the_references(shape, masked, lossy, device):
    batch, _, heads = shape
    written = torch.rand(shape, device=device) > 0.4
    mask = torch.rand(shape[:2], device=device) > 0.4 if masked else None
    skipped, lost = torch.randint(1 << 40, (2, batch, heads), device=device)
    position = torch.randint(1 << 40, (batch,), device=device)
    operands = written, skipped, position, mask, lost if lossy else None
    found = torch.ops.fusewright_memory_mlp.count_tokens(*operands)
    assert same_bits(found, reference.counted_tokens(*operands))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 1), (1, 1, 8193)], ids=str)
def test_any_number_of_tokens_and_columns_is_served(shape, device):
    x = torch.randn(shape, device=device)
    y, present = token_ops.finite_tokens(x, None, backend="triton")
    assert torch.equal(y, x)
    assert present.shape == shape[:2]
    assert present.all()
    assert torch.equal(token_ops.kept_tokens(x, present[..., None], None, 1.0, backend="triton"), x)


def test_gates_are_the_formula(input_op, device):
    """theta = largest (1 - eta) sigmoid, and the constant where there is one."""
    *tensors, logits = input_op.draw(1, 3, 2, F64, device)
    *_, alpha, eta, theta, _ = input_op.reference(*tensors, logits)
    parts = [1 / (1 + torch.exp(-part)) for part in logits.split(2, -1)]
    torch.testing.assert_close((alpha, eta), tuple(parts[:2]))
    torch.testing.assert_close(theta, 0.25 * (1 - parts[1]) * parts[2])
    found = reference.gates_of(logits[..., :4], 2, 0.25, 0.03)
    torch.testing.assert_close(found[2], torch.full_like(alpha, 0.03))


@pytest.mark.sampled
@pytest.mark.parametrize("granularity", ["token", "chunk"])
def test_layer_on_the_kernels_is_as_near_to_fp64_as_on_the_reference(granularity, device):
    """In two calls, with queries of its own, a token left out and one that is not finite."""
    options = dict(heads=2, head_dim=3, hidden=4, chunk=4, granularity=granularity, device=device)
    plain, memory = (NeuralMemory(5, backend=b, **options) for b in ("reference", "triton"))
    names = [name for name, _ in memory.named_parameters()]
    mask = torch.ones(1, 7, dtype=torch.bool, device=device)
    mask[0, 2] = False

    def output_of(layer):
        def call(x, queries, *parameters):
            values = dict(zip(names, parameters, strict=True))

            class Twice(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = layer

                def forward(self):
                    first, state, _ = layer(x[:, :5], queries=queries[:, :5], mask=mask[:, :5])
                    later, state, _ = layer(x[:, 5:], state)
                    return first, later, state.convolution, *state.weights

            own = {f"layer.{name}": value for name, value in values.items()}
            return torch.func.functional_call(Twice(), own, ())

        return call

    x, queries = torch.randn(2, 1, 7, 5, device=device)
    x[0, 1, 0] = NAN
    inputs = [x, queries, *(p.detach() + 0.1 for p in memory.parameters())]
    Yardstick(output_of(plain), inputs).check(output_of(memory))
