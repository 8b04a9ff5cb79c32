"""indexer_kl_loss: the divergence of both phases, with all gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.gsa import (
    available_backends,
    gated_indexer,
    indexer_kl_loss,
    sparse_attention_with_lse,
)
from fusewright.gsa.indexer import launch as scores_launch
from fusewright.gsa.loss import launch
from fusewright_testkit import Yardstick

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
needs_kernels = pytest.mark.skipif("triton" not in available_backends(), reason="needs the kernels")


def selection(tokens, slots, device):
    """Different keys of the past for each of so many tokens; fewer than ``slots`` of the first."""
    indices = torch.rand(1, tokens, tokens, device=device).argsort(-1)[..., :slots]
    return torch.where(indices <= torch.arange(tokens, device=device)[:, None], indices, -1)


def attention_over(indices, tokens, device):
    q, k = (torch.randn(1, tokens, heads, 8, device=device) for heads in (4, 2))
    _, lse = sparse_attention_with_lse(q, k, k, indices, backend="reference")
    return q, k, lse


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 20, 33, 3, 20)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_loss_and_gradients_are_as_near_to_fp64_as_torch(loss, shape, causal, device):
    loss.check(loss.draw(shape, F32, device), causal=causal)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_is_as_near_to_fp64_as_torch(loss, dtype, device):
    loss.check(loss.draw((1, 20, 33, 2, 8), dtype, device), causal=True, q_offset=13)


@pytest.mark.parametrize("q_offset", [33, 2**31 - 2, 2**63 - 1, 2**63, 2**70])
def test_rows_beyond_all_keys_learn_from_all_of_them(loss, backend, q_offset, device):
    tensors = loss.draw((1, 20, 33, 2, 8), F32, device)
    for x in tensors[:5]:
        x.requires_grad_()

    def of(**options):
        value = loss.public(*tensors, backend=backend, **options)
        return [value, *torch.autograd.grad(value, tensors[:4])]

    assert all(map(torch.equal, of(causal=True, q_offset=q_offset), of(causal=False)))


@pytest.mark.parametrize("temperature", [40.0, -40.0])
def test_peaked_softmax_is_as_near_to_fp64_as_torch(loss, temperature, device):
    """Its differences to the target cancel: an error that all weights of a row share does not."""
    torch.manual_seed(2)
    *tensors, _ = loss.draw((1, 16, 130, 2, 8), F32, device)
    loss.check([*tensors, torch.tensor(temperature, device=device)])


def test_temperature_of_zero_is_an_even_softmax(loss, device):
    *tensors, _ = loss.draw((1, 20, 33, 2, 8), F32, device)
    loss.check([*tensors, torch.tensor(0.0, device=device)], causal=True, q_offset=13)


def test_selected_keys_alone_count(loss, device):
    tensors = loss.draw((1, 20, 20, 2, 8), F32, device)
    indices = selection(20, 6, device)
    indices[0, 5] = -1
    count = torch.randint(1, 7, (1, 20), device=device)
    attention = (*attention_over(indices, 20, device), indices, count)

    def of(backend):
        def call(*tensors):
            wide = (x.to(tensors[0].dtype) for x in attention[:3])
            return loss.public(
                *tensors, attention=(*wide, *attention[3:]), causal=True, backend=backend
            )

        return call

    Yardstick(of("reference"), tensors).check(of("triton"))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_key_counts_as_often_as_it_is_selected(loss, causal, backend, device):
    """In the target, as in the attention whose lse it has, and in the indexer's softmax: the loss
    is a sum over slots.
    """
    indices = torch.randint(-1, 21, (1, 20, 12), device=device)
    indices[0, ::3] = F.pad(selection(20, 5, device), (0, 7), value=-1)[0, ::3]
    indices[0, 7] = 2
    count = torch.randint(1, 13, (1, 20), device=device)
    q, k, lse = attention_over(indices, 20, device)
    counts = (indices >= 0) & (indices < 20) & (torch.arange(12, device=device) < count[..., None])
    if causal:
        counts &= indices <= torch.arange(20, device=device)[:, None]
    named = indices.clamp(0, 19).long()

    def of_slots(*tensors):
        *operands, temperature = tensors
        keys = k.repeat_interleave(2, 2).to(temperature)
        s = torch.einsum("bthd,bshd->bhts", q.to(temperature), keys) * 0.3
        target = (s - lse.to(temperature)[..., None]).exp().sum(1).gather(-1, named)
        target = torch.where(counts, target, 0.0)
        mass = target.sum(-1, keepdim=True)
        target = target / torch.where(mass > 0, mass, 1.0)
        scores = gated_indexer(*operands, scale=0.3, causal=False, backend="reference")
        scores = temperature * scores.gather(-1, named)
        some = counts.any(-1, keepdim=True)
        log_r = scores.masked_fill(some & ~counts, -math.inf).log_softmax(-1)
        log_r = torch.where(counts, log_r, 0.0)
        log_target = torch.where(target > 0, target, 1.0).log()
        return (target * (log_target - log_r)).sum() / 20

    def ours(*tensors):
        attention = (q.to(tensors[0].dtype), k.to(tensors[0].dtype), lse, indices, count)
        return loss.public(*tensors, attention=attention, causal=causal, backend=backend)

    Yardstick(of_slots, loss.draw((1, 20, 20, 2, 8), F32, device)).check(ours)


def test_loss_is_that_of_torch(loss, backend, device):
    slots = torch.arange(9, device=device)
    dense = torch.where(slots <= slots[:, None], slots, -1)[None]
    q, k, lse = attention_over(dense, 9, device)
    unseen = torch.ones(9, 9, device=device).triu(1) > 0

    def torchs(*tensors):
        *operands, temperature = tensors
        keys = k.repeat_interleave(2, 2).to(temperature)
        scores = torch.einsum("bthd,bshd->bhts", q.to(temperature), keys) / math.sqrt(8)
        target = scores.masked_fill(unseen, -math.inf).softmax(-1).mean(1)
        scores = temperature * gated_indexer(*operands, causal=False, backend="reference")
        log_r = scores.masked_fill(unseen, -math.inf).log_softmax(-1)
        return F.kl_div(log_r.masked_fill(unseen, 0.0), target, reduction="sum") / 9

    def ours(*tensors):
        *operands, temperature = tensors
        options = dict(temperature=temperature, backend=backend)
        return indexer_kl_loss(*operands, q, k, lse, **options)

    Yardstick(torchs, loss.draw((1, 9, 9, 2, 5), F32, device)).check(ours)


def test_attention_gets_no_gradient(loss, backend, device):
    leaves = [x.requires_grad_() for x in loss.draw((1, 9, 9, 2, 5), F32, device)]
    attention = [x.detach().requires_grad_() for x in loss.attention(*leaves[:2])]
    found = loss.public(*leaves, attention=tuple(attention), backend=backend)
    grads = torch.autograd.grad(found, [*leaves, *attention], allow_unused=True)
    assert all(g.isfinite().all() and g.any() for g in grads[:5])
    assert grads[5:] == (None, None, None)


def test_rows_without_keys_add_nothing(loss, backend, device):
    leaves = [x.requires_grad_() for x in loss.draw((1, 4, 6, 2, 5), F32, device)]
    indices = torch.full((1, 4, 3), -1, device=device)
    attention = (*loss.attention(*leaves[:2])[:2], torch.full((1, 4, 4), -math.inf, device=device))
    found = loss.public(*leaves, attention=(*attention, indices), backend=backend)
    assert found.item() == 0.0
    assert not any(g.any() for g in torch.autograd.grad(found, leaves))


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 5), (1, 0, 4, 2, 5), (1, 3, 0, 2, 5)])
def test_no_rows_or_no_keys_are_a_loss_of_zero(loss, shape, backend, device):
    assert loss.public(*loss.draw(shape, F32, device), backend=backend).item() == 0.0


@pytest.mark.parametrize("name", ["q_index", "k_index", "w", "bias", "temperature"])
def test_nan_of_the_indexer_is_one_of_the_loss(loss, backend, name, device):
    leaves = loss.draw((1, 9, 9, 2, 5), F32, device)
    place = ("q_index", "k_index", "w", "bias", "temperature").index(name)
    leaves[place][(0, 4) if place < 3 else ...] = math.nan
    leaves = [x.requires_grad_() for x in leaves]
    found = loss.public(*leaves, causal=True, backend=backend)
    assert found.isnan()
    assert all(g.isnan().any() for g in torch.autograd.grad(found, leaves))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_head_without_a_finite_lse_is_left_out_of_its_row(loss, backend, value, device):
    tensors = loss.draw((1, 9, 9, 2, 5), F32, device)
    q, k, lse = loss.attention(*tensors[:2])

    def found(rows, heads, q=q):
        """With the value for all rows' heads but these."""
        odd = torch.full_like(lse, value)
        odd[:, heads, rows] = lse[:, heads, rows]
        leaves = [x.detach().requires_grad_() for x in tensors]
        one = loss.public(*leaves, attention=(q, k, odd), backend=backend)
        return one, torch.autograd.grad(one, leaves)

    rows = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8], device=device)
    everything = slice(None)
    alone, grads = found(rows, everything)
    assert not grads[0][0, 4].any()
    assert all(g.isfinite().all() for g in grads)

    def without_it(*tensors):
        fewer = [x[:, rows] if x.ndim in (3, 4) and i != 1 else x for i, x in enumerate(tensors)]
        attention = (x.to(tensors[0]) for x in (q[:, rows], k, lse[..., rows]))
        return loss.reference(*fewer, attention=tuple(attention)) * 8 / 9

    Yardstick(without_it, tensors, [None]).check(lambda *tensors: alone)

    # Two heads of one head of keys.
    def of_two(*tensors):
        attention = (x.to(tensors[0]) for x in (q[:, :, :2], k[:, :, :1], lse[:, :2]))
        return loss.reference(*tensors, attention=tuple(attention))

    two = found(everything, slice(2))[0]
    Yardstick(of_two, tensors, [None]).check(lambda *tensors: two)


