"""What only a GPU can show: full sizes, sequences, the layer, fla as a peer."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from fusewright.deltanet import GatedDeltaNet, gated_delta_rule
from fusewright.deltanet.rule.fla import refuses_backward
from fusewright_testkit import Yardstick, assert_within, capture, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.yardstick import Allowance

from .operations import NORM, ConvolutionOp

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, heads, K, V; the tokens are no multiple of a chunk.
FULL = 2, 300, 8, 128, 128
# As a model's, so that fla tunes its kernels no more often than a benchmark has it do.
MODEL = 2, 1030, 8, 128, 128


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128)])
def test_short_numbers_are_as_near_to_fp64_as_torch(rule_op, widths, dtype):
    rule_op.check(rule_op.draw(*FULL[:3], *widths, dtype, "cuda"))


@pytest.mark.parametrize(
    "widths", [(1, 3), (20, 24), (32, 32), (36, 100), (64, 128), (96, 80), (256, 256)]
)
def test_every_width_is_as_near_to_fp64_as_torch(rule_op, widths):
    rule_op.check(rule_op.draw(*FULL[:3], *widths, BF16, "cuda"))


@pytest.mark.parametrize(("first", "gap"), [(1, 0), (0, 8)])
def test_operands_within_others_are_as_near_to_fp64_as_torch(rule_op, first, gap):
    """Operands that begin within a vector, and rows that do."""
    tensors = rule_op.draw(*FULL[:3], 64, 64, BF16, "cuda")
    rule_op.check([rule_op.laid(x, first, gap) for x in tensors])


@pytest.mark.parametrize(
    ("precision", "widths"),
    [
        ("ieee", (1, 1)),
        ("ieee", (64, 64)),
        ("ieee", (200, 256)),
        ("tf32", (64, 64)),
        ("tf32", (128, 128)),
    ],
)
def test_fp32_is_as_near_to_fp64_as_torch_in_each_precision(
    rule_op, precision, widths, monkeypatch
):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    rule_op.check(rule_op.draw(*FULL[:3], *widths, F32, "cuda"))


def test_size_of_a_model_is_as_near_to_fp64_as_torch(rule_op):
    rule_op.check(rule_op.draw(*MODEL, BF16, "cuda"))


def test_outputs_and_gradients_are_those_of_the_recurrence(rule_op):
    rule_op.check_by_token(rule_op.draw(2, 130, 8, 128, 128, BF16, "cuda"))


def test_without_a_state_it_is_zero(rule_op):
    op = rule_op.having(starts=False)
    op.check(op.draw(*FULL, BF16, "cuda"))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130, 1000])
def test_every_number_of_tokens_is_as_near_to_fp64_as_torch(rule_op, tokens):
    rule_op.check(rule_op.draw(2, tokens, 8, 64, 64, BF16, "cuda"))


@pytest.mark.parametrize("forget", [0.0, 0.01, 5.0, 200.0])
def test_every_decay_is_as_near_to_fp64_as_torch(rule_op, forget):
    rule_op.check(rule_op.draw(*FULL, BF16, "cuda", forget=forget))


def test_keys_all_alike_are_as_near_to_fp64_as_torch(rule_op):
    tensors = rule_op.draw(*FULL, BF16, "cuda", forget=0.01)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1]).contiguous()
    rule_op.check(tensors)


def test_shared_heads_are_as_near_to_fp64_as_torch(rule_op):
    rule_op.check(rule_op.draw(2, 300, (2, 6), 64, 64, BF16, "cuda"))


@pytest.mark.parametrize("batch", [2, 16, 64])
def test_every_number_of_programs_is_as_near_to_fp64_as_torch(rule_op, batch):
    """Each line of the tables of the serial kernels."""
    rule_op.check(rule_op.draw(batch, 130, 4, 64, 64, BF16, "cuda"))


def test_sequences_in_one_row_are_as_near_to_fp64_as_torch(rule_op):
    lengths = torch.tensor([0, 1, 66, 66, 300], device="cuda")
    op = rule_op.having(cu_seqlens=lengths)
    op.check(op.draw(1, 300, 8, 64, 64, BF16, "cuda", sequences=4))


def test_future_token_changes_no_past_output(rule_op):
    tensors = rule_op.draw(*FULL, BF16, "cuda")
    o, _ = rule_op.kernels(*tensors)
    for token in (0, 63, 64, 200, 299):
        changed = [x.clone() for x in tensors]
        for x in changed[1:5]:
            x[:, token] *= 0.5
        later, _ = rule_op.kernels(*changed)
        assert torch.equal(later[:, :token], o[:, :token])
        assert not torch.equal(later, o)


def test_slices_of_one_projection_give_the_bits_of_copies(rule_op):
    q, k, v, *others = rule_op.draw(*FULL, BF16, "cuda")
    expected = rule_op.kernels(q, k, v, *others)
    slices = torch.cat([q, k, v], 2).split(q.shape[2], 2)
    assert same_bits(rule_op.kernels(*slices, *others), expected)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_graph_of_sequences_gives_eager_bits_of_the_replay_and_waits_for_nothing(rule_op, dtype):
    lengths = torch.tensor([0, 100, 300], device="cuda")
    op = rule_op.having(cu_seqlens=lengths)
    leaves, others = (
        [x.requires_grad_() for x in op.draw(1, 300, 3, 64, 64, dtype, "cuda", sequences=2)]
        for _ in range(2)
    )
    graph, captured = capture(lambda: everything(op.kernels, leaves))
    with torch.no_grad():
        for x, other in zip(leaves, others, strict=True):
            x.copy_(other)
        lengths[1] = 37
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    with no_synchronisation():
        expected = everything(op.kernels, leaves)
    assert same_bits(captured, expected)


@pytest.mark.parametrize("sizes", [(3, (2, 4), 128, 128), (1, (1, 1), 200, 72)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_step_is_as_near_to_fp64_as_torch(step_op, sizes, dtype):
    step_op.check(step_op.draw(*sizes, dtype, "cuda"))


def test_fla_computes_the_same(rule_op):
    """Its outputs and, where it does not refuse them, gradients of q, k and v pass the yardstick;
    of gates and state, where fla sums what cancels, ours err no more than twice as much as its own.
    """
    pytest.importorskip("fla")
    tensors = rule_op.draw(*MODEL, BF16, "cuda")
    refused = refuses_backward(tensors[0].device)
    yardstick = Yardstick(rule_op.reference, tensors, [None, None] if refused else None)

    def fla(*leaves):
        leaves = [x.detach() for x in leaves] if refused else leaves
        return rule_op.public(*leaves, backend="fla")

    found, ours = yardstick.run(fla), yardstick.run(rule_op.kernels)
    names = "o", "state", "dq", "dk", "dv"
    for place, name in enumerate(names[:2] if refused else names):
        assert_within(found[place], yardstick.truth[place], yardstick.allowed[place], name)
    if refused:
        tensors[0].requires_grad_()
        with pytest.raises(RuntimeError, match="issue 640"):
            rule_op.public(*tensors, backend="fla")
        return
    for place, name in enumerate(("dg", "dbeta", "dstate"), len(names)):
        truth = yardstick.truth[place]
        assert_within(ours[place], truth, Allowance.of(truth, found[place]), name)


def test_fla_forgets_all_where_it_is_told_to(rule_op):
    pytest.importorskip("fla")
    tensors = rule_op.draw(*MODEL, BF16, "cuda")
    tensors[3][:, 5] = -float("inf")
    with torch.no_grad():
        assert all(x.isfinite().all() for x in rule_op.public(*tensors, backend="fla"))


def test_auto_takes_the_kernels_where_fla_is_installed_too(rule_op):
    """Recognised by the bits of o, without a warning, with and without gradients."""
    pytest.importorskip("fla")
    tensors = rule_op.draw(*MODEL, BF16, "cuda")
    with torch.no_grad():
        fla, kernels = (rule_op.public(*tensors, backend=name)[0] for name in ("fla", "triton"))
    assert not torch.equal(fla, kernels)
    leaves = [x.requires_grad_() for x in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert torch.equal(rule_op.public(*leaves)[0], kernels)
        o, _ = rule_op.public(*leaves)
    assert torch.equal(o, kernels)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), leaves[:5]))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("sizes", [(2, 300, 4, 128), (1, 70, 3, 256), (3, 33, 5, 20)])
@pytest.mark.parametrize("unit", [False, True], ids=["silu", "unit"])
def test_convolution_is_as_near_to_fp64_as_torch(unit, sizes, dtype):
    batch, tokens, heads, width = sizes
    op = ConvolutionOp(heads=heads if unit else 0, bias=False, period=50)
    op.check(op.draw(batch, tokens, heads * width, 4, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(2, 300, 4, 128), (3, 33, 5, 20), (7, 256)])
def test_gated_norm_is_as_near_to_fp64_as_torch(shape, dtype):
    NORM.check(NORM.draw(shape, dtype, "cuda"))


def test_layer_decodes_what_it_computes_as_a_whole():
    """In bf16 no worse than the whole, computed by the reference."""
    layer = GatedDeltaNet(256, 1.0, 64, 4, device="cuda", dtype=BF16, backend="triton")
    x = torch.randn(2, 100, 256, device="cuda", dtype=BF16)
    exact = GatedDeltaNet(256, 1.0, 64, 4, device="cuda", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    plain = GatedDeltaNet(256, 1.0, 64, 4, device="cuda", dtype=BF16, backend="reference")
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        truth = exact(x.double())
        y, cache = layer.decode(x[:, :90])
        found = [y]
        for token in x[:, 90:].split(1, 1):
            y, cache = layer.decode(token, cache)
            found.append(y)
        allowed = (plain(x).double() - truth).square().mean().sqrt()
    assert (torch.cat(found, 1).double() - truth).square().mean().sqrt() <= 2 * allowed


def test_training_step_of_the_layer_waits_for_nothing():
    layer = GatedDeltaNet(256, 1.0, 64, 4, device="cuda", dtype=BF16, backend="triton")
    x = torch.randn(2, 100, 256, device="cuda", dtype=BF16)
    layer(x).square().mean().backward()
    torch.cuda.synchronize()
    with no_synchronisation():
        layer(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_layer_and_flas_load_each_others_state():
    """With one state fla's layer errs at most twice as much as ours."""
    layers = pytest.importorskip("fla.layers")
    sizes = dict(hidden_size=256, expand_v=1.0, head_dim=64, num_heads=4)
    peer = layers.GatedDeltaNet(**sizes).to("cuda", BF16)
    ours = GatedDeltaNet(**sizes, device="cuda", dtype=BF16, backend="triton")
    exact = GatedDeltaNet(**sizes, device="cuda", dtype=torch.float64)
    for layer in (ours, exact):
        layer.load_state_dict(peer.state_dict())
    peer.load_state_dict(ours.state_dict())
    x = torch.randn(2, 100, 256, device="cuda", dtype=BF16)
    with torch.no_grad():
        truth = exact(x.double())
        error, allowed = (
            (y.double() - truth).square().mean().sqrt() for y in (peer(x)[0], ours(x))
        )
    assert error <= 2 * allowed


