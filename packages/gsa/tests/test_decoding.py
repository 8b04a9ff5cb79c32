"""GatedSparseAttention decodes from a cache what its full forward pass gives."""

from __future__ import annotations

import pytest
import torch
from fusewright.gsa import KeyCache
from fusewright.gsa.selection.launch import selection_plan
from fusewright.gsa.sparse.launch import forward_plan
from fusewright_testkit import Yardstick

from .test_module import F64, RELU, assert_same_but_for_rounding, layer, outputs_of, tokens


@pytest.mark.parametrize("options", [dict(window=0), dict(window=1), RELU], ids=str)
@pytest.mark.parametrize("steps", [[1] * 11, [11], [5, 1, 5]], ids=str)
def test_decoding_equals_the_full_forward_pass(steps, options):
    attention = layer(dtype=F64, **options).eval()
    attention.variance_ema.fill_(0.03)
    x = tokens(dtype=F64)
    expected, _ = attention(x)
    cache = attention.new_cache(1, 11)
    found = torch.cat([attention.decode(part, cache) for part in x.split(steps, 1)], 1)
    assert_same_but_for_rounding(found, expected)
    with pytest.raises(ValueError, match="holds 11 tokens, got 12"):
        attention.decode(x[:, :1], cache)


def test_decoding_by_the_kernels_equals_their_full_forward_pass(device):
    attention = layer("triton", device=device).eval()
    attention.variance_ema.fill_(0.03)
    x = tokens(device=device, batches=2)
    _, selection = attention(x)
    cache = attention.new_cache(2, 11)
    found = torch.cat([attention.decode(part, cache) for part in x.split([6, 1, 4], 1)], 1)
    whole = outputs_of(layer("reference", device=device).eval(), selection)
    Yardstick(lambda x: whole(x)[0], [x], [None]).check(lambda x: found)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("options", [dict(window=1), RELU], ids=str)
def test_memory_that_no_token_was_written_to_is_not_seen(options, backend, device):
    attention = layer(backend, device=device, **options).eval()
    attention.variance_ema.fill_(0.03)
    x, found = tokens(device=device, batches=2), []
    for beyond in (0.0, 1e30):
        cache = attention.new_cache(2, 20)
        attention.decode(x[:, :9], cache)
        for memory in (cache.keys, cache.values, cache.index_keys):
            memory[:, 9:] = beyond
        found.append(torch.cat([attention.decode(x[:, t : t + 1], cache) for t in (9, 10)], 1))
    assert torch.equal(*found)


def test_without_kernels_a_token_costs_what_it_sees(monkeypatch):
    """Memory for a long text would take as long as that text at every token."""
    from fusewright.gsa.layer import gated_sparse_attention

    widths = []

    def recorded(q, k, *others, **options):
        widths.append(k.shape[1])
        return select(q, k, *others, **options)

    select = gated_sparse_attention.indexer_topk
    monkeypatch.setattr(gated_sparse_attention, "indexer_topk", recorded)
    attention, x = layer(dtype=F64).eval(), tokens(dtype=F64)
    cache = attention.new_cache(1, 4000)
    for part in x.split([9, 1, 1], 1):
        attention.decode(part, cache)
    assert widths == [9, 10, 11]


def test_tokens_are_decoded_by_the_launches_of_those_before(device):
    """A plan, and a variant of a kernel, for each length would take milliseconds a token."""
    attention, x = layer("triton", device=device).eval(), tokens(device=device)
    cache = attention.new_cache(1, 11)
    attention.decode(x[:, :7], cache)
    plans = selection_plan, forward_plan
    made = []
    for t in range(7, 11):
        attention.decode(x[:, t : t + 1], cache)
        made.append([plan.cache_info().misses for plan in plans])
    assert all(each == made[0] for each in made)


def test_cache_takes_tokens_in_their_order():
    cache = KeyCache(torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 3))
    new = torch.ones(1, 3, 1, 2), 2 * torch.ones(1, 3, 1, 2), 3 * torch.ones(1, 3, 3)
    keys, values, index_keys = cache.extend(*new)
    assert (cache.length, cache.capacity) == (3, 4)
    assert torch.equal(keys, new[0])
    assert torch.equal(values, new[1])
    assert torch.equal(index_keys, new[2])


def test_cache_refuses_other_sequences_and_stays_as_it_is():
    attention = layer().eval()
    cache = attention.new_cache(4, 7)
    for batches in (1, 2):
        with pytest.raises(ValueError, match=rf"takes \(4, 3, 2, 8\), got \({batches}, 3, 2, 8\)"):
            attention.decode(tokens(3, batches=batches), cache)
    assert (cache.length, cache.keys.any()) == (0, False)
