"""What gated_delta_rule computes: the recurrence, however its tokens are cut or laid."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from fusewright.deltanet import gated_delta_rule
from fusewright.deltanet._core.launches import Launch
from fusewright.deltanet.rule import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows, tokens, heads of keys and of values, K, V.
CASES = {
    "T1": (2, 1, 1, 8, 8),
    "T63": (1, 63, 1, 16, 16),
    "T64-K20-V24": (1, 64, 1, 20, 24),
    "T3-K1-V1": (1, 3, 1, 1, 1),
    "T65-K2-V3": (1, 65, 1, 2, 3),
    "T130": (1, 130, 1, 12, 20),
    "T5-heads": (1, 5, 2, 8, 8),
    "T66-values-heads-share": (1, 66, (1, 2), 8, 8),
    "T3-K40-V130": (1, 3, 1, 40, 130),
    "T2-K130-V8": (1, 2, 1, 130, 8),
}


def everything(op, leaves, **options):
    """Outputs, and the gradients of a sum in which they weigh differently."""
    outputs = op.public(*leaves, **options)
    total = sum((y.float() * (1 + place)).sin().sum() for place, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(total, leaves)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(rule_op, name, device):
    rule_op.check(rule_op.draw(*CASES[name], F32, device))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_short_numbers_are_as_near_to_fp64_as_torch(rule_op, dtype, device):
    rule_op.check(rule_op.draw(1, 70, 3, 20, 24, dtype, device))


def test_decay_of_one_token_is_as_near_to_fp64_as_torch(rule_op, device):
    """All of dg comes from the initial state, and from the gradient of the one after it."""
    rule_op.check(rule_op.draw(1, 1, 4, 16, 16, BF16, device))


@pytest.mark.parametrize("seed", [1, 4])
def test_decays_of_parallel_keys_are_as_near_to_fp64_as_torch(rule_op, seed, device):
    """Every pair of tokens says much of the decays between them; added to one token and taken off
    the other, most of it would cancel, and what is left would err more.
    """
    torch.manual_seed(seed)
    rule_op.check(rule_op.draw(1, 130, 1, 1, 1, F32, device, forget=0.02))


def test_without_a_state_it_is_zero(rule_op, backend, device):
    tensors = rule_op.having(starts=False).draw(1, 66, 1, 8, 8, F32, device)
    yardstick = Yardstick(rule_op.having(starts=False).reference, tensors)
    yardstick.check(lambda *x: rule_op.having(starts=False).public(*x, backend=backend))
    zeros = torch.zeros(1, 1, 8, 8, device=device)
    with_zeros = rule_op.public(*tensors, zeros, backend=backend)
    without = rule_op.having(starts=False).public(*tensors, backend=backend)
    assert same_bits(with_zeros, without)


def assert_close(found, truth):
    """Two orders of the same fp64 sums, the longest of fewer than 2^10 terms: apart by no more than
    one rounding per term of the largest number of all, as single ones may cancel.
    """
    largest = max(expected.abs().max() for expected in truth)
    bound = 2**10 * torch.finfo(F64).eps * largest
    for value, expected in zip(found, truth, strict=True):
        assert bool(((value - expected).abs() <= bound).all())


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_of_products_are_the_recurrence_token_by_token(rule_op, chunk):
    """In fp64, values and gradients."""
    leaves = [x.requires_grad_() for x in rule_op.draw(2, 37, (1, 2), 5, 4, F64)]
    both = []
    for rule, options in (
        (reference.gated_delta_rule, dict(chunk=chunk)),
        (reference.gated_delta_rule_by_token, {}),
    ):
        outputs = rule(*leaves, scale=0.3, **options)
        total = sum(y.sin().sum() for y in outputs)
        both.append([*outputs, *torch.autograd.grad(total, leaves)])
    assert_close(*both)


def gates_of(name, tensors):
    """g and beta that stand at the ends of their range."""
    g, beta = tensors[3], tensors[4]
    if name == "nothing-forgotten":
        g.zero_()
    elif name == "nothing-written":
        beta.zero_()
    elif name == "all-forgotten":
        g[:, ::3] = -1e4
        g[:, 5] = -math.inf
    else:
        beta.mul_(2.0)
    return tensors


@pytest.mark.parametrize(
    "name", ["nothing-forgotten", "nothing-written", "all-forgotten", "beta-up-to-2"]
)
def test_gates_at_the_ends_of_their_range_are_as_near_to_fp64_as_torch(rule_op, name, device):
    rule_op.check_by_token(gates_of(name, rule_op.draw(1, 12, 1, 8, 8, F32, device)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "least", "every"),
    # How low a reset is and how many there are meet in pairs.
    [
        *(
            (F32, least, every)
            for least, every in ((-math.inf, 1), (-math.inf, 50), (-1e4, 1), (-1e4, 7))
        ),
        (F16, -math.inf, 7),
        (BF16, -math.inf, 7),
    ],
)
def test_resets_within_chunks_are_as_near_to_fp64_as_the_recurrence(
    rule_op, dtype, least, every, device
):
    """The decays between two of them keep the digits that operands have."""
    tensors = rule_op.draw(1, 140, 1, 8, 8, dtype, device)
    tensors[3][:, 3::every] = least
    rule_op.check_by_token(tensors)


@pytest.mark.parametrize("low", [-80.0, -9.3])
def test_low_decays_within_chunks_are_as_near_to_fp64_as_the_recurrence(rule_op, low, device):
    """Those that are no resets add up to -1500 in a chunk, of which the others are a part."""
    tensors = rule_op.draw(1, 140, 1, 8, 8, F32, device)
    tensors[3][torch.rand(1, 140, 1, device=device) < 0.3] = low
    by_token = functools.partial(reference.gated_delta_rule_by_token, scale=8**-0.5)
    yardstick = Yardstick(by_token, tensors)
    for call in (rule_op.reference, rule_op.kernels):
        yardstick.check(call)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_keys_all_alike_are_as_near_to_fp64_as_torch(rule_op, dtype, device):
    """Where the inverse is hardest: all of A is near 1, and sums of its powers would explode."""
    tensors = rule_op.draw(1, 66, 1, 16, 8, dtype, device, forget=0.0)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1]).contiguous()
    tensors[4].fill_(1.0)
    rule_op.check(tensors)


def test_longer_keys_make_the_state_grow(rule_op, backend, device):
    """As the docstring says: with keys of length 2 a step multiplies what it corrects by -3."""
    tensors = rule_op.draw(1, 40, 1, 4, 4, F32, device, forget=0.0)
    tensors[1] = 2.0 * tensors[1][:, :1].expand_as(tensors[1]).contiguous()
    tensors[4].fill_(1.0)
    _, end = rule_op.public(*tensors, backend=backend)
    assert end.abs().max() > 1e10


def test_first_output_is_the_definition(backend, device):
    """o_1 = scale S_1^T q_1 with S_1 = beta k v^T: read after the token has been written."""
    q, k, v = (torch.randn(1, 1, 1, 4, device=device) for _ in range(3))
    beta = torch.rand(1, 1, 1, device=device)
    o, state = gated_delta_rule(q, k, v, -beta, beta, backend=backend)
    expected = 0.5 * beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(o, expected)
    assert state is None


@pytest.mark.parametrize("token", [2, 63, 64])
def test_future_token_changes_no_past_output(rule_op, token, backend, device):
    tensors = rule_op.draw(1, 66, 1, 8, 8, F32, device)
    o, _ = rule_op.public(*tensors, backend=backend)
    for x in tensors[1:5]:
        x[:, token] *= 0.5
    changed, _ = rule_op.public(*tensors, backend=backend)
    assert torch.equal(changed[:, :token], o[:, :token])
    assert (changed[:, token:] != o[:, token:]).flatten(2).any(-1).all()


def test_what_is_not_finite_reaches_no_earlier_chunk(rule_op, backend, device):
    tensors = rule_op.draw(1, 70, 1, 8, 8, F32, device)
    o, _ = rule_op.public(*tensors, backend=backend)
    tensors[1][:, 66] = math.nan
    changed, end = rule_op.public(*tensors, backend=backend)
    assert torch.equal(changed[:, :64], o[:, :64])
    assert not changed[:, 66:].isfinite().any()
    assert not end.isfinite().any()


def test_rows_and_heads_do_not_see_one_another(rule_op, backend, device):
    """Outputs and gradients of the others keep their bits where another holds a NaN."""
    leaves = [x.requires_grad_() for x in rule_op.draw(2, 5, 2, 4, 4, F32, device)]
    expected = everything(rule_op, leaves, backend=backend)
    with_nan = [x.detach().clone() for x in leaves]
    with_nan[1][1, 2, 0] = math.nan
    found = everything(rule_op, [x.requires_grad_() for x in with_nan], backend=backend)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        # Only states have their heads on the second axis.
        both = [z if place in (1, 7) else z.transpose(1, 2) for z in (x, truth)]
        assert torch.equal(both[0][0], both[1][0])
        assert torch.equal(both[0][1, 1], both[1][1, 1])
        assert not both[0][1, 0].isfinite().all()


# One of them empty, one longer than a chunk.
LENGTHS = [0, 1, 66, 66, 70]


def test_sequences_in_one_row_are_as_near_to_fp64_as_torch(rule_op, device):
    lengths = torch.tensor(LENGTHS, device=device)
    op = rule_op.having(cu_seqlens=lengths)
    op.check(op.draw(1, 70, 1, 8, 8, F32, device, sequences=4))


def test_sequences_in_one_row_give_the_bits_of_sequences_apart(rule_op, backend, device):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    op = rule_op.having(cu_seqlens=lengths)
    leaves = [x.requires_grad_() for x in op.draw(1, 70, 1, 8, 8, F32, device, sequences=4)]
    o, end, *grads = everything(op, leaves, backend=backend)
    for index, (first, last) in enumerate(itertools.pairwise(LENGTHS)):
        own = [x[:, first:last].detach() for x in leaves[:5]] + [leaves[5][index : index + 1]]
        if first == last:
            assert torch.equal(end[index], leaves[5][index])
            continue
        own = [x.detach().requires_grad_() for x in own]
        found = everything(rule_op, own, backend=backend)
        assert torch.equal(found[0], o[:, first:last])
        assert torch.equal(found[1], end[index : index + 1])
        assert same_bits(found[2:7], [x[:, first:last] for x in grads[:5]])
        assert torch.equal(found[7], grads[5][index : index + 1])


def test_tokens_that_no_sequence_holds_have_no_output_and_no_gradient(rule_op, backend, device):
    lengths = torch.tensor([1, 3], device=device)
    op = rule_op.having(cu_seqlens=lengths)
    leaves = [x.requires_grad_() for x in op.draw(1, 5, 1, 4, 4, F32, device)]
    o, _, *grads = everything(op, leaves, backend=backend)
    assert o.shape == leaves[2].shape
    for x in (o, *grads[:5]):
        assert x[:, 1:3].any()
        assert not x[:, :1].any()
        assert not x[:, 3:].any()


def test_lengths_out_of_order_lead_out_of_no_memory(rule_op, backend, device):
    """No check reads them; they count as the nearest that are in range and order."""
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 70, 1, 4, 4, F32, device, sequences=4)]
    both = []
    for bounds in ([-70, 3, 900, 2, 70], [0, 3, 70, 70, 70]):
        op = rule_op.having(cu_seqlens=torch.tensor(bounds, device=device))
        both.append(everything(op, leaves, backend=backend))
    assert same_bits(*both)


@pytest.mark.parametrize("cut", [64, 5])
def test_tokens_cut_in_two_are_the_whole(rule_op, cut, backend, device):
    """At a chunk's end to the bit."""
    *tensors, state = rule_op.draw(1, 70, 1, 8, 8, F32, device)
    o, end = rule_op.public(*tensors, state, backend=backend)
    found = []
    for part in (slice(0, cut), slice(cut, 70)):
        piece, state = rule_op.public(*(x[:, part] for x in tensors), state, backend=backend)
        found.append(piece)
    if cut == 64:
        assert same_bits([torch.cat(found, 1), state], [o, end])
    torch.testing.assert_close(torch.cat(found, 1), o)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("sizes", [(2, 0, 3, 4, 5), (0, 3, 2, 4, 5)])
