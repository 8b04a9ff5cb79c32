"""Models of transformers compute the same when they are patched, and what they leave is told."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from fusewright.feed_forward import silu_mul
from fusewright_models import Patch, patch
from fusewright_models.patching import PARTS, USUAL, forwards
from fusewright_testkit import no_synchronisation
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .causal_models import (
    ATEN,
    BF16,
    F32,
    F64,
    LENGTH,
    ROWS,
    SIZES,
    VOCABULARY,
    Unrounded,
    function_of,
    made,
    transformers,
    yardstick_of,
)
from .steps import check_steps

# What of each family cannot be replaced.
GELU = "gating left: wanted networks gated by SiLU; got gelu_pytorch_tanh"
FAMILIES = {
    "Llama": "",
    "Mistral": "",
    "Qwen2": "",
    "Qwen3": "",
    "Gemma": GELU,
    "Gemma2": f"{GELU}; loss left: wanted logits as they are; got a softcapping of 30.0",
    "Gemma3": GELU,
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def quietly_patched(model, *given, **options) -> Patch:
    """What it leaves is shown elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch(model, *given, **options)


def patched(model, **options):
    """The same model."""
    return quietly_patched(model, **options).model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH))


def check(model, options, **inputs) -> None:
    """Loss or logits, and all gradients of a patched copy, are held to those of the model."""
    ours = patched(copy.deepcopy(model), **options)
    yardstick_of(model, **inputs).check(function_of(ours, **inputs))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@every_family
def test_loss_and_gradients_are_those_of_transformers(family, dtype, backend, tokens):
    tokens[0, 2:4] = 0
    labels = tokens.where(tokens != 0, -100)
    model = made(family, dtype).train()
    check(model, {"backend": backend}, input_ids=tokens, labels=labels)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@every_family
def test_logits_and_their_gradients_are_those_of_transformers(family, dtype, tokens):
    check(made(family, dtype), {"backend": "triton"}, input_ids=tokens)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_loss_and_gradients_under_autocast_are_those_of_transformers(family, tokens):
    """Residuals are in fp32, and what is added to them in bf16."""

    def loss_of(model, step):
        exact = Unrounded() if model.dtype == F64 else nullcontext()
        with exact:
            return model(input_ids=tokens, labels=tokens).loss

    model = made(family).train()
    ours = patched(copy.deepcopy(model), backend="triton")
    check_steps(ours, model, loss_of, (0,), steps=1, dtype=BF16)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone_gives_the_same(part, tokens):
    model = made().train()
    found = patch(copy.deepcopy(model), parts=[part])
    assert list(found.replaced) == [part]
    assert found.left == {}
    check(model, {"parts": [part], "backend": "triton"}, input_ids=tokens, labels=tokens)


def test_attention_of_ours_gives_the_same_without_a_warning(tokens):
    model = made("Qwen3", BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, {"parts": PARTS, "backend": "triton"}, input_ids=tokens)


@pytest.mark.parametrize(
    ("family", "masked", "reason"),
    [("Llama", True, "a mask"), ("Mistral", False, "a mask")],
    ids=["padding", "window"],
)
def test_torchs_attention_takes_what_ours_does_not_and_says_so(family, masked, reason, tokens):
    model = made(family)
    inputs = {"input_ids": tokens}
    if masked:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][0, :3] = 0
    with pytest.warns(UserWarning, match=f"got {reason}, .*: torch's takes its place"):
        check(model, {"parts": PARTS}, **inputs)


def test_scores_that_are_capped_are_left_to_others(tokens):
    with pytest.raises(ValueError, match=r"attention cannot be replaced: .* a softcapping of 50"):
        patch(made("Gemma2"), parts=["attention"])


def bits(model, tokens) -> list[Tensor]:
    """Loss and gradients."""
    loss = model(input_ids=tokens, labels=tokens).loss
    return [loss.detach(), *torch.autograd.grad(loss, model.parameters())]


