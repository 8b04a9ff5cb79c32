"""What only a GPU can show of TitanMAC."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models.models.titan_mac import TITAN_MAC, VARIANTS, TitanMAC
from fusewright_models.training import torch_adamw
from fusewright_testkit import no_synchronisation

from .steps import SEEDS, check_final_losses, check_steps, trained

SIZES = {"layers": 2, "vocab_size": 256, "segment": 128}

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(preset: str, backend: str = "auto", seed: int = 1, **changes) -> TitanMAC:
    torch.manual_seed(seed)
    return TitanMAC(replace(TITAN_MAC[preset], **changes), backend=backend).cuda()


def draw(model: TitanMAC, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device="cuda")


def bf16() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def bounds() -> torch.Tensor:
    """Of three documents in each of two rows of 1089 tokens, and padding."""
    return torch.tensor([[0, 130, 900, 1089], [3, 3, 1024, 1050]], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "packed"), [*((x, False) for x in VARIANTS), *((x, True) for x in VARIANTS)]
)
def test_step_waits_for_nothing_and_its_replay_has_the_same_bits(variant, packed):
    """Forward pass, backward pass and AdamW, captured whole; of packed documents too."""
    documents = {"cu_seqlens": bounds(), "room": 2048} if packed else {}
    found = []
    for captured in (False, True):
        model = make("l4", variant=variant, layers=2)
        optimizer = torch_adamw(model, lr=1e-3, weight_decay=0.1)
        for group in optimizer.param_groups:
            group["capturable"] = True
        tokens = draw(model, 2, 1089)

        def step(model=model, optimizer=optimizer, tokens=tokens):
            with bf16():
                loss = model.loss(tokens, **documents)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
            stream.synchronize()
            with no_synchronisation():
                losses = [] if captured else [step().clone() for _ in range(2)]
        stream.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                loss = step()
            for _ in range(2):
                graph.replay()
                losses.append(loss.clone())
        torch.cuda.synchronize()
        found.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    assert found[0][0] != found[0][1]
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@every_variant
def test_checkpointing_changes_no_gradient_of_the_kernels_in_bf16(variant):
    """Blocks are computed again outside the autocast in which they were computed first."""
    found = []
    for checkpointing in (False, True):
        model = make("l4", variant=variant, layers=2, checkpointing=checkpointing)
        with bf16():
            loss = model.loss(draw(model, 2, 1089))
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@every_variant
def test_steps_in_bf16_follow_the_reference(variant):
    models = [make("l4", backend, variant=variant, **SIZES) for backend in ("triton", "reference")]
    batches = [draw(models[0], 2, 301) for _ in range(11)]
    check_steps(
        *models,
        lambda model, step: model.loss(batches[step]),
        (0, 10),
        steps=11,
        dtype=torch.bfloat16,
    )


@pytest.mark.gpu
@every_variant
def test_steps_over_documents_in_bf16_follow_the_reference(variant):
    models = [make("l4", backend, variant=variant, **SIZES) for backend in ("triton", "reference")]
    batches = [draw(models[0], 2, 301) for _ in range(6)]
    cu_seqlens = torch.tensor([[0, 40, 41, 301], [20, 148, 276, 290]], device="cuda")
    check_steps(
        *models,
        lambda model, step: model.loss(batches[step], cu_seqlens=cu_seqlens),
        (0, 5),
        steps=6,
        dtype=torch.bfloat16,
    )


@pytest.mark.gpu
@pytest.mark.slow
@every_variant
def test_trainings_in_bf16_end_where_the_references_end(variant):
    found, tokens = {"triton": [], "reference": []}, None
    for seed in range(SEEDS):
        for backend, losses in found.items():
            model = make("l4", backend, seed=seed, variant=variant, **SIZES)
            tokens = draw(model, 2, 301) if tokens is None else tokens
            losses.append(
                trained(model, lambda model, _, x=tokens: model.loss(x), 60, torch.bfloat16)
            )
    check_final_losses(*found.values())


@pytest.mark.gpu
@pytest.mark.slow
@every_variant
def test_compiled_blocks_are_one_graph_each(variant):
    model = make("l4", variant=variant, layers=2)
    tokens = draw(model, 2, 1025)
    with bf16():
        expected = model.loss(tokens)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)
    with bf16():
        loss = model.loss(tokens)
    loss.backward()
    # One rounding to bf16.
    assert abs(loss - expected) < torch.finfo(torch.bfloat16).eps / 2 * expected
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
