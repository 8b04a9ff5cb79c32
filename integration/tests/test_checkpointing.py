"""Blocks that are computed again in the backward pass: the same bits, less kept, and no attention
twice where it is kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from fusewright_models.choices import CHECKPOINTINGS
from fusewright_models.models.checkpointing import KEPT
from fusewright_models.models.hybrid import HYBRID, HybridLM
from torch.utils._python_dispatch import TorchDispatchMode

TINY = HYBRID["tiny"]
every_kind = pytest.mark.parametrize("checkpointing", CHECKPOINTINGS[1:])


class Calls(TorchDispatchMode):
    """How often each op is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func.name()] += 1
        return func(*args, **(kwargs or {}))


def with_gradients(loss, model):
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def kept_numbers(model, *arguments) -> int:
    """What autograd keeps of a loss, the insides of blocks that are computed again left out."""
    kept: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.numel()), x)[1], lambda x: x
    )
    with hooks:
        model.loss(*arguments)
    return sum(kept)


@pytest.mark.sampled
@every_kind
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_transformer_np_has_the_same_gradients(small, rows, norm, backend, checkpointing):
    batch, lengths = rows(2, 5, 4), torch.tensor([5, 3])
    model = small(norm=norm, backend=backend, width=16, heads=2)
    again = small(norm=norm, backend=backend, width=16, heads=2, checkpointing=checkpointing)
    again.load_state_dict(model.state_dict())
    found = [with_gradients(each.loss(*batch, lengths), each) for each in (model, again)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("checkpointing", "times"), [("none", 1), ("block", 2), ("keep-attention", 1)]
)
def test_kept_attention_is_computed_once(small, rows, checkpointing, times):
    model = small(backend="triton", width=16, heads=2, checkpointing=checkpointing)
    with Calls() as calls:
        model.loss(*rows(2, 5, 4)).backward()
    name = "fusewright_attention::rectangular_attention"
    assert calls.counted[name] == times * model.config.layers
    assert calls.counted[f"{name}_backward"] == model.config.layers


def test_block_checkpointing_keeps_less(small, rows):
    batch = rows(4, 16, 16)
    kept = [kept_numbers(small(checkpointing=each), *batch) for each in ("none", "block")]
    assert kept[1] < kept[0] / 2


@pytest.mark.sampled
@every_kind
def test_compiled_loss_has_the_same_gradients_but_for_rounding(
    small, rows, assert_same_but_for_rounding, checkpointing
):
    batch, model = rows(2, 5, 4), small(checkpointing=checkpointing, dtype=torch.float64)
    batch = tuple(x.double() for x in batch)
    expected = with_gradients(model.loss(*batch), model)
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: model.loss(*given), backend="aot_eager", dynamic=False)
    assert_same_but_for_rounding(with_gradients(compiled(*batch), model), expected)


def test_without_gradients_nothing_is_kept_for_later(small, rows):
    batch = rows(2, 5, 4)
    model = small(checkpointing="keep-attention")
    with torch.no_grad():
        expected = model.loss(*batch)
    assert torch.equal(model.loss(*batch), expected)


def hybrid(backend="reference", **options):
    torch.manual_seed(0)
    return HybridLM(replace(TINY, mode="plain", **options), backend=backend)


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(2))


@every_kind
@pytest.mark.parametrize("dense", [False, True])
def test_hybrid_has_the_same_gradients_and_chooses_once(tokens, checkpointing, dense):
    found, told = [], []
    for each in ("none", checkpointing):
        model, chosen = hybrid(checkpointing=each), []
        losses = model.losses(
            tokens, dense=dense, observe=lambda *of, chosen=chosen: chosen.append(of[0])
        )
        found.append([*with_gradients(losses.total, model), losses.selected, *model.buffers()])
        told.append(len(chosen))
    assert all(map(torch.equal, *found))
    assert told[0] == told[1] == 2


@pytest.mark.parametrize(
    ("checkpointing", "times"),
    [
        pytest.param("none", 1, marks=pytest.mark.slow),
        pytest.param("block", 2, marks=pytest.mark.slow),
        ("keep-attention", 1),
    ],
)
def test_what_mixes_tokens_of_hybrid_is_computed_once_where_it_is_kept(checkpointing, times):
    """One layer of each kind, and the one of the token after next."""
    sizes = dict(dim=32, delta_heads=1, sparse_heads=1, streams=1)
    model = hybrid("triton", checkpointing=checkpointing, **sizes)
    with Calls() as calls:
        model.loss(torch.arange(5).view(1, 5)).backward()
    ours = {name: calls.counted[name] for name in KEPT if name.startswith("fusewright_")}
    layers = TINY.layers
    assert ours == {
        "fusewright_attention::rectangular_attention": 0,
        "fusewright_deltanet::gated_delta_rule": times * (layers - layers // 4),
        "fusewright_gsa::sparse_attention": times * (layers // 4 + 1),
        "fusewright_gsa::indexer_kl_loss": times * (layers // 4 + 1),
    }
    assert calls.counted["fusewright_gsa::indexer_topk"] == layers // 4 + 1


def test_second_backward_pass_has_the_gradients_of_the_first(tokens):
    model = hybrid(checkpointing="block")
    loss = model.loss(tokens)
    once, twice = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_checkpointing_of_a_stack_that_recomputes_is_refused(mode):
    with pytest.raises(ValueError, match=rf"checkpointing is for mode 'plain'; .* mode '{mode}'"):
        replace(TINY, mode=mode, checkpointing="block")


@pytest.mark.gpu
@every_kind
def test_captured_steps_of_the_kernels_in_bf16_have_the_bits_of_eager_ones(
    small, rows, checkpointing
):
    """Replayed, with blocks computed again, against eager steps that keep everything."""
    batch = tuple(x.cuda() for x in rows(4, 300, 40))
    made = [
        small(backend="triton", width=128, heads=2, checkpointing=x)
        for x in ("none", checkpointing)
    ]
    made[1].load_state_dict(made[0].state_dict())

    def step(model):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(*batch)
        loss.backward()
        return loss.detach()

    eager, again = (each.cuda() for each in made)
    expected = step(eager), *(p.grad for p in eager.parameters())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(again)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step(again)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, (loss, *(p.grad for p in again.parameters())), expected))