def first_call(cache, dtype):
    """Seconds of a first call, forward and backward, in a process of its own, whose cache is an
    empty folder.
    """
    code = (
        "import time, torch\n"
        "from fusewright.deltanet import gated_delta_rule\n"
        f"draw = lambda *size: torch.randn(1, 128, 2, *size, device='cuda').to({dtype})\n"
        "q, k, v = (draw(128).requires_grad_() for _ in range(3))\n"
        "g, beta = (x.float().sigmoid() for x in (draw(), draw()))\n"
        "torch.cuda.synchronize()\n"
        "start = time.perf_counter()\n"
        "gated_delta_rule(q, k / 12, v, -g, beta, backend='triton').o.sum().backward()\n"
        "torch.cuda.synchronize()\n"
        "print(time.perf_counter() - start)\n"
    )
    environment = dict(os.environ, TRITON_CACHE_DIR=str(cache))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_first_call_compiles_each_kernel_once(tmp_path, dtype):
    """Nothing is tuned; fla's first call tunes for over a minute."""
    first_call(tmp_path, dtype)
    assert sorted(path.stem for path in tmp_path.rglob("*.cubin")) == [
        "inputs_kernel",
        "local_kernel",
        "outputs_kernel",
        "prepare_kernel",
        "state_gradients_kernel",
        "states_kernel",
        "through_kernel",
    ]


# Other tests beside it would take its processors.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_first_call_of_all_kernels_takes_no_longer_than_twenty_seconds(tmp_path, dtype):
    assert first_call(tmp_path, dtype) < 20.0


@pytest.mark.large
def test_memory_of_a_training_step_is_what_the_readme_says():
    """Beside the inputs: T, G and the states; and in the backward pass what it hands over."""
    q, k, v = (torch.randn(1, 4096, 8, 128, device="cuda", dtype=BF16) for _ in range(3))
    k = k / 12
    g, beta = -0.1 * torch.rand(1, 4096, 8, device="cuda"), torch.rand(1, 4096, 8, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    o = gated_delta_rule(*leaves, g, beta, backend="triton").o
    size = q.numel() * q.element_size()
    assert torch.cuda.memory_allocated() - before < 3.8 * size
    torch.cuda.reset_peak_memory_stats()
    o.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 16 * size