def assert_same_bits(found, expected) -> None:
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("parts", [USUAL, PARTS], ids=["usual", "attention"])
def test_what_is_undone_is_as_it_was_and_other_models_never_change(parts, tokens):
    model, other, third = (made(dtype=BF16).train() for _ in range(3))
    before = bits(model, tokens)
    first, second = (patch(each, parts=parts) for each in (model, third))
    changed = bits(model, tokens)
    assert not all(map(torch.equal, changed, before))
    assert_same_bits(bits(other, tokens), before)
    first.undo()
    assert_same_bits(bits(model, tokens), before)
    assert_same_bits(bits(third, tokens), changed)
    assert first.replaced == {}
    first.undo()
    second.undo()
    assert_same_bits(bits(third, tokens), before)
    patch(model, parts=parts)
    assert_same_bits(bits(model, tokens), changed)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_patched_by_themselves(again, tokens):
    model = patched(made(dtype=BF16).train())
    expected = bits(model, tokens)
    twin = again(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same_bits(bits(twin, tokens), expected)


@every_family
def test_what_stays_is_told_and_an_error_where_it_was_named(family):
    left = FAMILIES[family]
    model = made(family)
    if not left:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = patch(model)
        assert list(found.replaced) == list(USUAL)
        assert found.replaced["gating"] == SIZES["num_hidden_layers"]
        return
    with pytest.raises(ValueError, match="gating cannot be replaced: wanted networks gated by"):
        patch(model, parts=["norm", "gating"])
    with pytest.warns(UserWarning, match=left):
        found = patch(model)
    assert left in str(found)
    assert {*found.left, *found.replaced} == set(USUAL)
    for part, forward in (("gating", model.model.layers[0].mlp), ("loss", model)):
        assert ("forward" in vars(forward)) == (part in found.replaced)


class Norm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Of another library."""


def test_classes_of_others_are_left_and_told():
    model = made()
    model.model.norm = Norm(SIZES["hidden_size"])
    with pytest.warns(UserWarning, match="norm left: wanted LlamaRMSNorm; got Norm"):
        assert "norm" not in patch(model).replaced


def test_forward_passes_of_others_are_left_and_told(tokens):
    model = made().train()
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: 2 * plain(x)
    expected = bits(model, tokens)
    with pytest.raises(ValueError, match=r"gating cannot be replaced: .*got another of LlamaMLP"):
        patch(model, parts=["gating"])
    with pytest.warns(UserWarning, match=r"gating left: .*got another of LlamaMLP"):
        found = patch(model)
    assert list(found.replaced) == ["norm", "rotary", "loss"]
    found.undo()
    assert_same_bits(bits(model, tokens), expected)


def test_head_whose_forward_pass_another_has_set_computes_logits(tokens):
    model = patched(made().train())
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * plain(x)
    with pytest.warns(UserWarning, match="logits are computed"):
        assert model(input_ids=tokens, labels=tokens).logits is not None


def test_forward_passes_are_bound_again_like_methods(tokens):
    """As accelerate does, around which it puts autocast, and when it takes that off again."""
    model = patched(made(dtype=BF16).train())
    expected = bits(model, tokens)
    ours = [module for module in model.modules() if "forward" in vars(module)]
    assert model in ours
    for module in ours:
        module.forward = MethodType(module.forward.__func__, module)
    assert_same_bits(bits(model, tokens), expected)


def test_head_that_is_not_plain_computes_logits_and_says_so(tokens):
    model = patched(made().train())
    model.lm_head = torch.nn.Linear(SIZES["hidden_size"], VOCABULARY)
    with pytest.warns(UserWarning, match="logits are computed, by a head that is Linear"):
        found = model(input_ids=tokens, labels=tokens)
    assert found.logits.shape == (ROWS, LENGTH, VOCABULARY)


def scheduled() -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: patch(torch.nn.Linear(1, 1)), TypeError, "one of LlamaForCausalLM, .*got Linear"),
        (lambda: patch(made().model), TypeError, "got LlamaModel"),
        (lambda: patch(patched(made())), ValueError, "got one that is patched already"),
        (lambda: patch(made(), parts=["norms"]), ValueError, r"got \('norms',\)"),
        (lambda: patch(made(), parts="norm"), ValueError, "got 'norm'"),
        (
            lambda: patch(made(), torch.optim.SGD([torch.zeros(1)])),
            TypeError,
            "got torch.optim.sgd.SGD",
        ),
        (lambda: patch(made(), scheduled()), ValueError, "the scheduler of patched.optimizer"),
    ],
    ids=["linear", "base", "twice", "part", "word", "optimizer", "scheduler"],
)
def test_what_cannot_be_patched_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_refused_patch_changes_nothing(tokens):
    model = made(dtype=BF16).train()
    before = bits(model, tokens)
    with pytest.raises(TypeError, match=r"got torch\.optim\.sgd\.SGD"):
        patch(model, torch.optim.SGD(model.parameters()))
    assert_same_bits(bits(model, tokens), before)


def test_attention_that_transformers_refuses_changes_nothing(tokens, monkeypatch):
    model = made(dtype=BF16).train()
    before = bits(model, tokens)

    def refused(name):
        raise ValueError(f"no {name}")

    monkeypatch.setattr(model, "set_attn_implementation", refused)
    with pytest.raises(ValueError, match="no fusewright"):
        patch(model, parts=PARTS)
    assert_same_bits(bits(model, tokens), before)


def test_parts_are_read_once():
    assert list(patch(made(), parts=iter(["norm", "loss"])).replaced) == ["norm", "loss"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_optimizer_goes_on_where_torchs_was(kind, tokens, assert_same_but_for_rounding):
    model = made(dtype=F64).train()
    rows = model.model.embed_tokens.weight
    others = [p for p in model.parameters() if p is not rows]
    groups = [
        {"params": [rows], "lr": 0.01},
        {"params": others, "weight_decay": 0.3, "betas": (0.8, 0.9)},
    ]
    optimizer = kind(groups, lr=0.02, eps=1e-6, foreach=False)

    def train(optimizer, steps=2):
        for _ in range(steps):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    train(optimizer)
    start = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected = train(optimizer)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    ours = patch(model, optimizer, parts=[]).optimizer
    assert_same_but_for_rounding(train(ours), expected)
    assert [group["lr"] for group in ours.param_groups] == [0.01, 0.02]


@pytest.mark.parametrize("way", ["shifted", "items", "number", "ignored", "none", "tuple"])
def test_loss_takes_what_that_of_transformers_takes(way, tokens, assert_same_but_for_rounding):
    labels = tokens.clone()
    if way != "ignored":
        labels[0, :5] = -100
    options = {
        "shifted": dict(shift_labels=labels.roll(-1, 1)),
        "items": dict(num_items_in_batch=torch.tensor(23)),
        "number": dict(num_items_in_batch=7),
        "ignored": dict(ignore_index=int(tokens[1, 3])),
        "none": dict(return_dict=None),
        "tuple": dict(return_dict=False),
    }[way]
    model = made(dtype=F64).train()
    with Unrounded():
        expected, found = (
            each(input_ids=tokens, labels=labels, **options)
            for each in (model, patched(copy.deepcopy(model)))
        )
    if way == "tuple":
        # The logits are the second of transformers'.
        assert isinstance(found, tuple)
        assert len(found) == len(expected) - 1
        assert_same_but_for_rounding(found[:1], expected[:1])
    else:
        assert found.logits is None
        assert_same_but_for_rounding([found.loss], [expected.loss])


def test_texts_go_on_as_before(tokens):
    model = made("Qwen3", F64)
    inputs = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    inputs["attention_mask"][0, :4] = 0
    options = dict(max_new_tokens=6, do_sample=False)
    expected = model.generate(**inputs, **options)
    assert torch.equal(patched(model).generate(**inputs, **options), expected)


def test_evaluation_has_logits_and_loss_of_transformers(tokens):
    model = made(dtype=BF16)
    part = patch(model, parts=["loss"])
    found = model(input_ids=tokens, labels=tokens)
    part.undo()
    expected = model(input_ids=tokens, labels=tokens)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default)
        return func(*args, **(kwargs or {}))


def test_gating_that_is_computed_again_is_not_kept_and_costs_no_product(tokens, monkeypatch):
    gatings = []

    def noted(*given, **options):
        y = silu_mul(*given, **options)
        gatings.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(forwards, "silu_mul", noted)
    results, layers = [], SIZES["num_hidden_layers"]
    for recompute in (False, True):
        model = patched(made().train(), recompute=recompute)
        gatings.clear()
        with Products() as products:
            loss = model(input_ids=tokens, labels=tokens).loss
            assert [each.expired() for each in gatings] == [recompute] * layers
            gradients = torch.autograd.grad(loss, model.parameters())
        assert len(gatings) == layers * (1 + recompute)
        results.append((products.count, [loss, *gradients]))
    (kept, expected), (again, found) = results
    assert kept == again > 0
    assert_same_bits(found, expected)


def test_checkpointing_of_transformers_gives_the_same_bits(tokens):
    model = patched(made(dtype=BF16).train())
    expected = bits(model, tokens)
    model.gradient_checkpointing_enable()
    assert_same_bits(bits(model, tokens), expected)


@pytest.fixture
def one_process():
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_model_that_casts_what_it_is_given_keeps_angles_in_fp32(tokens, one_process):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = made().train()
    twin = patched(copy.deepcopy(model))
    for p in twin.parameters():
        p.data = p.data.to(BF16)
    expected = bits(twin, tokens)
    patched(model)
    mesh = dist.init_device_mesh("cpu", (1,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = [loss.detach(), *(p.grad.full_tensor().to(BF16) for p in model.parameters())]
    assert_same_bits(found, expected)


def test_compiled_model_computes_the_same(tokens, assert_same_but_for_rounding):
    model = patched(made(dtype=F64).train())
    expected = bits(model, tokens)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same_but_for_rounding(bits(model, tokens), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [USUAL, PARTS], ids=["usual", "attention"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_kernels_give_loss_and_gradients_of_transformers(family, parts, tokens):
    model = made(family, BF16, hidden_size=64, intermediate_size=96, head_dim=16).train().cuda()
    parts = [part for part in parts if part not in quietly_patched(made(family)).left]
    check(
        model, {"parts": parts, "backend": "triton"}, input_ids=tokens.cuda(), labels=tokens.cuda()
    )


@pytest.mark.gpu
def test_step_waits_for_nothing(tokens):
    model = made("Llama", BF16, hidden_size=64).train().cuda()
    optimizer = patch(model, torch.optim.AdamW(model.parameters()), parts=PARTS).optimizer
    tokens = tokens.cuda()

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with no_synchronisation():
        step()
