"""What only a card can show of TitanMAC."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.titan_mac_config import VARIANTS
from fusewright_models.training import torch_adamw
from fusewright_testkit import no_synchronisation
from fusewright_testkit.yardstick import Allowance, RoundedProducts, assert_within

STEPS = 20

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(preset: str, backend: str = "auto", **changes) -> TitanMAC:
    torch.manual_seed(1)
    return TitanMAC(replace(TITAN_MAC[preset], **changes), backend=backend).cuda()


def draw(model: TitanMAC, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device="cuda")


def bf16() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@every_variant
def test_step_waits_for_nothing_and_its_replay_has_the_same_bits(variant):
    """Forward pass, backward pass and AdamW, captured whole."""
    found = []
    for captured in (False, True):
        model = make("l4", variant=variant, layers=2)
        optimizer = torch_adamw(model, lr=1e-3, weight_decay=0.1)
        for group in optimizer.param_groups:
            group["capturable"] = True
        tokens = draw(model, 2, 1089)

        def step(model=model, optimizer=optimizer, tokens=tokens):
            with bf16():
                loss = model.loss(tokens)
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
def test_losses_in_bf16_follow_the_reference(variant):
    """The truth is the reference trained in fp64, the allowance the same in bf16, as in
    test_parity.
    """
    sizes = {"variant": variant, "layers": 2, "vocab_size": 256, "segment": 128}
    models = {backend: make("l4", backend, **sizes) for backend in ("triton", "reference")}
    start = {name: value.clone() for name, value in models["reference"].state_dict().items()}
    batches = [draw(models["triton"], 2, 301) for _ in range(STEPS)]

    def trained(backend: str, *, wide: bool = False) -> torch.Tensor:
        model = models[backend]
        model.load_state_dict(start)
        model = model.double() if wide else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for tokens in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=not wide):
                loss = model.loss(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    found, eager = trained("triton"), trained("reference")
    with RoundedProducts(torch.bfloat16):
        rounded = trained("reference")
    truth = trained("reference", wide=True)
    assert_within(found, truth, Allowance.of(truth, eager, rounded), "losses")
    assert truth[0] != truth[-1]


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