@pytest.mark.parametrize("name", ["w", "bias"])
def test_minus_infinity_closes_its_head(loss, backend, name, device):
    leaves = loss.draw((1, 9, 9, 2, 5), F32, device)
    leaves["qkwb".find(name[0])][..., 1] = -math.inf
    leaves = [x.requires_grad_() for x in leaves]
    found = loss.public(*leaves, backend=backend)

    def of_one_head(q, k, w, bias, temperature):
        operands = q[:, :, :1], k, w[..., :1], bias[:1], temperature
        return loss.reference(*operands, attention=loss.attention(q, k))

    Yardstick(of_one_head, leaves, [None]).check(lambda *tensors: found)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found, leaves))


def largest_allocation(call):
    """Bytes of the largest piece of memory that torch allocates meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@needs_kernels
@pytest.mark.parametrize("phase", ["dense", "selected"])
def test_neither_pass_holds_a_byte_for_each_query_and_key(loss, phase, monkeypatch, device):
    monkeypatch.setattr(launch, "SCORES_AT_A_TIME", 1000)
    if device == "cpu":
        # Larger tiles, of which the interpreter runs fewer.
        line = (scores_launch.SCORES[0]._replace(keys=64),)
        for module, table in (
            *((scores_launch, name) for name in ("SCORES", "SCORES_DQ", "SCORES_DK")),
            (launch, "TARGET"),
        ):
            monkeypatch.setattr(module, table, line)
        monkeypatch.setattr(launch, "DIVERGENCE", launch.DIVERGENCE._replace(block=256))
    tokens = 160 if device == "cpu" else 1024
    leaves = [x.requires_grad_() for x in loss.draw((1, tokens, tokens, 1, 8), F32, device)]
    attention = (
        *loss.attention(*leaves[:2]),
        *([] if phase == "dense" else [selection(tokens, 6, device)]),
    )

    def both_passes(backend):
        def call():
            found = loss.public(*leaves, attention=attention, causal=True, backend=backend)
            torch.autograd.grad(found, leaves)

        return call

    assert largest_allocation(both_passes("triton")) < tokens * tokens
    assert largest_allocation(both_passes("reference")) >= 4 * tokens * tokens


@needs_kernels
def test_rows_that_lie_far_apart_are_copied(loss, monkeypatch, device):
    """Offsets inside a tile are 32-bit numbers."""
    strides = []

    def recorded(q, k, *others):
        strides.extend((q.stride(1), k.stride(1)))
        return write_target(q, k, *others)

    write_target = launch.write_target
    monkeypatch.setattr(launch, "write_target", recorded)
    monkeypatch.setattr(launch, "MAX_ROW_STRIDE", 40)
    tensors = loss.draw((1, 5, 6, 2, 5), F32, device)
    q, k, lse = loss.attention(*tensors[:2])
    far = [torch.cat([x, x], -2)[..., : x.shape[-2], :] for x in (q, k)]
    found = loss.kernels(*tensors, attention=(*far, lse))
    assert torch.equal(found, loss.kernels(*tensors, attention=(q, k, lse)))
    assert max(strides) <= 40


@pytest.mark.parametrize("wide", ["q", "lse", "w"])
def test_loss_is_in_the_precision_of_the_indexer(loss, wide, device):
    tensors = loss.draw((1, 5, 6, 2, 5), F32, device)
    q, k, lse = loss.attention(*tensors[:2])
    if wide == "q":
        q, k = q.double(), k.double()
        with pytest.raises(RuntimeError, match=r"not torch\.float64"):
            loss.kernels(*tensors, attention=(q, k, lse))
    elif wide == "lse":
        lse = lse.double()
    else:
        tensors[2], tensors[3] = tensors[2].double(), tensors[3].double()
    leaves = [x.requires_grad_() for x in tensors]
    found = loss.public(*leaves, attention=(q, k, lse), backend="auto")
    assert found.dtype == F32
    grads = torch.autograd.grad(found, leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]


def test_temperature_may_be_a_number(loss, backend, device):
    *tensors, _ = loss.draw((1, 9, 9, 2, 5), F32, device)
    one = loss.public(*tensors, 2.5, backend=backend)
    assert torch.equal(
        one, loss.public(*tensors, torch.tensor(2.5, device=device), backend=backend)
    )


def test_descent_reaches_the_selection_that_attention_wants(loss, device):
    """The indexer learns: a fixed target, a hundred steps of the reference."""
    torch.manual_seed(1)
    leaves = [x.double().requires_grad_() for x in loss.draw((1, 12, 12, 3, 8), F32)]
    optimizer = torch.optim.Adam(leaves, lr=0.05)
    attention = tuple(x.double() for x in loss.attention(*leaves[:2]))
    history = []
    for _ in range(100):
        found = loss.reference(*leaves, attention=attention)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        history.append(found.item())
    assert history[-1] < 0.3 * history[0]
