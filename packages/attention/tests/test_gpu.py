"""What only a GPU can show: graphs with lengths, great sizes, the tuned tables."""

from __future__ import annotations

import pytest
import torch
from fusewright.attention import rectangular_attention, sdpa_backend
from fusewright.attention.rectangular import reference
from fusewright_testkit import Yardstick, capture, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPES = ((4, 300, 64, 8, 64), (2, 300, 700, 4, 64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replayed_graph_gives_eager_bits_of_the_lengths_of_the_replay_and_waits_for_nothing(
    op, shape
):
    tensors = [x.requires_grad_() for x in op.draw(shape, BF16, "cuda")]
    key_lengths = torch.full((shape[0],), 40, device="cuda")
    graph, captured = capture(lambda: everything(op.kernels, [*tensors, key_lengths]))
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_()
    key_lengths.copy_(torch.arange(shape[0]) * 13)
    graph.replay()
    torch.cuda.synchronize()
    with no_synchronisation():
        expected = everything(op.kernels, [*tensors, key_lengths])
    assert same_bits(captured, expected)


# Each is compiled for itself: the lines of the tables, and widths that are padded.
LINES = [
    *((BF16, width, keys) for width in (16, 40, 64, 128) for keys in (47, 64, 127, 500)),
    *((torch.float32, width, keys) for width in (40, 64, 128) for keys in (47, 127, 500)),
    *(
        (dtype, width, keys)
        for dtype in (BF16, torch.float32)
        for width in (136, 256)
        for keys in (15, 500)
    ),
    *((torch.float16, 64, keys) for keys in (64, 500)),
]


@pytest.mark.parametrize(("dtype", "width", "keys"), LINES)
def test_every_line_of_the_tables_is_as_near_to_fp64_as_torch(lse_op, dtype, width, keys):
    lse_op.check(lse_op.draw((2, 257, keys, 2, width), dtype, "cuda"), [keys, keys // 2])


WINDOW_LINES = [
    *((BF16, width) for width in (16, 40, 64, 128, 136, 256)),
    *((torch.float32, width) for width in (40, 64, 128, 136, 256)),
    (torch.float16, 64),
]


@pytest.mark.parametrize("prefix", [0, 1, 32, 257])
@pytest.mark.parametrize(("dtype", "width"), WINDOW_LINES)
def test_every_line_of_the_window_tables_is_as_near_to_fp64_as_torch(
    window_op, dtype, width, prefix
):
    tensors = window_op.draw((2, 500, 500, 2, width), dtype, "cuda")
    window_op.check(tensors, window=130, prefix=prefix, scale=width**-0.5)


@pytest.mark.parametrize(("window", "prefix"), [(1, 0), (64, 17), (512, 16), (4096, 0)])
def test_windows_of_a_long_sequence(window_op, window, prefix):
    tensors = window_op.draw((1, 1100, 1100, 2, 64), BF16, "cuda")
    window_op.check(tensors, window=window, prefix=prefix, scale=0.125)
    rows = [tensors[0][:, 1060:], *tensors[1:]]
    window_op.check(rows, window=window, prefix=prefix, scale=0.125)


@pytest.mark.parametrize("width", [40, 64])
def test_one_query_for_every_two_keys(window_op, width):
    tensors = window_op.draw((2, 512, 1040, 8, width), BF16, "cuda")
    window_op.check(tensors, window=1024, prefix=16, every=2, scale=width**-0.5)


@pytest.mark.parametrize("change", [1.0, float("nan"), float("inf")])
def test_a_token_reaches_no_row_outside_its_window(window_op, change):
    """Border tiles of the tables' own sizes hold rows that see it and rows that do not."""
    tensors = window_op.draw((1, 700, 700, 2, 64), BF16, "cuda")
    clean = window_op.kernels(*tensors, window=130, prefix=17)
    for x in tensors[1:]:
        x[:, 333] += change
    actual = window_op.kernels(*tensors, window=130, prefix=17)
    unseen = torch.ones(700, dtype=torch.bool, device="cuda")
    unseen[333:463] = False
    assert torch.equal(actual[0][:, unseen], clean[0][:, unseen])
    assert torch.equal(actual[1][..., unseen], clean[1][..., unseen])
    if change != 1.0:
        assert (~actual[0][:, 333:463].isfinite()).any(-1).all()


def test_memory_of_a_window_is_linear_in_the_sequence(window_op):
    taken = []
    for tokens in (8192, 16384):
        tensors = [
            x.requires_grad_() for x in window_op.draw((1, tokens, tokens, 4, 64), BF16, "cuda")
        ]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o = window_op.first(window_op.kernels(*tensors, window=512, prefix=16))
        torch.autograd.grad(o, tensors, torch.ones_like(o))
        taken.append(torch.cuda.max_memory_allocated() - before)
        del tensors, o
    assert taken[1] < 2.1 * taken[0]


def test_rows_of_a_great_task_are_as_near_to_fp64_as_torch(op):
    """256 queries of (10k, 1k), whose values and gradients are computed amid all others."""
    q, k, v = op.draw((1, 11000, 10000, 2, 64), BF16, "cuda")
    chosen = torch.randperm(11000, device="cuda")[:256]

    def amid_the_rest(q_chosen, k, v):
        o = op.first(op.kernels(q.index_copy(1, chosen, q_chosen), k, v))
        return o.index_select(1, chosen)

    yardstick = Yardstick(lambda *t: op.first(op.reference(*t)), [q.index_select(1, chosen), k, v])
    yardstick.check(amid_the_rest)


@pytest.mark.large
def test_tensor_past_31_bits_of_elements(op):
    """More elements of q than a 32-bit number counts; as many tasks as leave the queries whole."""
    few, great = 40, (1 << 31) // (500 * 8 * 64) + 2
    drawn = op.draw((few, 500, 64, 8, 64), BF16, "cuda")
    results = []
    for tasks in (few, great):
        repeats = torch.arange(tasks, device="cuda").clamp(max=few - 2)
        repeats[-1] = few - 1
        leaves = [x.index_select(0, repeats).requires_grad_() for x in drawn]
        o = op.first(op.kernels(*leaves))
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
        results.append([x[[0, few - 2, -1]].clone() for x in (o, *grads)])
        del leaves, o, grads
    assert same_bits(*results)


@pytest.mark.large
def test_task_past_31_bits_of_elements(op):
    """So many queries that even one task has more elements than a 32-bit number counts: those at
    the end, whose gradients alone are not zero.
    """
    queries, keys = (1 << 31) // (8 * 128) + 64, 130
    few = op.draw((2, 64, keys, 8, 128), BF16, "cuda")

    def at_the_end(q, k, v):
        return op.first(op.kernels(q.repeat(1, queries // 64, 1, 1), k, v))[:, -64:]

    Yardstick(lambda *t: op.first(op.reference(*t)), few).check(at_the_end)


@pytest.mark.parametrize("tasks", [1, 3, 2000])
def test_chunks_of_queries_add_up(op, tasks):
    """Few tasks are cut into chunks, many are not."""
    shape = (tasks, 700, 50, 1, 32) if tasks < 100 else (tasks, 70, 50, 1, 32)
    op.check(op.draw(shape, BF16, "cuda"))


def test_pointers_and_descriptors_agree(op, monkeypatch, fresh_plans):
    """The same tiles, read by one and the other."""
    from fusewright.attention.common.problem import TileConfig
    from fusewright.attention.rectangular import launch, launch_backward

    tensors = [x.requires_grad_() for x in op.draw((2, 300, 700, 4, 64), BF16, "cuda")]
    actual = []
    for described in (False, True):
        line = TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=2)
        line = line._replace(hopper=described, descriptors=described)
        for module, table in (
            (launch, "FORWARD"),
            (launch_backward, "DQ"),
            (launch_backward, "DKDV"),
        ):
            monkeypatch.setattr(module, table, (line,))
        launch.forward_plan.cache_clear()
        launch_backward.backward_plan.cache_clear()
        actual.append(everything(op.kernels, tensors))
    assert same_bits(*actual)


def test_sdpa_backend_is_the_one_that_torch_takes():
    q = torch.randn(2, 64, 4, 64, device="cuda", dtype=BF16)
    for wanted in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(wanted):
            assert sdpa_backend(q, q, q) == wanted


def test_absolute_error_on_unit_normal_inputs_is_what_the_readme_promises():
    q, k, v = (torch.randn(2, n, 4, 64, device="cuda", dtype=BF16) for n in (500, 1000, 1000))
    truth = reference.rectangular_attention(q.double(), k.double(), v.double(), scale=0.125)
    assert (rectangular_attention(q, k, v) - truth).abs().max() < 1e-2


def test_scores_of_1e4_err_no_more_than_those_of_torch(lse_op):
    """One key takes all; torch's flash attention is held to the same truth."""
    q, k, v = lse_op.draw((2, 300, 500, 4, 64), BF16, "cuda")
    q, k = 40 * q, 40 * k
    do = torch.randn_like(q)

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def errors(call, dtype=BF16):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        return [o, *torch.autograd.grad(o, leaves, do.to(dtype))]

    truth = errors(lambda *t: reference.rectangular_attention(*t, scale=0.125), torch.float64)
    ours, torchs = errors(rectangular_attention), errors(flash)
    for actual, theirs, exact in zip(ours, torchs, truth, strict=True):
        allowed = 2 * (theirs - exact).abs().max() + 2 * torch.finfo(BF16).eps * exact.abs().max()
        assert (actual - exact).abs().max() <= allowed
