"""What only a GPU can show: graphs, synchronisation, memory, great sizes, the launch tables."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from fusewright.gsa import GatedSparseAttention, gated_indexer, indexer_topk, sparse_attention
from fusewright.gsa.indexer.reference import keys_seen
from fusewright.gsa.selection import reference
from fusewright.gsa.sparse.launch_backward import LIST_SEGMENT
from fusewright_testkit import Yardstick, capture, no_synchronisation
from fusewright_testkit.conformance import same_bits

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
SHAPE = (2, 130, 200, 4, 64)


def leaves_of(op, shape=SHAPE, dtype=BF16, device="cuda"):
    return [t.requires_grad_() for t in op.draw(shape, dtype, device)]


def selection_of(tensors, **options):
    ema = torch.full((), 0.05, device="cuda")
    counts = dict(k_base=1024, k_min=128, k_max=1024, sinks=4, variance_ema=ema)
    indices, count, stats = indexer_topk(*tensors, **counts | options)
    return indices, count, stats.variance


def test_selection_is_captured_and_reads_the_values_of_the_replay(indexer):
    tensors = indexer.draw((2, 700, 700, 4, 64), BF16, "cuda")
    graph, captured = capture(lambda: selection_of(tensors, k_base=100))
    for x in tensors:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, selection_of(tensors, k_base=100))


def test_no_selection_waits_for_the_gpu(indexer):
    tensors = indexer.draw((2, 700, 700, 4, 64), BF16, "cuda")

    def call():
        for law in ("inverse", "entropy"):
            selection_of(tensors, law=law)

    call()
    with no_synchronisation():
        call()


def test_no_step_of_the_layer_waits_for_the_gpu():
    layer = GatedSparseAttention(128, 4, k_base=64, k_max=128, device="cuda", dtype=BF16)
    x = torch.randn(2, 300, 128, device="cuda", dtype=BF16, requires_grad=True)

    def step():
        y, _, loss = layer.forward_with_loss(x)
        (y.sum() + loss).backward()

    step()
    with no_synchronisation():
        step()


@pytest.mark.parametrize("width", [20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_line_of_the_tables_is_as_near_to_fp64_as_torch(op, width, dtype):
    op.check(op.draw((2, 130, 200, 4, width), dtype, "cuda"))


@pytest.mark.parametrize("law", ["inverse", "proportional", "entropy", "fixed"])
@pytest.mark.parametrize("tokens", [200, 500, 1000, 2000, 4000, 8000, 12_000, 20_000])
def test_rows_of_every_length_select_as_a_stable_sort(indexer, law, tokens):
    tensors = indexer.draw((1, 100, tokens, 4, 64), BF16, "cuda")
    # Rows that differ little, so that scores tie.
    tensors[1][:, ::3] = tensors[1][:, :1]
    ema = torch.full((), 0.05, device="cuda")
    options = dict(k_base=700, k_min=50, k_max=1500, sinks=4, law=law, q_offset=tokens - 100)
    indices, count, stats = indexer_topk(*tensors, variance_ema=ema, scale=0.3, **options)
    scores = gated_indexer(*tensors, scale=0.3, q_offset=tokens - 100)
    seen = keys_seen(*tensors[:2], True, tokens - 100)
    yardstick = Yardstick(
        lambda scores: reference.score_statistics(scores, seen)[0], [scores], [None]
    )
    yardstick.check(lambda _: stats.variance)
    factor = reference.law_factor(law, stats.variance, stats.entropy, ema)
    expected = (700 * factor).floor().clamp(50, 1500).int().clamp(max=seen.sum(-1).int())
    assert torch.equal(count, expected)
    assert torch.equal(indices, reference.greatest(scores, seen, count, 1500, 4, 0))


@pytest.mark.parametrize("law", ["inverse", "fixed"])
def test_parts_of_a_sequence_select_as_the_whole(indexer, law):
    q, k, w, bias = indexer.draw((1, 3000, 3000, 4, 64), BF16, "cuda")
    options = dict(law=law, k_base=300)
    whole = selection_of([q, k, w, bias], **options)
    for first, last in ((0, 1024), (1024, 3000)):
        part = [q[:, first:last], k[:, :last], w[:, first:last], bias]
        found = selection_of(part, q_offset=first, **options)
        assert same_bits(found[:2], [x[:, first:last] for x in whole[:2]])


def memory_beside(call):
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = sum(x.numel() * x.element_size() for x in call())
    return torch.cuda.max_memory_allocated() - before - held


def test_selection_takes_little_memory(indexer):
    tensors = indexer.draw((1, 16384, 16384, 4, 64), BF16, "cuda")
    assert memory_beside(lambda: selection_of(tensors)) <= 200e6


@pytest.mark.slow
@pytest.mark.large
def test_selection_of_131072_tokens_is_right_where_it_is_looked_at(indexer):
    tensors = indexer.draw((1, 131072, 131072, 4, 64), BF16, "cuda")
    indices, count, _ = selection_of(tensors, law="fixed")
    assert count[0, -1] == 1024
    q, k, w, bias = tensors
    for row in (5000, 70_001, 131_071):
        part = (q[:, row : row + 1], k, w[:, row : row + 1], bias)
        places = dict(q_offset=row)
        scores = gated_indexer(*part, **places)
        seen = keys_seen(part[0], k, True, row)
        counts = dict(law="fixed", k_base=1024, k_min=128, k_max=1024, sinks=4)
        expected = reference.select(scores, seen, **counts)
        assert torch.equal(indices[:, row : row + 1], expected[0])


def test_attention_takes_memory_of_its_operands_alone():
    tokens, heads, width, slots = 8192, 8, 64, 256
    q, k, v = (torch.randn(1, tokens, heads, width, device="cuda", dtype=BF16) for _ in "qkv")
    indices = torch.randint(0, tokens, (1, tokens, slots), device="cuda").sort(-1).values.int()
    beside = memory_beside(lambda: (sparse_attention(q, k, v, indices, path="queries"),))
    assert beside <= 2 * heads * tokens * 4


def test_many_queries_of_one_key_are_added_in_parts(sparse):
    tensors = sparse.draw((1, 3 * LIST_SEGMENT // 2, 40, 2, 16), F32, "cuda")
    indices = torch.randint(1, 40, (1, tensors[0].shape[1], 4), device="cuda")
    indices[..., 0] = 0
    sparse.check(tensors, indices=indices, count=None)


@pytest.mark.parametrize("width", [20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_every_line_of_tiles_is_as_near_to_fp64_as_torch(sparse, width, dtype, key_heads):
    op = dataclasses.replace(sparse, key_heads=key_heads)
    op.check(op.draw((2, 300, 333, 4, width), dtype, "cuda"), path="tiles")


def sparse_gradients(sparse, leaves, selection, **options):
    o, lse = sparse.kernels(*leaves, *selection, **options)
    return [o, lse, *torch.autograd.grad(o.float().square().sum() + lse.sum(), leaves)]


@pytest.mark.large
def test_both_paths_are_as_near_to_fp64_as_torch_and_repeat_at_full_size(sparse):
    op = dataclasses.replace(sparse, key_heads=2)
    leaves = leaves_of(op, (1, 3000, 3000, 8, 64))
    key = torch.arange(3000, device="cuda")
    scores = torch.rand(1, 3000, 3000, device="cuda").masked_fill(key > key[:, None], -1.0)
    # Sinks, which all queries select: the list of their tile is cut.
    scores[..., 3:, :4] = 2.0
    found = scores.topk(300)
    selection = torch.where(found.values >= 0, found.indices, -1).int(), None
    chosen = dict(indices=selection[0], count=None)
    yardstick = Yardstick(functools.partial(op.reference, **chosen), leaves)
    for path in ("queries", "tiles"):
        yardstick.check(functools.partial(op.kernels, **chosen, path=path))
        one, other = (sparse_gradients(op, leaves, selection, path=path) for _ in range(2))
        assert same_bits(one, other)


def test_tiles_are_captured_and_never_wait(sparse):
    leaves = leaves_of(sparse)
    selection = sparse.selection(*leaves[:2])

    def call():
        return sparse_gradients(sparse, leaves, selection, path="tiles")

    # Without their graph, whose leaves get their gradients on the stream of this call.
    expected = [value.detach() for value in call()]
    with no_synchronisation():
        call()
    graph, captured = capture(call)
    for value in captured:
        value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, expected)


def test_bits_and_lists_of_tiles_stay_small():
    """Of 65536 tokens, whose bits of all pairs would be 512 MiB."""
    tokens, heads, width, slots = 65536, 4, 64, 64
    q, k, v = (torch.randn(1, tokens, heads, width, device="cuda", dtype=BF16) for _ in "qkv")
    indices = torch.randint(0, tokens // slots, (1, tokens, slots), device="cuda").int()
    # Different keys in every slot.
    indices += tokens // slots * torch.arange(slots, device="cuda", dtype=torch.int32)
    found = []

    def call():
        found[:] = [sparse_attention(q, k, v, indices, path="tiles")]
        return found

    # 128 MiB of bits, and lists of at most the slots of a tile's queries.
    assert memory_beside(call) <= 200e6
    # The reference holds all scores: of some queries.
    rows = torch.arange(0, tokens, 1009, device="cuda")
    some = functools.partial(sparse_attention, indices=indices[:, rows], backend="reference")
    Yardstick(some, [q[:, rows], k, v], [None]).check(lambda *_: found[0][:, rows])
