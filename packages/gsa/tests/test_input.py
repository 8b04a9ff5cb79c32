"""What bad input is answered with, before anything is touched, and which backend serves."""

from __future__ import annotations

import pytest
import torch
from fusewright.gsa import gated_indexer, indexer_kl_loss, indexer_topk, sparse_attention
from fusewright_testkit.conformance.input import NothingRuns

F32, BF16 = torch.float32, torch.bfloat16
Q, K, W, B = torch.zeros(1, 3, 2, 4), torch.zeros(1, 5, 4), torch.zeros(1, 3, 2), torch.zeros(2)
X, Y = torch.zeros(1, 3, 4, 8), torch.zeros(1, 5, 2, 8)
S, N = torch.zeros(1, 3, 2, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
LSE = torch.zeros(1, 4, 3)
META = torch.device("meta")


def topk(*tensors, **options):
    counts = dict(k_base=2, k_min=1, k_max=3)
    return indexer_topk(*(tensors or (Q, K, W, B)), **counts | options)


def kl(q=X, k=Y, lse=LSE, *selection, **options):
    return indexer_kl_loss(Q, K, W, B, q, k, lse, *selection, **options)


BAD = [
    (lambda: gated_indexer([1.0], K, W, B), TypeError, "q must be a tensor, got list"),
    (lambda: gated_indexer(Q, K.int(), W, B), TypeError, "k must be.*int32"),
    (lambda: gated_indexer(Q.to_sparse(), K, W, B), TypeError, "strided tensor, got layout"),
    (lambda: gated_indexer(Q[0], K, W, B), ValueError, r"heads, width\], got \(3, 2, 4\)"),
    (lambda: gated_indexer(Q, K[..., :3], W, B), ValueError, r"\(1, 5, 4\).*got \(1, 5, 3\)"),
    (lambda: gated_indexer(Q, K, W[:, :2], B), ValueError, r"w must.*\(1, 3, 2\).*got \(1, 2, 2\)"),
    (lambda: gated_indexer(Q, K, W, B[:1]), ValueError, r"bias must.*\(2,\).*got \(1,\)"),
    (lambda: gated_indexer(Q, K.to(META), W, B), ValueError, "q's device cpu, got meta"),
    (lambda: gated_indexer(Q, K.half(), W, B), ValueError, "q's dtype.*got torch.float16"),
    (lambda: gated_indexer(Q[:, :, :0], K, W, B), ValueError, "at least one head, got 0"),
    (lambda: gated_indexer(Q[..., :0], K, W, B), ValueError, "from 1 to 256, got 0"),
    (lambda: gated_indexer(Q, K, W, B, scale="1"), TypeError, "scale must be a number, got str"),
    (lambda: gated_indexer(Q, K, W, B, scale=0.0), ValueError, "scale must be from.*got 0"),
    (lambda: gated_indexer(Q, K, W, B, q_offset=1.0), TypeError, "whole number, got float"),
    (lambda: gated_indexer(Q, K, W, B, q_offset=-1), ValueError, "at least 0, got -1"),
    (lambda: gated_indexer(Q, K, W, B, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: topk(law="best"), ValueError, '"proportional" or "entropy" or "fixed", got .best'),
    (lambda: topk(k_base=0), ValueError, "k_base must be at least 1, got 0"),
    (lambda: topk(k_base=1.5), TypeError, "k_base must be a whole number, got float"),
    (lambda: topk(k_min=4), ValueError, "k_min must be from 1 to k_max, 3, got 4"),
    (lambda: topk(k_min=0), ValueError, "k_min must be from 1 to k_max, 3, got 0"),
    (lambda: topk(sinks=2), ValueError, "sinks must be from 0 to k_min, 1, got 2"),
    (lambda: topk(k_min=2, sinks=1, window=2), ValueError, "window must be.*sinks, 1, got 2"),
    (lambda: topk(window=-1), ValueError, "window must be from 0 to k_min - sinks, 1, got -1"),
    (lambda: topk(window=1.0), TypeError, "window must be a whole number, got float"),
    (lambda: topk(window=1, causal=False), ValueError, "window must be 0 without causal or.*got 1"),
    (lambda: gated_indexer(Q, K, W, B, cu_seqlens=[0, 5]), TypeError, "cu_seqlens.*got list"),
    (lambda: topk(cu_seqlens=W), TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    (lambda: topk(cu_seqlens=N[0].to_sparse()), TypeError, "cu_seqlens must be a strided tensor"),
    (lambda: topk(cu_seqlens=N[0, :1]), ValueError, r"must be \[N \+ 1\] with N at least 1"),
    (lambda: topk(cu_seqlens=N), ValueError, r"cu_seqlens must be \[N \+ 1\].*\[1, 3\]"),
    (lambda: topk(*(x.repeat(2, *[1] * (x.ndim - 1)) for x in (Q, K, W)), B, cu_seqlens=N[0]),
     ValueError, r"one row, B = 1, got \(2, 3, 2, 4\)"),
    (lambda: topk(cu_seqlens=N[0].to(META)), ValueError, "cu_seqlens must.*got meta"),
    (lambda: topk(key_ranges=[0, 5]), TypeError, "key_ranges must be a tensor, got list"),
    (lambda: topk(key_ranges=W), TypeError, "key_ranges must be int32 or int64, got torch.float32"),
    (lambda: topk(key_ranges=N), ValueError, r"key_ranges.*\(1, 3, 2\), got \(1, 3\)"),
    (lambda: topk(key_ranges=S.to(META)), ValueError, "key_ranges must.*got meta"),
    (lambda: topk(key_ranges=S, cu_seqlens=N[0]), ValueError, "one of cu_seqlens and.*both"),
    (lambda: kl(cu_seqlens=N), ValueError, r"cu_seqlens must be \[N \+ 1\].*\[1, 3\]"),
    (lambda: topk(form="sum"), ValueError, "form must be.*got 'sum'"),
    (lambda: gated_indexer(Q, K, W, B, form=1), ValueError, "form must be.*got 1"),
    (lambda: kl(form="sum"), ValueError, "form must be.*got 'sum'"),
    (lambda: topk(sinks=-1), ValueError, "sinks must be from 0 to k_min, 1, got -1"),
    (lambda: topk(variance_ema=0.5), TypeError, "variance_ema must be a tensor, got float"),
    (lambda: topk(variance_ema=B), ValueError, r"one number in float32, got \(2,\)"),
    (lambda: topk(variance_ema=B[0].double()), ValueError, "one number.*float64"),
    (lambda: topk(variance_ema=B[0].to(META)), ValueError, "device cpu, got meta"),
    (lambda: topk(Q, K, W, B[:1]), ValueError, r"bias must.*got \(1,\)"),
    (lambda: sparse_attention(X, Y, 1.0, S), TypeError, "v must be a tensor, got float"),
    (lambda: sparse_attention(X, Y, Y[0], S), ValueError, r"v must.*got \(5, 2, 8\)"),
    (lambda: sparse_attention(X, Y, Y[:, :4], S), ValueError, r"one Tkv.*v \(1, 4, 2, 8\)"),
    (lambda: sparse_attention(X[:, :, :3], Y, Y, S), ValueError, "multiple.*got 3 and 2"),
    (lambda: sparse_attention(X[..., :0], Y, Y, S), ValueError, "from 1 to 256, got 0"),
    (lambda: sparse_attention(X, Y.half(), Y, S), ValueError, "q's dtype.*got torch.float16"),
    (lambda: sparse_attention(X, Y, Y, S.float()), TypeError, "indices must be int32.*float32"),
    (lambda: sparse_attention(X, Y, Y, [0]), TypeError, "indices must be a tensor, got list"),
    (lambda: sparse_attention(X, Y, Y, S[:, :2]), ValueError, r"indices must be.*\(1, 2, 2\)"),
    (lambda: sparse_attention(X, Y, Y, S[:, None]), ValueError, r"\[1, 4, 3, K\].*\(1, 1, 3, 2\)"),
    (lambda: sparse_attention(X, Y, Y, S.to(META)), ValueError, "indices must.*got meta"),
    (lambda: sparse_attention(X, Y, Y, S, N.float()), TypeError, "count must be int32.*float32"),
    (lambda: sparse_attention(X, Y, Y, S, N[:, :2]), ValueError, r"count.*\(1, 3\).*got \(1, 2\)"),
    (lambda: sparse_attention(X, Y, Y, S, None, N), TypeError, "boolean or floating.*int32"),
    (lambda: sparse_attention(X, Y, Y, S, None, [1]), TypeError, "mask must be a tensor, got list"),
    (lambda: sparse_attention(X, Y, Y, S, mask=W[..., :1]), ValueError, r"mask.*got \(1, 3, 1\)"),
    (lambda: sparse_attention(X, Y, Y, S, path="rows"), ValueError, '"queries", got .rows'),
    (lambda: sparse_attention(X, Y, Y, S, dense_below=-1), ValueError, "at least 0, got -1"),
    (lambda: sparse_attention(X, Y, Y, S, dense_below=2.0), TypeError, "whole number, got float"),
    (lambda: sparse_attention(X, Y[:, :2], Y[:, :2], S, dense_below=9), ValueError,
     "got 3 queries and 2 keys"),
    (lambda: sparse_attention(X.double(), Y.double(), Y.double(), S, backend="triton"),
     RuntimeError, "float64"),
    (lambda: kl(q=X[:, :2]), ValueError, r"tokens of q_index, \(1, 3\), got \(1, 2\)"),
    (lambda: kl(k=Y[:, :2]), ValueError, r"tokens of k_index, \(1, 5\), got \(1, 2\)"),
    (lambda: kl(lse=LSE.mT), ValueError, r"lse must have shape \(1, 4, 3\), got \(1, 3, 4\)"),
    (lambda: kl(lse=LSE.int()), TypeError, "lse must be.*int32"),
    (lambda: kl(X, Y, LSE, S[:, None].expand(1, 4, 3, 2)), ValueError, r"\[batch, tokens, K\]"),
    (lambda: kl(temperature="hot"), TypeError, "temperature must be a number, got str"),
    (lambda: kl(temperature=float("inf")), ValueError, "temperature must be from.*got inf"),
    (lambda: kl(temperature=B), ValueError, r"one number, got shape \(2,\)"),
    (lambda: kl(index_scale=-1.0), ValueError, "scale must be from.*got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_input_touches_no_memory():
    for call in (lambda: topk(Q, K, W, None), lambda: sparse_attention(X, Y, None, S)):
        with NothingRuns(), pytest.raises(TypeError, match="got NoneType"):
            call()


@pytest.mark.filterwarnings("error")
def test_selection_of_meta_tensors_has_a_shape_and_a_dtype():
    found, count, stats = topk(*(t.to(META) for t in (Q, K, W, B)), law="entropy")
    assert (found.shape, found.dtype, count.shape) == ((1, 3, 3), torch.int32, (1, 3))
    assert stats.entropy.shape == stats.variance.shape == (1, 3)
