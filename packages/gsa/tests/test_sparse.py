"""sparse_attention: sizes, groups of heads, selections of every kind, with all gradients."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fusewright.gsa import sparse_attention, sparse_attention_with_lse
from fusewright.gsa.sparse.launch_inverse import inverse_of
from fusewright_testkit import Yardstick

from .operations import drawn, named_several_times

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# The kernels' paths; the reference has none.
each_path = pytest.mark.parametrize("path", ["queries", "tiles"])
each_way = pytest.mark.parametrize(
    ("backend", "path"), [("reference", "auto"), ("triton", "queries"), ("triton", "tiles")]
)


@each_path
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 5, 21, 4, 20), (1, 3, 40, 2, 64)])
def test_values_and_gradients_are_as_near_to_fp64_as_torch(sparse, shape, path, device):
    sparse.check(sparse.draw(shape, F32, device), path=path)


@each_path
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_is_as_near_to_fp64_as_torch(sparse, dtype, path, device):
    sparse.check(sparse.draw((1, 7, 19, 4, 20), dtype, device), path=path)


@pytest.mark.sampled
@each_path
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1), (6, 1)])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])
def test_heads_share_keys_and_selections(sparse, heads, key_heads, per_head, path, device):
    """By tiles four heads are stacked four at a time, six two at a time, heads with keys of their
    own not at all.
    """
    op = dataclasses.replace(sparse, key_heads=key_heads)
    tensors = op.draw((1, 6, 9, heads, 8), F32, device)
    leading = (1, heads, 6) if per_head else (1, 6)
    indices = drawn((*leading, 4), 9, device, torch.int64)
    count = torch.randint(0, 5, leading, device=device)
    op.check(tensors, indices=indices, count=count, path=path)


@pytest.mark.sampled
@each_way
@pytest.mark.parametrize("tokens", [1, 7, 18])
def test_selection_of_all_keys_is_dense_attention(sparse, tokens, backend, path, device):
    slot = torch.arange(tokens, device=device, dtype=torch.int32)
    indices = torch.where(slot <= slot[:, None], slot, -1).expand(1, -1, -1)

    def dense(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    options = dict(scale=None, backend=backend, path=path)
    Yardstick(dense, sparse.draw((1, tokens, tokens, 2, 16), F32, device)).check(
        lambda *tensors: sparse.public(*tensors, indices, None, **options)[0]
    )


@each_way
def test_queries_without_keys_are_zero(sparse, backend, path, device):
    leaves = [x.requires_grad_() for x in sparse.draw((1, 20, 9, 2, 8), F32, device)]
    indices = drawn((1, 20, 5), 9, device)
    indices[0, 1] = -1
    indices[0, 2] = 9
    count = torch.full((1, 20), 5, device=device)
    # A whole tile of queries without keys, and one key that no query has selected.
    count[0, 3] = 0
    count[0, 16:] = 0
    indices[indices == 4] = -1
    o, lse = sparse.public(*leaves, indices, count, backend=backend, path=path)
    without = [1, 2, 3, *range(16, 20)]
    assert not o[0, without].any()
    assert (lse[0, :, without] == -math.inf).all()
    assert lse[0, :, 0].isfinite().all()
    loss = (o * torch.randn_like(o)).sum() + lse[0, :, 0].sum()
    dq, dk, dv = torch.autograd.grad(loss, leaves)
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    assert not dq[0, without].any()
    assert not dk[0, 4].any()
    assert not dv[0, 4].any()


@each_path
@pytest.mark.parametrize("times", [1, 2])
def test_infinite_scores_do_what_is_written(sparse, path, times, backend, device):
    """-inf weighs nothing, nothing else is no key; inf and NaN make their query NaN, none other."""
    q = torch.full((1, 5, 1, 8), 1e20, device=device)
    k, v = (torch.rand(1, 6, 1, 8, device=device) / 1e20 for _ in "kv")
    k[0, 1:3], k[0, 3], q[0, 4] = -1e20, 1e20, math.nan
    indices = torch.tensor([[[0, 1], [1, 2], [0, 3], [0, 5], [0, 5]]], device=device)
    indices = indices.repeat(1, 1, times)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = sparse.public(*leaves, indices, None, path=path, backend=backend)
    assert torch.equal(o[0, 0], v[0, 0])
    assert not o[0, 1].any()
    assert lse[0, 0, 1] == -math.inf
    assert o[0, [2, 4]].isnan().all()
    assert lse[0, 0, [2, 4]].isnan().all()
    assert o[0, 3].isfinite().all()
    assert not torch.autograd.grad(o[0, [0, 1, 3]].sum(), q)[0][0, 1].any()


@each_path
def test_slots_that_hold_no_key_read_nothing(sparse, path, device):
    kernels = partial(sparse.kernels, path=path)
    q, k, v = sparse.draw((1, 3, 9, 2, 8), F32, device)
    indices = torch.tensor([[[1, -5, 4, 2**31 - 1, 7, 9]] * 3], device=device, dtype=torch.int32)
    plain = torch.tensor([[[1, 4, 7]] * 3], device=device, dtype=torch.int32)
    Yardstick(lambda *tensors: sparse.reference(*tensors, plain, None), [q, k, v]).check(
        lambda *tensors: kernels(*tensors, indices, None)
    )
    found = kernels(q, k, v, indices)[0]
    for x in (k, v):
        x[:, [0, 2, 3, 5, 6, 8]] = math.nan
    assert torch.equal(kernels(q, k, v, indices)[0], found)


def test_mask_and_count_leave_out_the_same_slots(sparse, backend, device):
    tensors = sparse.draw((2, 5, 9, 2, 8), F32, device)
    indices = drawn((2, 5, 6), 9, device)
    count = torch.randint(0, 7, (2, 5), device=device)
    mask = torch.arange(6, device=device) < count[..., None]
    expected = sparse.public(*tensors, indices, count, backend=backend)
    for each in (mask, mask.float()):
        found = sparse.public(*tensors, indices, None, mask=each, backend=backend)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_order_of_the_slots_does_not_matter(sparse, backend, device):
    tensors = sparse.draw((1, 5, 20, 2, 8), F32, device)
    indices = drawn((1, 5, 18), 20, device)
    Yardstick(lambda *tensors: sparse.reference(*tensors, indices, None), tensors).check(
        lambda *tensors: sparse.public(*tensors, indices.flip(-1), None, backend=backend)
    )


@pytest.mark.sampled
@each_path
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])
@pytest.mark.parametrize("counted", [False, True], ids=["all-slots", "counted"])
@pytest.mark.parametrize(("queries", "keys", "key_heads"), [(12, 9, 2), (17, 70, 1), (3, 1, 4)])
def test_key_counts_as_often_as_it_is_named(
    sparse, queries, keys, key_heads, per_head, counted, path, device
):
    op = dataclasses.replace(sparse, key_heads=key_heads)
    tensors = op.draw((2, queries, keys, 4, 8), F32, device)
    leading = (2, 4, queries) if per_head else (2, queries)
    indices = named_several_times(leading, 12, keys, device)
    count = torch.randint(0, 13, leading, device=device) if counted else None
    op.check(tensors, indices=indices, count=count, path=path)


@each_path
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_key_counts_as_often_as_it_is_named_in_low_precision(sparse, dtype, path, device):
    tensors = sparse.draw((1, 20, 9, 4, 8), dtype, device)
    sparse.check(tensors, indices=named_several_times((1, 20), 12, 9, device), path=path)


@each_way
def test_key_that_is_named_twice_is_two_keys(sparse, backend, path, device):
    """As if each slot had a copy of the keys and values of its own."""
    tensors = sparse.draw((1, 20, 9, 2, 8), F32, device)
    indices = named_several_times((1, 20), 6, 9, device)
    holds = (indices >= 0) & (indices < 9)
    apart = torch.where(holds, indices + 9 * torch.arange(6, device=device), -1)

    def of_copies(q, k, v):
        return sparse.reference(q, torch.cat([k] * 6, 1), torch.cat([v] * 6, 1), apart, None)

    Yardstick(of_copies, tensors).check(
        lambda *tensors: sparse.public(*tensors, indices, None, backend=backend, path=path)
    )


def test_many_queries_of_one_key_are_added_in_parts(sparse, device):
    """Every query selects key 0, so that its list has many segments."""
    tensors = sparse.draw((1, 8, 5, 2, 8), F32, device)
    indices = 1 + drawn((1, 8, 3), 4, device)
    indices[..., 0] = 0
    sparse.check(tensors, indices=indices, count=None)


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 5), (1, 0, 4, 2, 5), (1, 3, 0, 2, 5)])
def test_nothing_to_attend_to_is_zero(sparse, shape, backend, device):
    leaves = [x.requires_grad_() for x in sparse.draw(shape, F32, device)]
    indices = torch.zeros(*shape[:2], 2, dtype=torch.int32, device=device)
    o, lse = sparse.public(*leaves, indices, None, backend=backend)
    assert o.shape == leaves[0].shape
    assert not o.any()
    assert lse.shape == (shape[0], shape[3], shape[1])
    grads = torch.autograd.grad(o.sum(), leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    assert not any(g.any() for g in grads)


def test_no_slots_are_no_keys(sparse, backend, device):
    tensors = sparse.draw((1, 3, 4, 2, 5), F32, device)
    indices = torch.zeros(1, 3, 0, dtype=torch.int32, device=device)
    assert not sparse.public(*tensors, indices, None, backend=backend)[0].any()


def test_any_strides_are_read_as_they_are(sparse, device):
    q = torch.randn(2, 4, 5, 8, device=device).transpose(1, 2)
    k = torch.randn(2, 18, 2, 8, device=device)[:, ::2]
    v = torch.randn(2, 2, 8, 9, device=device).permute(0, 3, 1, 2)
    indices = drawn((5, 2, 4), 9, device).transpose(0, 1)
    count = torch.randint(0, 5, (5, 2), device=device).T
    sparse.check([q, k, v], indices=indices, count=count)
    every_head = indices[:, None].expand(-1, 4, -1, -1)
    Yardstick(lambda *tensors: sparse.reference(*tensors, indices, count), [q, k, v]).check(
        lambda *tensors: sparse.kernels(*tensors, every_head, count[:, None].expand(-1, 4, -1))
    )


def test_lse_alone_has_gradients(sparse, device):
    tensors = sparse.draw((1, 4, 6, 2, 8), F32, device)
    indices = drawn((1, 4, 3), 6, device)
    grads = [None, torch.randn(1, 2, 4, device=device)]
    Yardstick(lambda *tensors: sparse.reference(*tensors, indices, None), tensors, grads).check(
        lambda *tensors: sparse.kernels(*tensors, indices, None)
    )


def test_both_functions_return_the_same(device):
    q, k, v = (torch.randn(1, 4, 2, 8, device=device) for _ in "qkv")
    indices = drawn((1, 4, 3), 4, device)
    o = sparse_attention(q, k, v, indices, backend="triton")
    assert torch.equal(o, sparse_attention_with_lse(q, k, v, indices, backend="triton")[0])


@pytest.mark.parametrize("length", [1, 3, 100])
def test_inverse_lists_the_queries_of_every_key_in_their_order(length, device):
    indices = drawn((2, 9, 4), 6, device)
    indices[0, 3] = -1
    indices[..., 0] = 2
    count = torch.randint(1, 5, (2, 9), device=device)
    inverse = inverse_of(indices, count, 6, length)
    for selection in range(2):
        lists = {key: [] for key in range(6)}
        parts = {key: [] for key in range(6)}
        segments = (x[selection].tolist() for x in inverse[1:5])
        for key, first, last, part in zip(*segments, strict=True):
            if key < 6:
                assert last - first <= length
                lists[key] += inverse.queries[selection, first:last].tolist()
                parts[key] += [part]
        for key in range(6):
            expected = [
                query
                for query in range(9)
                for slot in range(count[selection, query])
                if indices[selection, query, slot] == key
            ]
            assert lists[key] == expected
            first, last = inverse.parts[selection, key : key + 2].tolist()
            several = len(parts[key]) > 1
            assert parts[key] == ([*range(first, last)] if several else [-1])
            assert several or first == last
        assert inverse.parts[selection, -1] <= inverse.most_parts
