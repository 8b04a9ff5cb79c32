from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.bench import plain
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from .properties import assert_every_parameter_learns


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "unpruned"])
@pytest.mark.parametrize(
    ("context", "targets"), [(5, 7), (1, 3), (4, 1)], ids=["M5-N7", "M1-N3", "M4-N1"]
)
def test_model_equals_plain_model(
    small, rows, assert_same_but_for_rounding, norm, context, targets, pruned
):
    model = small(norm=norm, dtype=torch.float64)
    *inputs, y_target = rows(2, context, targets, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    wanted = [*leaves, *model.parameters()]

    results = []
    params = model(*leaves)
    loss = model.loss(*leaves, y_target)
    results.append((params, torch.autograd.grad(loss, wanted)))
    params = plain.forward(model, *leaves, pruned=pruned)
    loss = -plain.log_likelihood(params, y_target, "log_sigma").mean()
    results.append((params, torch.autograd.grad(loss, wanted)))

    (params, gradients), (plain_params, plain_gradients) = results
    assert_same_but_for_rounding([params], [plain_params])
    assert_same_but_for_rounding(gradients, plain_gradients)


@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_model_of_two_outputs_and_an_indicator_equals_plain_model(
    small, rows, assert_same_but_for_rounding, scale
):
    model = small(scale=scale, y_width=2, indicator=True, dtype=torch.float64)
    *inputs, y_target = rows(2, 5, 7, dtype=torch.float64, y_width=2)
    params = plain.forward(model, *inputs, pruned=False)
    assert_same_but_for_rounding([model(*inputs)], [params])
    log_p = plain.log_likelihood(params, y_target, scale)
    assert_same_but_for_rounding([model.log_likelihood(*inputs, y_target)], [log_p])


@pytest.mark.parametrize("x_width", [1, 3])
def test_model_with_waves_of_its_inputs_equals_plain_model(
    small, rows, assert_same_but_for_rounding, x_width
):
    model = small(x_width=x_width, frequencies=4, indicator=True, dtype=torch.float64)
    *inputs, _ = rows(2, 5, 7, dtype=torch.float64, x_width=x_width)
    params = plain.forward(model, *inputs, pruned=False)
    assert_same_but_for_rounding([model(*inputs)], [params])


def test_waves_are_taken_in_fp32_and_are_no_part_of_a_state(small, rows):
    model = small(frequencies=4)
    x, *_ = rows(2, 5, 7)
    found = model.embedder.waves(x.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, model.embedder.waves(x.bfloat16().float()))
    assert not any("cycles" in name for name in model.state_dict())


def test_parameter_count_is_that_of_the_specified_model():
    with torch.device("meta"):
        model = TransformerNP(TransformerNPConfig(x_width=10))
    assert model.parameter_count() == 36_666_358
    assert sum(parameter.numel() for parameter in model.parameters()) == 36_858_176


def assert_zero_padding(model: TransformerNP) -> None:
    assert len(model.padding()) == 2 * model.config.layers + 2
    for unused in model.padding():
        assert unused.numel() > 0
        assert unused.detach().contiguous().view(torch.int32).count_nonzero() == 0


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_is_bitwise_zero_after_100_decayed_steps(small, rows, norm):
    model = small(norm=norm)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    x_context, y_context, x_target, y_target = rows(2, 5, 6)
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(x_context, y_context, x_target, y_target).backward()
        optimizer.step()
    assert_zero_padding(model)
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_of_another_width_stored_alike_is_refused(small, assign):
    model, other = small(feed_forward_width=21), small(feed_forward_width=32)
    state = other.state_dict()
    before = copy.deepcopy(state)
    with pytest.raises(RuntimeError) as told:
        model.load_state_dict(state, assign=assign)
    for block in range(model.config.layers):
        for name in ("hidden", "output"):
            name = f"blocks.{block}.feed_forward.{name}.weight"
            assert f"size mismatch for {name}: " in str(told.value)
    assert all(torch.equal(x, before[name]) for name, x in state.items())


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_is_saved_without_padding_and_loads_with_it_too(small, assign):
    model = small(feed_forward_width=21)
    state = model.state_dict()
    assert sum(x.numel() for x in state.values()) == model.parameter_count()
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    for saved in (state, stored):
        other = small(feed_forward_width=21)
        other.load_state_dict(saved, assign=assign)
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        assert_zero_padding(other)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_model_on_meta_says_what_comes_out(small, rows, norm):
    model = small(norm=norm).to("meta")
    inputs = [x.to("meta") for x in rows(2, 5, 4)]
    assert model(*inputs[:3]).shape == (2, 4, 1, 4, 3)
    assert model.loss(*inputs).shape == ()


def test_prediction_does_not_depend_on_context_order(small, rows, assert_same_but_for_rounding):
    model = small(dtype=torch.float64)
    x_context, y_context, x_target, _ = rows(2, 9, 4, dtype=torch.float64)
    order = torch.randperm(9)
    shuffled = model(x_context[:, order], y_context[:, order], x_target)
    assert_same_but_for_rounding([shuffled], [model(x_context, y_context, x_target)])


def test_target_order_is_equivariant(small, rows, assert_same_but_for_rounding):
    model = small(dtype=torch.float64)
    x_context, y_context, x_target, _ = rows(2, 5, 9, dtype=torch.float64)
    order = torch.randperm(9)
    shuffled = model(x_context, y_context, x_target[:, order])
    assert_same_but_for_rounding([shuffled], [model(x_context, y_context, x_target)[:, order]])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_changed_target_changes_no_other_target(small, rows, norm):
    model = small(norm=norm)
    x_context, y_context, x_target, _ = rows(2, 5, 6)
    changed = x_target.clone()
    changed[:, 2] += 1.0
    before, after = model(x_context, y_context, x_target), model(x_context, y_context, changed)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(before[:, others], after[:, others])
    assert (before[:, 2] != after[:, 2]).any()


def rows_of(h: Tensor, update: Tensor | None) -> Tensor:
    """What a block hands on."""
    return h if update is None else h + update


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_context_states_do_not_depend_on_targets(small, rows, norm):
    model = small(norm=norm)
    x_context, y_context, x_target, _ = rows(2, 5, 6)
    states: list[Tensor] = []
    for block in model.blocks[:-1]:
        block.register_forward_hook(
            lambda _module, _inputs, out: states.append(rows_of(*out)[:, :5])
        )
    model(x_context, y_context, x_target)
    model(x_context, y_context, torch.randn_like(x_target))
    first, second = states[: len(states) // 2], states[len(states) // 2 :]
    assert len(first) == model.config.layers - 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_of_a_batch_are_independent(small, rows):
    model = small()
    x_context, y_context, x_target, _ = rows(3, 5, 6)
    before = model(x_context, y_context, x_target)
    y_context[1] += 1.0
    after = model(x_context, y_context, x_target)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert (before[1] != after[1]).any()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_every_parameter_gets_a_gradient_within_three_steps(small, rows, norm, scale):
    model = small(norm=norm, scale=scale)
    assert_every_parameter_learns(model, lambda: model.loss(*rows(2, 5, 6)))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_autocast_keeps_stream_in_bf16_and_mixture_in_fp32(small, rows, norm):
    model = small(norm=norm)
    x_context, y_context, x_target, y_target = rows(2, 5, 6)
    streams: list[Tensor] = []
    model.embedder.register_forward_hook(lambda _module, _inputs, h: streams.append(h))
    for block in model.blocks:
        block.register_forward_hook(
            lambda _module, _inputs, out: streams.extend(x for x in out if x is not None)
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        params = model(x_context, y_context, x_target)
        loss = model.loss(x_context, y_context, x_target, y_target)
    loss.backward()
    assert {h.dtype for h in streams} == {torch.bfloat16}
    assert params.dtype == loss.dtype == torch.float32
    assert (params != params.bfloat16().float()).any()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


def test_autocast_tells_inputs_apart_that_bf16_cannot(small, rows):
    model = small()
    x_context, y_context, x_target, _ = rows(1, 5, 6)
    near = x_target.bfloat16().float()
    nearby = near * (1.0 + 2.0**-12)
    assert torch.equal(near.bfloat16(), nearby.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = [model.embedder(x_context, y_context, x) for x in (near, nearby)]
    assert (hidden[0] != hidden[1]).any()


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_model_equals_eager_model(small, rows, assert_same_but_for_rounding, compiler):
    # A second block is traced as the first is.
    model = small(dtype=torch.float64, layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    # The second size is compiled with symbolic sizes.
    for context, targets in ((5, 6), (7, 4)):
        inputs = rows(2, context, targets, dtype=torch.float64)[:3]
        results = []
        for forward in (compiled, model):
            params = forward(*inputs)
            gradients = torch.autograd.grad(params.square().sum(), model.parameters())
            results.append((params, gradients))
        (params, gradients), (eager_params, eager_gradients) = results
        assert_same_but_for_rounding([params], [eager_params])
        assert_same_but_for_rounding(gradients, eager_gradients)


def test_initial_weights_are_scaled_as_specified(small):
    for norm, gain in (("pre", (2 * 3) ** -0.5), ("post", 1.0)):
        model = small(norm=norm)
        block = model.blocks[0]
        d, used = model.config.width, model.config.feed_forward_width
        for weight, bound in (
            (block.attention.query.weight, d**-0.5),
            (block.attention.output.weight, gain * d**-0.5),
            (block.feed_forward.hidden.weight, d**-0.5),
            (block.feed_forward.output.weight, gain * used**-0.5),
            (model.head.output, 0.1 * used**-0.5),
        ):
            assert 0.9 * bound < weight.abs().max() <= bound


def test_indicator_tells_a_zero_context_row_from_a_target_row(small, rows):
    x_context, y_context, _, _ = rows(1, 5, 1)
    y_context = torch.zeros_like(y_context)
    same = small().embedder(x_context, y_context, x_context)
    told = small(indicator=True).embedder(x_context, y_context, x_context)
    assert torch.equal(same[:, :5], same[:, 5:])
    assert (told[:, :5] != told[:, 5:]).any()


def test_two_outputs_have_a_mixture_each(small, rows):
    model = small(y_width=2)
    x_context, y_context, x_target, y_target = rows(3, 5, 6, y_width=2)
    assert model(x_context, y_context, x_target).shape == (3, 6, 2, 4, 3)
    assert model.log_likelihood(x_context, y_context, x_target, y_target).shape == (3, 6, 2)
    assert all(p.shape == (3, 6, 2) for p in model.predict(x_context, y_context, x_target))


@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_prediction_holds_the_moments_and_a_draw_of_the_mixture(
    small, rows, assert_same_but_for_rounding, scale
):
    model = small(scale=scale, y_width=2, dtype=torch.float64)
    inputs = rows(3, 5, 6, dtype=torch.float64, y_width=2)[:3]
    params = model(*inputs)
    logits, mean, raw = params.unbind(-1)
    sigma = raw.exp() if scale == "log_sigma" else F.softplus(raw) + 1e-3
    mixture = MixtureSameFamily(Categorical(logits=logits), Normal(mean, sigma))
    found = model.predict(*inputs, generator=torch.Generator().manual_seed(1))
    assert_same_but_for_rounding([found.mean], [mixture.mean])
    assert_same_but_for_rounding([found.variance], [mixture.variance])
    draw = model.head.sample(params, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found.sample, draw)


def test_same_generator_seed_same_sample(small, rows):
    model = small()
    inputs = rows(2, 5, 6)[:3]
    samples = [
        model.predict(*inputs, generator=torch.Generator().manual_seed(seed)).sample
        for seed in (1, 1, 2)
    ]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 0, 3), (2, 0, 1), (2, 4, 3)),
        ((2, 5, 3), (2, 5, 1), (2, 0, 3)),
        ((2, 5, 3), (2, 4, 1), (2, 4, 3)),
        ((2, 5, 3), (2, 5, 2), (2, 4, 3)),
        ((2, 5, 4), (2, 5, 1), (2, 4, 4)),
        ((2, 5, 3), (2, 5, 1), (2, 4, 2)),
        ((2, 5, 3), (2, 5, 1), (3, 4, 3)),
        ((5, 3), (5, 1), (4, 3)),
    ],
    ids=["M0", "N0", "M-differs", "dy-differs", "dx-differs", "dx-target", "B-differs", "rank-2"],
)
def test_wrong_shapes_are_refused_with_what_was_wanted_and_what_came(small, shapes):
    inputs = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=r"wanted x_context \[B, M, 3\].*M >= 1.*got \[") as error:
        small()(*inputs)
    assert str(list(shapes[0])) in str(error.value)


