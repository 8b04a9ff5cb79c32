"""What autograd, transforms and compilers may do before and behind the memory; registration."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold

F32, F16, F64 = torch.float32, torch.float16, torch.float64
OPS = torch.ops.fusewright_memory_mlp
# Rows, tokens, D.
SIZES = 1, 3, 2
OPTIONS = 2, "l2", 0.25, None
KINDS = {
    "all": {},
    "constant-theta": dict(theta=0.1, taps=1, key_norm="rms"),
    "no-taps": dict(taps=0, key_norm=None),
    "queries": dict(queries=True),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def slopes(outputs, leaves):
    return torch.autograd.grad(transforms.loss(lambda *y: y)(*outputs), leaves)


@pytest.mark.parametrize("name", KINDS)
def test_reference_passes_gradcheck(input_op, name):
    op = input_op.having(**KINDS[name])
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, F64)]
    assert torch.autograd.gradcheck(op.reference, leaves)


def test_registered_op_passes_opcheck(input_op, device):
    leaves = [x.requires_grad_() for x in input_op.draw(*SIZES, F32, device)]
    present = torch.tensor([[True, False, True]], device=device)
    torch.library.opcheck(OPS.memory_input.default, (*leaves, present, *OPTIONS))


def test_registered_op_without_taps_passes_opcheck(input_op, device):
    joint, history, logits = input_op.having(taps=0, theta=0.1).draw(*SIZES, F32, device)
    leaves = [joint.requires_grad_(), history, None, logits.requires_grad_()]
    torch.library.opcheck(OPS.memory_input.default, (*leaves, None, 2, None, 0.25, 0.1))


def test_registered_op_of_queries_passes_opcheck(input_op, device):
    leaves = input_op.having(queries=True).draw(*SIZES, F32, device)
    leaves = [x.requires_grad_() for x in leaves]
    torch.library.opcheck(OPS.memory_queries.default, (*leaves, 2, "rms"))


@pytest.mark.parametrize("used", ["all", "keys", "history"])
def test_registered_backward_op_passes_opcheck(input_op, used, device):
    tensors = input_op.draw(*SIZES, F32, device)
    outputs = input_op.kernels(*tensors)
    wanted = {"all": range(7), "keys": [1], "history": [6]}[used]
    upstream = [torch.randn_like(y) if place in wanted else None for place, y in enumerate(outputs)]
    leaves = [None if x is None else x.requires_grad_() for x in (*tensors, *upstream)]
    torch.library.opcheck(
        OPS.memory_input_backward.default,
        (*leaves, *OPTIONS),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_registered_ops_on_tokens_pass_opcheck(device):
    x = torch.randn(2, 3, 5, device=device, requires_grad=True)
    mask = torch.rand(2, 3, device=device) < 0.5
    kept = torch.rand(2, 3, 2, device=device) < 0.5
    for given in (mask, None):
        torch.library.opcheck(OPS.finite_tokens.default, (x, given))
        torch.library.opcheck(OPS.kept_tokens.default, (x, kept, given, 2.0))


def test_registered_ops_on_gated_tokens_pass_opcheck(gated_op, device):
    leaves = [x.requires_grad_() for x in gated_op.draw(2, 3, 5, 4, F32, device)]
    mask = torch.rand(2, 3, device=device) < 0.5
    for given in (mask, None):
        torch.library.opcheck(OPS.gated_tokens.default, (*leaves, given))
    y, present, logits = OPS.gated_tokens(*leaves, None)
    y, dlogits = (x.detach().requires_grad_() for x in (y, logits))
    for dy in (torch.randn_like(y).requires_grad_(), None):
        torch.library.opcheck(
            OPS.gated_tokens_backward.default,
            (y, present, leaves[1], dy, dlogits),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_registered_op_that_counts_tokens_passes_opcheck(device):
    written = torch.rand(2, 3, 4, device=device) < 0.5
    counters = torch.randint(9, (2, 4), device=device), torch.randint(9, (2,), device=device)
    torch.library.opcheck(OPS.count_tokens.default, (written, *counters, None, None))
    mask = torch.rand(2, 3, device=device) < 0.5
    torch.library.opcheck(OPS.count_tokens.default, (written, *counters, mask, counters[0]))


def test_auto_is_the_reference_on_the_cpu(input_op):
    leaves = [x.requires_grad_() for x in input_op.draw(*SIZES)]
    found, expected = (input_op.public(*leaves, backend=b) for b in ("auto", "reference"))
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
@pytest.mark.parametrize("name", ["all", "queries"])
def test_transform_is_right(input_op, name, transform, device):
    op = input_op.having(**KINDS[name])
    hold(op, op.draw(*SIZES, F32, device), transform)


class TokensOp:
    """x of tokens that are finite, then of those that are kept."""

    def __init__(self, mask, kept):
        self.mask, self.kept = mask, kept

    def public(self, x, backend):
        y, _ = token_ops.finite_tokens(x, self.mask, backend=backend)
        return token_ops.kept_tokens(y.sin(), self.kept, self.mask, 3.0, backend=backend)

    def kernels(self, x):
        return self.public(x, "triton")

    def reference(self, x):
        return self.public(x, "reference")


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad, transforms.func_grad_twice],
    ids=lambda transform: transform.__name__,
)
def test_transform_of_tokens_is_right(transform, device):
    mask = torch.tensor([[True, True, False]], device=device)
    kept = torch.tensor([[[True, True], [True, False], [True, True]]], device=device)
    hold(TokensOp(mask, kept), [torch.randn(1, 3, 4, device=device)], transform)


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
def test_transform_of_gated_tokens_is_right(gated_op, transform, device):
    op = gated_op.having(torch.tensor([[True, False, True]], device=device))
    hold(op, op.draw(1, 3, 4, 2, F32, device), transform)


def test_second_derivative_of_gated_tokens_is_right(gated_op, device):
    op = gated_op.having(torch.tensor([[True, False, True]], device=device))
    tensors = op.draw(1, 3, 4, 2, F32, device)
    steepness = transforms.slopes_to_differentiate
    yardstick = Yardstick(steepness(op.reference), tensors, [torch.randn_like(x) for x in tensors])
    yardstick.check(steepness(op.kernels))


def test_gated_tokens_compute_in_fp32_under_autocast(gated_op, device):
    leaves = [x.requires_grad_() for x in gated_op.draw(2, 5, 4, 3, F32, device)]
    for call in (gated_op.kernels, gated_op.reference):
        expected = call(*leaves)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            found = call(*leaves)
            assert same_bits(found, expected)
            assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize("name", KINDS)
def test_second_derivative_is_right(input_op, name, device):
    op = input_op.having(**KINDS[name])
    tensors = op.draw(*SIZES, F32, device)
    steepness = transforms.slopes_to_differentiate
    yardstick = Yardstick(steepness(op.reference), tensors, [torch.randn_like(x) for x in tensors])
    yardstick.check(steepness(op.kernels))


def test_func_grad_compiled_to_one_graph_is_right(input_op, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(input_op, input_op.draw(*SIZES, F32, device), transforms.func_grad, compiler)


@pytest.mark.parametrize("name", KINDS)
def test_full_graph_compilation_gives_eager_bits(input_op, name, device):
    op = input_op.having(**KINDS[name])
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, F16, device)]
    expected = op.kernels(*leaves)
    found = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


def test_full_graph_compilation_of_gated_tokens_gives_eager_bits(gated_op, device):
    leaves = [x.requires_grad_() for x in gated_op.draw(2, 5, 4, 3, F16, device)]
    expected = gated_op.kernels(*leaves)
    found = torch.compile(gated_op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


def test_full_graph_compilation_of_tokens_gives_eager_bits(device):
    mask = torch.rand(2, 3, device=device) < 0.5
    kept = torch.rand(2, 3, 2, device=device) < 0.5
    op = TokensOp(mask, kept)
    x = torch.randn(2, 3, 5, device=device, requires_grad=True)
    expected = op.kernels(x)
    found = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, expected)
    assert same_bits(slopes((found,), [x]), slopes((expected,), [x]))


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(input_op, transform, device):
    joint, *others = input_op.draw(*SIZES, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda joint: input_op.kernels(joint, *others)[0], joint)


@pytest.mark.sampled
@pytest.mark.parametrize("used", [slice(0, 1), slice(4, 5), slice(6, 7)], ids=["q", "eta", "last"])
def test_part_of_the_outputs_gives_part_of_the_gradients(input_op, used, backend, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = input_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]

    def gradients(inputs, asked):
        outputs = input_op.public(*inputs, backend=backend)[used]
        return torch.autograd.grad(
            sum((y * transforms.ramp(y)).sum() for y in outputs), asked, materialize_grads=True
        )

    truth = gradients(leaves, leaves)
    mixed = [leaf if place in (0, 3) else tensors[place] for place, leaf in enumerate(leaves)]
    assert same_bits(gradients(mixed, [leaves[0], leaves[3]]), (truth[0], truth[3]))


def test_constant_theta_needs_no_gradient(input_op, backend, device):
    op = input_op.having(theta=0.1)
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, F32, device)]
    writes = op.whole(*leaves, backend=backend).writes
    assert not writes.theta.requires_grad
    assert writes.eta.requires_grad


def test_input_changed_after_the_forward_pass_is_noticed(input_op, device):
    leaves = [x.requires_grad_() for x in input_op.draw(*SIZES, F32, device)]
    outputs = input_op.kernels(*leaves)
    with torch.no_grad():
        leaves[2].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_meta_tensors_get_shapes(input_op):
    tensors = [x.to("meta") for x in input_op.draw(2, 5, 3)]
    q, k, _, alpha, *_, history = input_op.public(*tensors)
    assert q.shape == k.shape == (2, 5, 2, 3)
    assert alpha.shape == (2, 5, 2)
    assert history.shape == (2, 3, 18)
    assert q.is_meta
