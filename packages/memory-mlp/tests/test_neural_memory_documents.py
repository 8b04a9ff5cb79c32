"""NeuralMemory over several documents in a row, and over padding: each document is as alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import same_bits
from torch import nn

from .compared import assert_same_but_for_rounding
from .test_neural_memory import as_function, plainly, spelled

F64, F32, F16 = torch.float64, torch.float32, torch.float16
# In chunks of 6: a token, less than a chunk, none, whole chunks; the second row is padded on both
# sides.
BOUNDS = (0, 1, 6, 6, 18, 21), (2, 15, 15, 16, 16, 20)
LENGTH = 22
KINDS = [
    {},
    {"forget": "zero", "residual_norm": False, "read": "before", "max_grad_norm": 0.5},
    {"layers": 3, "convolution": 9},
    {"layers": 1, "chunk": 1, "convolution": 0},
    {"chunk": 2, "outer_grad": "none"},
    {"granularity": "chunk"},
    {"granularity": "chunk", "layers": 3, "reduction": "mean_all"},
]


def draw(memory, rows=2, dtype=None):
    weight = memory.output.weight
    return torch.randn(rows, LENGTH, memory.dim, dtype=dtype or weight.dtype, device=weight.device)


def documents_of(bounds):
    """(row, its tokens) of each document that has any."""
    return [
        (row, slice(first, last))
        for row, own in enumerate(bounds)
        for first, last in itertools.pairwise(own)
        if last > first
    ]


def in_whole_chunks(memory, x, mask):
    """The memory behind a document whose last chunk padding fills."""
    missing = -x.shape[1] % memory.rules.chunk
    x = torch.cat([x, x.new_zeros(1, missing, x.shape[2])], 1)
    mask = torch.cat([mask, mask.new_zeros(1, missing)], 1)
    _, state, _ = memory(x, mask=mask)
    return [*state.weights, *state.momentum]


def gradients(outputs, leaves):
    total = sum((y * (1 + place)).sin().sum() for place, y in enumerate(outputs))
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.sampled
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("options", KINDS, ids=spelled)
def test_documents_are_each_alone(options, padded, memory_of, device):
    """Outputs, every gradient, and the state of the last one; with padding on the left, on the
    right and within.
    """
    memory = memory_of(**options)
    mask = torch.ones(2, LENGTH, dtype=torch.bool, device=device)
    if padded:
        mask[0, [1, 2, 9, 17]] = mask[1, [2, 6, 14, 19]] = False
    cu_seqlens = torch.tensor(BOUNDS, device=device)
    x = draw(memory)
    with torch.no_grad():
        place = torch.arange(LENGTH, device=device)
        outside = (place < cu_seqlens[:, :1]) | (place >= cu_seqlens[:, -1:]) | ~mask
        x[outside] = torch.nan
    leaves = [x.requires_grad_(), *memory.parameters()]
    given = {"mask": mask} if padded else {}
    y, state, stats = memory(x, cu_seqlens=cu_seqlens, **given)
    assert not y[outside].any()

    truth, written = torch.zeros_like(y), torch.zeros_like(stats.written)
    ends, tokens = [[], []], [0, 0]
    for row, part in documents_of(BOUNDS):
        own = mask[row : row + 1, part]
        present = own[0].nonzero().flatten()
        if not len(present):
            continue
        # Padding on the left is left out, and counts on the right until the last token.
        first = int(present[0])
        shown, own = slice(part.start + first, part.stop), own[:, first:]
        alone, _, found = memory(x[row : row + 1, shown], mask=own)
        truth[row, shown], written[row, shown] = alone[0], found.written[0]
        ends[row] = in_whole_chunks(memory, x[row : row + 1, shown], own)
        tokens[row] = int(present[-1]) + 1 - first
    memories = [torch.cat(pair) for pair in zip(*ends, strict=True)]
    found = [y, *state.weights, *state.momentum]
    assert state.tail.length == 0
    assert state.position.tolist() == tokens
    assert torch.equal(stats.written, written)
    assert_same_but_for_rounding(found, [truth, *memories])
    assert_same_but_for_rounding(gradients(found, leaves), gradients([truth, *memories], leaves))


@pytest.mark.parametrize(
    "options", [{}, {"granularity": "chunk"}, {"granularity": "segment"}], ids=spelled
)
def test_padding_on_the_left_changes_nothing(options, memory_of, device):
    memory = memory_of(**options)
    x = draw(memory)
    mask = torch.ones(2, LENGTH, dtype=torch.bool, device=device)
    mask[0, :4] = mask[1, :1] = mask[1, 20:] = False
    with torch.no_grad():
        x[~mask] = torch.nan
    leaves = [x.requires_grad_(), *memory.parameters()]
    y, state, _ = memory(x, mask=mask)
    alone = [memory(x[:1, 4:])[0], memory(x[1:, 1:20])[0]]
    found = [y[:1, 4:], y[1:, 1:20]]
    assert not y[~mask].any()
    assert_same_but_for_rounding(
        [*found, *gradients(found, leaves)], [*alone, *gradients(alone, leaves)]
    )
    assert_same_but_for_rounding([state.convolution[:1]], [memory(x[:1, 4:])[1].convolution])


def test_documents_in_whole_chunks_are_told_by_resets_alone(memory_of, device):
    memory = memory_of()
    x = draw(memory)[:, :18]
    cu_seqlens = torch.tensor([[0, 6, 18], [0, 12, 18]], device=device)
    resets = torch.tensor([[True, True, False], [False, False, True]], device=device)
    found, truth = memory(x, resets=resets), memory(x, cu_seqlens=cu_seqlens)
    assert same_bits([found[0], *found[1].weights], [truth[0], *truth[1].weights])
    one_row = memory(x[:1], cu_seqlens=cu_seqlens[0])
    assert_same_but_for_rounding([one_row[0]], [truth[0][:1]])


@pytest.mark.sampled
@pytest.mark.parametrize("value", [1.0, 1e30, torch.nan], ids=["finite", "outlier", "nan"])
def test_document_that_changes_changes_no_other(value, backend, memory_of, device):
    memory = memory_of(dtype=F32, backend=backend)
    x = draw(memory, rows=1)
    cu_seqlens = torch.tensor(BOUNDS[:1], device=device)
    others = [part for _, part in documents_of(BOUNDS[:1]) if part.start != 6]
    results = []
    for content in (None, value):
        if content is not None:
            x[:, 6:18] = content
        leaf = x.clone().requires_grad_()
        y = memory(leaf, cu_seqlens=cu_seqlens)[0]
        (dx,) = torch.autograd.grad(sum(y[:, part].sin().sum() for part in others), leaf)
        results.append([z[:, part] for z in (y, dx) for part in others])
        assert not dx[:, 6:18].any()
    assert same_bits(*results)


class OfDocuments(nn.Module):
    """Outputs of two documents in a row, the first of which has ``first`` tokens."""

    def __init__(self, memory, first, plain):
        super().__init__()
        self.memory, self.first, self.plain = memory, first, plain

    def forward(self, x):
        if self.plain:
            return torch.cat(
                [plainly(self.memory, part) for part in x.tensor_split([self.first], 1)], 1
            )
        bounds = torch.tensor([0, self.first, x.shape[1]], device=x.device)
        return self.memory(x, cu_seqlens=bounds)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"backend": "triton"}, F32),
        ({"backend": "triton", "layers": 3}, F16),
        ({"granularity": "chunk"}, F16),
    ],
)
def test_documents_are_as_near_to_fp64_as_torch(options, dtype, memory_of, device):
    memory = memory_of(dtype=dtype, **options)
    x = torch.randn(1, 9, memory.dim, device=device).to(dtype)
    yardstick = Yardstick(as_function(OfDocuments(memory, 4, True)), [x, *memory.parameters()])
    yardstick.check(as_function(OfDocuments(memory, 4, False)))


def test_rows_without_tokens_or_documents_have_none(memory_of, device):
    memory = memory_of()
    cu_seqlens = torch.zeros(2, 3, dtype=torch.int32, device=device)
    for tokens in (0, 5):
        y, state, _ = memory(draw(memory)[:, :tokens], cu_seqlens=cu_seqlens)
        assert y.shape == (2, tokens, memory.dim)
        assert not y.any()
        assert same_bits(state.weights, memory.init_state(2).weights)
        assert state.position.tolist() == [0, 0]


def test_last_document_of_padding_alone_leaves_the_state_of_no_token(memory_of, device):
    memory = memory_of()
    resets = torch.tensor([[True, False, True], [True, True, False]], device=device)
    mask = torch.ones(2, 18, dtype=torch.bool, device=device)
    mask[0, 12:] = mask[1, 15:] = False
    _, state, _ = memory(draw(memory)[:, :18], mask=mask, resets=resets)
    assert state.position.tolist() == [0, 9]
    first = memory.init_state(1)
    for found, begun in zip(state.weights, first.weights, strict=True):
        assert torch.equal(found[:1], begun)
    assert not state.convolution[0].any()
    assert state.convolution[1].any()


def test_full_graph_compilation_gives_eager_results(memory_of, device):
    # The graph calls the operation; of the reference it would have every chunk.
    memory = memory_of(backend="triton", dtype=F32)
    x, cu_seqlens = draw(memory), torch.tensor(BOUNDS, device=device)
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    found, truth = compiled(x, cu_seqlens=cu_seqlens), memory(x, cu_seqlens=cu_seqlens)
    assert_same_but_for_rounding([found[0]], [truth[0]])


X = torch.zeros(2, 6, 9)
CU_SEQLENS = torch.zeros(2, 3, dtype=torch.int64)
RESETS = torch.zeros(2, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({}, {"cu_seqlens": CU_SEQLENS[0]}, ValueError, "beside one row or"),
        ({}, {"cu_seqlens": CU_SEQLENS.float()}, TypeError, "cu_seqlens must be int32 or int64"),
        ({}, {"cu_seqlens": CU_SEQLENS, "resets": RESETS}, ValueError, "one of cu_seqlens and"),
        ({}, {"resets": RESETS[:1]}, ValueError, r"resets must be \[B, T / chunk\] = \(2, 1\)"),
        ({}, {"resets": RESETS.int()}, TypeError, "resets must be a bool tensor, got torch.int32"),
        ({"chunk": 4}, {"resets": RESETS}, ValueError, "whole chunks of 4 tokens with resets"),
        (
            {"granularity": "segment"},
            {"cu_seqlens": CU_SEQLENS},
            ValueError,
            'granularity must be "token" or "chunk" with cu_seqlens or resets, got "segment"',
        ),
        (
            {"granularity": "chunk", "scope": "batch_pooled"},
            {"resets": RESETS},
            ValueError,
            'scope must be "sequence" with cu_seqlens or resets, got "batch_pooled"',
        ),
    ],
)
def test_documents_that_do_not_fit_are_refused(options, given, error, message, memory_of):
    memory = memory_of(dtype=F32, device="cpu", **options)
    with pytest.raises(error, match=message):
        memory(X, **given)


def test_documents_beside_a_state_are_refused(memory_of):
    memory = memory_of(dtype=F32, device="cpu")
    with pytest.raises(ValueError, match="state must be None with cu_seqlens or resets"):
        memory(X, memory.init_state(2), cu_seqlens=CU_SEQLENS)