@pytest.mark.parametrize("name", ["x_context", "y_context", "x_target", "y_target"])
@pytest.mark.parametrize(
    ("corrupt", "error", "message"),
    [
        (lambda x: x.tolist(), TypeError, "wanted {} as a tensor; got list"),
        (lambda x: x.numpy(), TypeError, "wanted {} as a tensor; got ndarray"),
        (lambda x: None, TypeError, "wanted {} as a tensor; got NoneType"),
        (lambda x: x.to_sparse(), TypeError, "wanted {} as a strided tensor; got torch.sparse_coo"),
        (lambda x: x.long(), TypeError, "wanted {} in one of float64, .*; got torch.int64"),
        (
            lambda x: x.to("meta"),
            ValueError,
            "wanted {} on the model's device, cpu; got it on meta",
        ),
        (lambda x: x[..., 0], ValueError, "wanted x_context .* with M >= 1 and N >= 1; got "),
        (lambda x: x[:1], ValueError, "wanted x_context .* with M >= 1 and N >= 1; got "),
    ],
    ids=["list", "array", "none", "sparse", "integers", "meta", "rank-2", "B1"],
)
def test_input_that_does_not_fit_is_refused_before_anything_is_computed(
    small, rows, name, corrupt, error, message
):
    model = small()
    computed = []
    model.embedder.register_forward_pre_hook(lambda *_: computed.append(True))
    names = ("x_context", "y_context", "x_target", "y_target")
    inputs = dict(zip(names, rows(2, 5, 4), strict=True))
    inputs[name] = corrupt(inputs[name])
    for ask in (model.loss, model.log_likelihood):
        with pytest.raises(error, match=message.format(name)):
            ask(**inputs)
    # Without a y of targets it is asked for their parameters.
    if inputs["y_target"] is not None:
        with pytest.raises(error, match=message.format(name)):
            model(**inputs)
    del inputs["y_target"]
    for ask in (model, model.predict) if name in inputs else ():
        with pytest.raises(error, match=message.format(name)):
            ask(**inputs)
    assert computed == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "autocast"])
def test_transforms_of_torch_give_the_gradients_of_autograd(
    small, rows, dtype, assert_same_but_for_rounding
):
    model, operands = small(dtype=dtype), rows(2, 5, 3, dtype=dtype)[:3]
    weights = dict(model.named_parameters())

    def total(weights):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found = torch.func.functional_call(model, weights, operands)
        return found.square().sum()

    found = torch.func.grad(total)(weights)
    expected = torch.autograd.grad(total(weights), list(weights.values()))
    assert_same_but_for_rounding(
        [found[name].double() for name in weights],
        [gradient.double() for gradient in expected],
        torch.finfo(dtype).eps / torch.finfo(torch.float64).eps,
    )