def test_without_tokens_the_state_stays_and_without_rows_all_is_empty(
    rule_op, sizes, backend, device
):
    leaves = [x.requires_grad_() for x in rule_op.draw(*sizes, F32, device)]
    o, end = rule_op.public(*leaves, backend=backend)
    assert o.shape == leaves[2].shape
    assert torch.equal(end, leaves[5])
    assert end is not leaves[5]
    assert not end.numel() or end.data_ptr() != leaves[5].data_ptr()
    upstream = [torch.ones_like(x) for x in (o, end)]
    grads = torch.autograd.grad([o, end], leaves, upstream, materialize_grads=True)
    assert torch.equal(grads[5], torch.ones_like(end))
    assert all(g.shape == x.shape for g, x in zip(grads, leaves, strict=True))


def test_operands_of_any_strides_give_the_bits_of_contiguous_ones(rule_op, device):
    """Slices of one projection are read where they lie, strided columns are copied."""
    tensors = rule_op.draw(1, 3, 2, 16, 16, F32, device)
    expected = everything(rule_op, [x.requires_grad_() for x in tensors], backend="triton")
    q, k, v, *others = (x.detach() for x in tensors)
    q, k, v = torch.cat([q, k, v], 2).split(2, 2)
    v = v.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    others = [x.mT.contiguous().mT for x in others]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *others)]
    assert same_bits(everything(rule_op, leaves, backend="triton"), expected)


@pytest.mark.parametrize(
    ("keys", "width", "first", "gap"), [(20, 7, 0, 0), (16, 32, 1, 0), (16, 32, 0, 8)]
)
def test_kernels_load_whole_vectors(rule_op, keys, width, first, gap, device, monkeypatch):
    """Whatever the widths, the addresses and the gaps between rows are."""
    seen = []

    def spy(launch, tensors, floats=()):
        addresses = [x.data_ptr() for x in tensors if x is not None]
        # After the counts of tokens, heads and chunks.
        seen.append([*addresses, *launch.integers[3:]])
        launch.dispatch(tensors, floats)

    drawn = rule_op.draw(1, 70, 2, keys, width, F32, device)
    expected = everything(rule_op, [x.requires_grad_() for x in drawn], backend="triton")
    monkeypatch.setattr(Launch, "__call__", spy)
    leaves = [rule_op.laid(x.detach(), first, gap).requires_grad_() for x in drawn]
    assert same_bits(everything(rule_op, leaves, backend="triton"), expected)
    assert len(seen) == 7
    assert not any(number % 16 for numbers in seen for number in numbers)
