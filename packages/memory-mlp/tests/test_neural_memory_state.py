"""The state of a NeuralMemory: streaming, resets, reading without writing, tokens left out."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright.memory_mlp.common.operands import FEWEST_ROWS
from fusewright.memory_mlp.scan import launch, launch_deep
from torch.utils._pytree import tree_flatten

from .compared import assert_same_but_for_rounding

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
LENGTH = 21
SPLITS = {
    "token-by-token": [1] * LENGTH,
    "chunks": [6, 12, 3],
    "ragged": [5, 0, 8, 2, 6],
    "long-last": [1, 20],
}
ALONE = [
    {"granularity": "token"},
    {"granularity": "token", "read": "before"},
    {"granularity": "token", "layers": 3, "max_grad_norm": 0.5},
    {"granularity": "token", "chunk": 1, "max_grad_norm": 0.5},
    {"granularity": "token", "chunk": 64},
    {"granularity": "chunk"},
    {"granularity": "chunk", "layers": 1},
    {"granularity": "token", "convolution": 0},
    {"granularity": "token", "convolution": 9},
]
STREAMED = [*ALONE, {"granularity": "chunk", "scope": "batch_pooled", "max_grad_norm": 0.5}]


def spelled(options):
    return "-".join(f"{name}={value}" for name, value in options.items())


def draw(memory, batch=2, length=LENGTH, requires_grad=False):
    weight = memory.output.weight
    x = torch.randn(batch, length, memory.dim, dtype=weight.dtype, device=weight.device)
    return x.requires_grad_(requires_grad)


def streamed(memory, x, lengths, state=None, **options):
    """y and the state after x, fed in parts."""
    ys = []
    for part in x.split(lengths, 1):
        y, state, _ = memory(part, state, **options)
        ys.append(y)
    return torch.cat(ys, 1), state


def assert_same(found, truth):
    assert_same_but_for_rounding([found], [truth])


def assert_same_state(found, truth):
    for one, other in zip(tree_flatten(found)[0], tree_flatten(truth)[0], strict=True):
        assert_same(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("options", STREAMED, ids=spelled)
def test_sequence_in_parts_is_the_sequence(options, lengths, memory_of):
    memory = memory_of(**options)
    x = draw(memory, requires_grad=True)
    leaves = [x, *memory.parameters()]
    results = []
    for parts in ([LENGTH], lengths):
        y, state = streamed(memory, x, parts)
        end = sum(w.square().sum() for w in (*state.weights, *state.momentum))
        grads = torch.autograd.grad(y.square().sum() + end, leaves)
        results.append((y, state, grads))
    (y, state, grads), (y_truth, state_truth, grads_truth) = results
    assert_same(y, y_truth)
    assert_same_state(state, state_truth)
    for found, truth in zip(grads, grads_truth, strict=True):
        assert_same(found, truth)


def test_token_by_token_in_autocast_is_the_sequence_in_autocast(memory_of, device):
    memory = memory_of(dtype=F32)
    x = draw(memory)
    with torch.autocast(device, BF16):
        whole, state, _ = memory(x)
        parts, parts_state = streamed(memory, x, [1] * LENGTH)
    # Keys and values are rounded alike; what is read of them is rounded once more.
    torch.testing.assert_close(parts, whole)
    for found, truth in zip(tree_flatten(parts_state)[0], tree_flatten(state)[0], strict=True):
        assert found.dtype == truth.dtype
    assert torch.equal(parts_state.convolution, state.convolution)
    assert torch.equal(parts_state.tail.k, state.tail.k)


def test_segments_are_steps_as_they_come(memory_of):
    memory = memory_of(granularity="segment")
    x = draw(memory)
    once, twice = (streamed(memory, x, parts)[0] for parts in ([LENGTH], [10, 11]))
    assert_same(twice[:, :10], once[:, :10])
    assert not torch.allclose(twice[:, 10:], once[:, 10:])


def test_state_is_a_pytree_of_tensors(memory_of):
    state = memory_of().init_state(2)
    leaves, spec = tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert len(leaves) == 4 + 4 + 6 + 3
    assert spec == tree_flatten(memory_of()(draw(memory_of()))[1])[1]


@pytest.mark.parametrize("granularity", ["token", "chunk", "segment"])
def test_state_keeps_no_memory_of_its_call_alive(granularity, memory_of):
    memory = memory_of(granularity=granularity)
    with torch.no_grad():
        state = memory(draw(memory, length=500))[1]
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree_flatten(state)[0]
    }
    fresh = memory.init_state(2)
    own = sum(w[0].numel() for w in (*fresh.weights, *fresh.momentum)) * 2
    tail = sum(x.numel() for x in (*state.tail, state.convolution))
    assert sum(sizes.values()) <= 8 * (own + tail + 8)


def test_states_keep_one_dtype(memory_of, device):
    for dtype, wide in ((F64, F64), (F32, F32), (BF16, F32), (F16, F32)):
        memory = memory_of(dtype=dtype)
        for state in (memory.init_state(2), memory(draw(memory))[1]):
            assert {t.dtype for t in (*state.weights, *state.momentum, *state.tail[2:5])} == {wide}
            assert {state.tail.k.dtype, state.tail.v.dtype, state.convolution.dtype} == {dtype}
            assert {state.skipped.dtype, state.position.dtype} == {torch.int64}


@pytest.mark.parametrize("options", ALONE, ids=spelled)
def test_row_that_was_reset_amid_a_chunk_starts_afresh(options, memory_of):
    memory = memory_of(**options)
    # No later gradient is taken at weights of a chunk that the fresh row did not begin.
    x = draw(memory, length=10)
    state = memory.reset(memory(x)[1], rows_where([False, True], x))
    fresh = memory.init_state(2)
    for found, kept, start in zip(
        (*state.weights, *state.momentum, state.convolution, state.skipped, state.position),
        tree_flatten(memory(x)[1]._replace(tail=()))[0],
        tree_flatten(fresh._replace(tail=()))[0],
        strict=True,
    ):
        assert torch.equal(found[0], kept[0])
        assert torch.equal(found[1], start[1])
    later = draw(memory, length=5)
    y = memory(later, state)[0]
    assert_same(y[:1], memory(later, memory(x)[1])[0][:1])
    if memory.rules.granularity == "token" and memory.rules.chunk >= 15:
        # Both chunks end after the last token.
        assert_same(y[1:], memory(later[1:])[0])


def test_row_that_was_reset_where_a_chunk_ends_is_a_new_sequence(memory_of):
    memory = memory_of()
    x, later = draw(memory, length=12), draw(memory)
    state = memory.reset(memory(x)[1], rows_where([False, True], x))
    found, state, _ = memory(later, state)
    truth, true_state, _ = memory(later[1:])
    assert_same(found[1:], truth)
    for one, other in zip(tree_flatten(state)[0], tree_flatten(true_state)[0], strict=True):
        assert_same(one[1:], other)
    assert state.position.tolist() == [12 + LENGTH, LENGTH]


def test_reset_row_is_a_sequence_with_a_shorter_first_chunk(memory_of):
    memory = memory_of()
    x, later = draw(memory, length=4), draw(memory)
    state = memory.reset(memory(x)[1], rows_where([True, True], x))
    y = memory(later, state)[0]
    # The same chunks, where four tokens that are left out stand before: they are not finite.
    x = torch.full_like(x, torch.nan)
    assert_same(y, memory(torch.cat((x, later), 1))[0][:, 4:])


def test_pooled_memory_outlives_the_reset_of_a_row(memory_of):
    memory = memory_of(granularity="chunk", scope="batch_pooled")
    x = draw(memory, length=10)
    state = memory(x)[1]
    after = memory.reset(state, rows_where([True, False], x))
    for found, truth in zip(after.weights, state.weights, strict=True):
        assert torch.equal(found, truth)
    assert after.position.tolist() == [0, 10]
    assert not after.tail.written[0].any()


def test_pooled_memory_of_one_row_outlives_its_reset(memory_of):
    memory = memory_of(granularity="chunk", scope="batch_pooled")
    state = memory(draw(memory, length=10)[:1])[1]
    after = memory.reset(state, rows_where([True], state.position))
    for found, truth in zip(
        (*after.weights, *after.momentum), (*state.weights, *state.momentum), strict=True
    ):
        assert torch.equal(found, truth)
    assert after.position.tolist() == [0]


def rows_where(rows, x):
    return torch.tensor(rows, device=x.device)


def test_gradients_reach_the_initial_weights_through_a_reset(memory_of):
    memory = memory_of()
    x = draw(memory)
    state = memory.detach_state(memory(x)[1])
    state = memory.reset(state, rows_where([True, False], x))
    memory(x, state)[0].square().sum().backward()
    assert all(w.grad.any() for w in memory.initial.values())


def test_detached_state_needs_no_graph(memory_of):
    memory = memory_of()
    state = memory(draw(memory))[1]
    assert any(t.requires_grad for t in tree_flatten(state)[0])
    detached = memory.detach_state(state)
    assert not any(t.requires_grad for t in tree_flatten(detached)[0])
    assert_same_state(detached, state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 3},
        {"convolution": 0},
        {"granularity": "chunk"},
        {"granularity": "chunk", "scope": "batch_pooled"},
        {"granularity": "segment"},
    ],
    ids=spelled,
)
@pytest.mark.parametrize("length", [0, 6, 10])
def test_retrieved_is_what_the_next_token_would_read_before_writing(options, length, memory_of):
    read = {} if options.get("granularity") else {"read": "before"}
    memory = memory_of(**options, **read)
    x, query = draw(memory, length=length), draw(memory, length=1)
    state = memory(x)[1]
    before_state = [t.clone() for t in tree_flatten(state)[0]]
    y = memory.retrieve(query, state, before=x)
    assert_same(y, memory(query, state)[0])
    for found, truth in zip(tree_flatten(state)[0], before_state, strict=True):
        assert torch.equal(found, truth)


def test_retrieving_begins_the_convolution_afresh_unless_told_otherwise(memory_of):
    memory = memory_of()
    # A memory that has forgotten much would hide what it is asked.
    state = memory.init_state(2)
    queries = draw(memory)
    y = memory.retrieve(queries, state)
    assert_same(memory.retrieve(queries[:, 7:], state, before=queries[:, :7]), y[:, 7:])
    assert_same(memory.retrieve(queries[:, 2:], state, before=queries[:, :2]), y[:, 2:])
    assert not torch.allclose(memory.retrieve(queries[:, 7:], state), y[:, 7:])


def test_other_queries_read_what_x_writes(memory_of):
    memory = memory_of()
    x, queries = draw(memory), draw(memory)
    y, state, _ = memory(x, queries=queries)
    own, own_state, _ = memory(x)
    assert not torch.allclose(y, own)
    assert_same_state(state.weights, own_state.weights)
    assert_same(memory(x, queries=x)[0], own)
    # Their own past is what the convolution of queries sees.
    first, state, _ = memory(x[:, :8], queries=queries[:, :8])
    rest = memory(x[:, 8:], state, queries=queries[:, 8:])[0]
    assert_same(torch.cat((first, rest), 1), y)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("options", STREAMED, ids=spelled)
def test_token_that_is_not_finite_is_a_token_left_out_and_counted(options, value, memory_of):
    memory = memory_of(**options)
    x = draw(memory)
    mask = torch.ones(2, LENGTH, dtype=torch.bool, device=x.device)
    for row, token in ((0, 4), (0, 12), (1, 20)):
        x[row, token, 3] = value
        mask[row, token] = False
    y, state, stats = memory(x)
    padded, padded_state, padded_stats = memory(x, mask=mask)
    assert torch.equal(y.isnan().any(-1), ~mask)
    assert torch.equal(y.isnan().all(-1), ~mask)
    assert not padded[~mask].any()
    assert_same(y[mask], padded[mask])
    assert_same_state(state._replace(skipped=()), padded_state._replace(skipped=()))
    for found, none in (
        (state.skipped, padded_state.skipped),
        (stats.skipped, padded_stats.skipped),
    ):
        assert found.tolist() == [[2, 2], [1, 1]]
        assert not none.any()
    assert_same(stats.means()[0], padded_stats.means()[0])


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("granularity", ["token", "chunk", "segment"])
def test_token_that_is_not_finite_spoils_no_gradient(granularity, layers, memory_of):
    memory = memory_of(granularity=granularity, layers=layers)
    x = draw(memory)
    x[0, 4] = torch.nan
    x.requires_grad_()
    y, state, _ = memory(x)
    loss = (
        torch.where(y.isnan(), 0.0, y).square().sum() + memory.retrieve(x[1:], row(state, 1)).sum()
    )
    grads = torch.autograd.grad(loss, [x, *memory.parameters()], materialize_grads=True)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][0, 4].any()


def row(state, index):
    parts = [t[index : index + 1] for t in tree_flatten(state)[0]]
    return torch.utils._pytree.tree_unflatten(parts, tree_flatten(state)[1])


def test_row_of_tokens_that_are_not_finite_leaves_the_others_alone(memory_of):
    memory = memory_of()
    x = draw(memory)
    truth = memory(x)[0]
    x[0] = torch.nan
    y, state, _ = memory(x)
    assert torch.equal(y[1], truth[1])
    fresh = memory.init_state(2)
    for found, start in zip(state.weights, fresh.weights, strict=True):
        assert torch.equal(found[0], start[0])


def test_head_whose_value_is_not_finite_is_left_out_alone(memory_of):
    memory = memory_of(convolution=0)
    x = draw(memory)
    truth = memory(x)[1]
    width = memory.head_dim
    with torch.no_grad():
        # The second head's values pass the largest number where the first feature is not small.
        memory.projections.joint.weight[-width:, 0] = 1e308
    x[:, :, 0] = 0.0
    quiet = memory(x)[1]
    x[0, 5, 0] = 1e3
    y, state, _ = memory(x)
    assert state.skipped.tolist() == [[0, 1], [0, 0]]
    assert y[0, 5].isnan().all()
    assert all(w.isfinite().all() for w in state.weights)
    assert not quiet.skipped.any()
    assert not truth.skipped.any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 3},
        {"granularity": "chunk", "reduction": "mean_all"},
        {"granularity": "segment", "reduction": "mean_all", "max_grad_norm": 0.5},
        {"granularity": "segment", "reduction": "mean_feature", "layers": 1},
    ],
    ids=spelled,
)
def test_padding_on_the_right_changes_nothing(options, memory_of):
    memory = memory_of(**options)
    x = draw(memory)
    length = 12 if memory.rules.granularity == "chunk" else 15
    mask = torch.ones(2, LENGTH, dtype=torch.bool, device=x.device)
    mask[:, length:] = False
    y, state, stats = memory(x, mask=mask)
    truth, true_state, true_stats = memory(x[:, :length])
    assert_same(y[:, :length], truth)
    assert not y[:, length:].any()
    if memory.rules.granularity != "token":
        assert_same_state(state.weights, true_state.weights)
        assert_same_state(state.momentum, true_state.momentum)
    assert_same(stats.means()[1], true_stats.means()[1])


@pytest.mark.parametrize("granularity", ["token", "chunk", "segment"])
def test_call_of_padding_alone_leaves_the_memory(granularity, memory_of):
    memory = memory_of(granularity=granularity)
    state = memory(draw(memory, length=12))[1]
    x = draw(memory, length=12)
    y, after, stats = memory(x, state, mask=torch.zeros(2, 12, dtype=torch.bool, device=x.device))
    for found, truth in zip(
        (*after.weights, *after.momentum), (*state.weights, *state.momentum), strict=True
    ):
        assert_same(found, truth)
    assert not y.any()
    assert stats.means() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("layers", [2, 3])
def test_pooled_step_that_overflows_is_skipped_and_its_tokens_counted(layers, memory_of):
    memory = memory_of(granularity="chunk", layers=layers, convolution=0, key_norm=None)
    x = draw(memory, length=12)
    x[0, :6] *= 1e200
    state = memory(x)[1]
    assert state.skipped.tolist() == [[6, 6], [0, 0]]
    alone = memory(x[:1, 6:])[1]
    for found, truth in zip(
        (*state.weights, *state.momentum), (*alone.weights, *alone.momentum), strict=True
    ):
        assert_same(found[:1], truth)


@pytest.mark.parametrize("granularity", ["token", "chunk", "segment"])
@pytest.mark.parametrize("shape", [(0, 7), (2, 0), (0, 0), (2, 1)])
def test_empty_calls_pass(granularity, shape, memory_of):
    for layers in (2, 3):
        memory = memory_of(granularity=granularity, layers=layers)
        x = draw(memory, *shape, requires_grad=True)
        y, state, stats = memory(x)
        assert y.shape == x.shape
        assert stats.skipped.shape == (shape[0], memory.heads)
        more, _, _ = memory(x, state)
        assert memory.retrieve(x, state).shape == x.shape
        (y.sum() + more.sum()).backward()
        assert x.grad.shape == x.shape


def test_stats_tell_of_the_written_tokens(memory_of):
    memory = memory_of()
    x = draw(memory)
    mask = torch.rand(2, LENGTH, device=x.device) > 0.3
    _, state, stats = memory(x, mask=mask)
    for found, gate in zip(stats.means(), memory.gates(x), strict=True):
        assert_same(found, gate[mask].mean())
    for found, tensors in (
        (state.weight_norm(), state.weights),
        (state.momentum_norm(), state.momentum),
    ):
        assert_same(found, sum(t.flatten(2).square().sum(-1) for t in tensors).sqrt())
    assert not any(t.requires_grad for t in stats)


def test_state_of_another_batch_or_memory_is_refused(memory_of):
    memory = memory_of()
    x = draw(memory)
    wrong = {
        r"state.weights\[0\] must be \(2, 2, 7, 5\), got \(3, 2, 7, 5\)": memory.init_state(3),
        r"state.weights\[0\] must be \(2, 2, 7, 5\), got \(2, 2, 8, 5\)": memory_of(
            hidden=8
        ).init_state(2),
        "state.weights must be 4 tensors, got 6": memory_of(layers=3).init_state(2),
        r"state.convolution must be \(2, 3, 30\), got \(2, 0, 30\)": memory_of(
            convolution=0
        ).init_state(2),
        "state.tail must be fewer than 6 tokens.*got 21": memory_of(chunk=64)(x)[1],
    }
    for message, state in wrong.items():
        for call in (lambda s=state: memory(x, s), lambda s=state: memory.retrieve(x, s)):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(TypeError, match="state must be a MemoryState, got tuple"):
        memory(x, tuple(memory.init_state(2)))
    with pytest.raises(ValueError, match=r"rows must have shape \(2,\), got \(3,\)"):
        memory.reset(memory.init_state(2), torch.zeros(3, dtype=torch.bool, device=x.device))
    with pytest.raises(TypeError, match=r"rows must be a bool tensor, got torch.int64"):
        memory.reset(memory.init_state(2), torch.zeros(2, dtype=torch.int64, device=x.device))


@pytest.mark.parametrize("layers", [2, 3])
def test_tokens_of_a_chunk_one_by_one_share_kernels(layers, device, monkeypatch):
    """Each number of tokens would take seconds to compile."""
    module = launch if layers == 2 else launch_deep
    made, chunks = module.problem_of, set()

    def recorded(*arguments):
        problem = made(*arguments)
        chunks.add(problem.chunk)
        return problem

    monkeypatch.setattr(module, "problem_of", recorded)
    torch.manual_seed(0)
    memory = NeuralMemory(8, heads=1, hidden=6, layers=layers, chunk=32, backend="triton")
    memory, state = memory.to(device), None
    with torch.no_grad():
        for _ in range(33):
            _, state, _ = memory(torch.randn(1, 1, 8, device=device), state)
    assert chunks == {min(32, max(FEWEST_ROWS, tokens)) for tokens in (1, 32)}
