"""The loss and its gradients: those of all logits at once, in chunks and by torch's function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.cross_entropy.linear import linear_cross_entropy as module
from fusewright.cross_entropy.linear import reference
from fusewright_testkit import capture, no_synchronisation

IGNORED = -100
SHAPES = r"x, weight and targets must be \[.., d\], \[V, d\] and \[..\], got"
CHUNKED = "chunked"
WAYS = [CHUNKED]
if hasattr(F, "linear_cross_entropy"):
    WAYS.append("torch")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    """By our chunks, and by torch's function where there is one; chunks of a few rows."""
    monkeypatch.setattr(module, "_torchs_is_exact", lambda dtype: request.param == "torch")
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 400)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    return request.param


def operands(*shape: int, width: int = 8, vocabulary: int = 50, dtype=torch.float64):
    x = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(vocabulary, shape)


plain = reference.linear_cross_entropy


def assert_same(found, expected) -> None:
    """fp64 sums of fewer than 2^7 terms (columns, then logits or rows), in two orders."""
    for value, other in zip(found, expected, strict=True):
        assert value.dtype == other.dtype == torch.float64
        bound = 2**7 * torch.finfo(torch.float64).eps * other.detach().abs().max()
        assert (value - other).abs().max() <= bound


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(33,), (3, 11), (1,), (8,), (2, 2, 5)], ids=str)
def test_loss_and_gradients_are_those_of_all_logits(way, shape, reduction):
    x, weight, targets = operands(*shape)
    results = []
    for function in (linear_cross_entropy, plain):
        loss = function(x, weight, targets, reduction=reduction)
        results.append([loss, *torch.autograd.grad(3.0 * loss, (x, weight))])
    assert_same(*results)


@pytest.mark.parametrize("ignored", [IGNORED, 7], ids=["ignore-100", "ignore7"])
def test_ignored_rows_count_for_nothing(way, ignored):
    x, weight, targets = operands(3, 11)
    targets[0, 2:5] = ignored
    targets[2] = ignored
    for reduction in ("sum", "mean"):
        results = []
        for function in (linear_cross_entropy, plain):
            loss = function(x, weight, targets, ignore_index=ignored, reduction=reduction)
            results.append([loss, *torch.autograd.grad(loss, (x, weight))])
        assert_same(*results)
    dx = results[0][1]
    assert (dx[targets == ignored] == 0).all()
    assert (dx[targets != ignored] != 0).any()


@pytest.mark.parametrize("leaf", [0, 1], ids=["x", "weight"])
def test_either_operand_alone_gets_its_gradient(way, leaf):
    x, weight, targets = operands(33)
    expected = torch.autograd.grad(plain(x, weight, targets), (x, weight))[leaf]
    parts = [x.detach(), weight.detach()]
    parts[leaf].requires_grad_()
    assert_same(torch.autograd.grad(linear_cross_entropy(*parts, targets), parts[leaf]), [expected])


def test_loss_without_gradients_is_the_same(way):
    x, weight, targets = operands(33)
    loss = linear_cross_entropy(x, weight, targets)
    with torch.no_grad():
        again = linear_cross_entropy(x, weight, targets)
    assert not again.requires_grad
    assert torch.equal(loss, again)


def test_backward_pass_may_run_twice(way):
    x, weight, targets = operands(33)
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, weight))))


def test_nothing_to_predict_gives_nan_and_gradients_of_zero(way):
    x, weight, targets = operands(5)
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORED))
    assert loss.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))
    assert linear_cross_entropy(x[:0], weight, targets[:0]).isnan()


def test_sum_over_nothing_is_zero_and_so_are_its_gradients(way):
    x, weight, targets = operands(5)
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORED), reduction="sum")
    assert loss == 0.0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize(
    ("dtype", "autocast", "wide"),
    [
        (torch.float64, False, True),
        (torch.float32, False, True),
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
    ],
    ids=["float64", "float32", "float32-autocast", "bfloat16"],
)
def test_torchs_function_where_it_exists_takes_what_it_rounds_nowhere(
    monkeypatch, dtype, autocast, wide
):
    calls = []

    def counted(place, name):
        function = getattr(place, name)

        def call(*arguments, **options):
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(place, name, call)

    by_torch = wide and hasattr(F, "linear_cross_entropy")
    counted(module, "_log_p_and_gradient")
    if hasattr(F, "linear_cross_entropy"):
        counted(F, "linear_cross_entropy")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_cross_entropy(*operands(5, dtype=dtype)).backward()
    assert calls == ["linear_cross_entropy" if by_torch else "_log_p_and_gradient"]


def test_no_tensor_has_all_logits(monkeypatch):
    """Of 64 rows, those of one chunk at a time."""
    monkeypatch.setattr(module, "_torchs_is_exact", lambda dtype: False)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8 * 500)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    x, weight, targets = operands(64, vocabulary=500)
    with LargestTensor() as seen:
        linear_cross_entropy(x, weight, targets).backward()
    assert seen.elements == max(8 * 500, weight.numel())


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any operation's result has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def test_autocast_rounds_products_alone(device):
    """bf16 products of fp32 operands; the rest no worse than torch's cross entropy of them."""
    drawn = operands(64, width=32, vocabulary=200, dtype=torch.float32)
    x, weight, targets = (operand.detach().to(device) for operand in drawn)
    leaves = x.requires_grad_(), weight.requires_grad_()
    truth = plain(x.double(), weight.double(), targets)
    exact = [truth, *torch.autograd.grad(truth, leaves)]
    errors = []
    for function in (linear_cross_entropy, plain):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = function(x, weight, targets)
        found = [loss, *torch.autograd.grad(loss, leaves)]
        assert {value.dtype for value in found} == {torch.float32}
        pairs = zip(found, exact, strict=True)
        errors.append([(y - wanted).detach().square().mean().sqrt() for y, wanted in pairs])
    ulps = 2 * torch.finfo(torch.float32).eps * truth.detach()
    for ours, eager in zip(*errors, strict=True):
        assert ours <= 2 * eager + ulps


def test_gradient_of_a_sure_prediction_is_not_rounded_away():
    """p of the target is 1 - 2^-12: in bf16, p - 1 would be 0."""
    scale = torch.log(torch.tensor(2.0**12 - 1.0)).item() / 2
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16, requires_grad=True)
    x = torch.tensor([[scale]], dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([0]))
    expected = -2 * torch.sigmoid(-2 * x.detach().double())
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.dtype == torch.float32
    # Two roundings to bf16.
    assert abs(dx.double() - expected) < torch.finfo(torch.bfloat16).eps * abs(expected)


@pytest.mark.parametrize("chosen", WAYS)
def test_compiled_loss_equals_eager_loss(monkeypatch, chosen):
    monkeypatch.setattr(module, "_torchs_is_exact", lambda dtype: chosen == "torch")
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 400)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    x, weight, targets = operands(33)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, linear_cross_entropy):
        loss = function(x, weight, targets)
        results.append([loss, *torch.autograd.grad(loss, (x, weight))])
    assert_same(*results)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda x, w, t: (x, w, t.int()), TypeError, "targets must be int64, got torch.int32"),
        (lambda x, w, t: (x.long(), w, t), TypeError, "x must be float32, .* got torch.int64"),
        (lambda x, w, t: (x, w[:, :7], t), ValueError, SHAPES),
        (lambda x, w, t: (x[:4], w, t), ValueError, SHAPES),
        (lambda x, w, t: (x, w.float(), t), ValueError, "weight must have x's dtype"),
        (lambda x, w, t: (x, w, t.to("meta")), ValueError, "targets must be on x's device"),
    ],
    ids=["int32", "long-x", "width", "rows", "dtypes", "meta"],
)
def test_operands_that_do_not_fit_are_refused(spoil, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(*spoil(*operands(5)))


def test_reduction_must_be_one_of_two():
    with pytest.raises(ValueError, match=r"reduction must be one of \('mean', 'sum'\), got 'none'"):
        linear_cross_entropy(*operands(5), reduction="none")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("ignored", [None, 1.5, "none"])
def test_ignore_index_must_be_a_whole_number(ignored, backend):
    with pytest.raises(TypeError, match="ignore_index must be a whole number, got"):
        linear_cross_entropy(*operands(5), ignore_index=ignored, backend=backend)


@pytest.mark.gpu
def test_loss_on_the_gpu_is_captured_without_waiting_and_replayed():
    x, weight, targets = (operand.cuda() for operand in operands(512, width=64, vocabulary=3000))
    x, weight = (operand.detach().float().requires_grad_() for operand in (x, weight))

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets)
        return loss, *torch.autograd.grad(loss, (x, weight))

    graph, found = capture(step)
    graph.replay()
    torch.cuda.synchronize()
    with no_synchronisation():
        expected = step()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rows", [235, 249])
def test_gradients_in_bf16_have_no_bias(rows):
    """One over these counts of targets, rounded to bf16, would make all of a gradient 0.3 % larger
    or smaller.
    """
    x, weight, targets = (
        t.detach().bfloat16() if t.is_floating_point() else t
        for t in operands(rows, width=64, vocabulary=300)
    )
    parts = [x.requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(linear_cross_entropy(*parts, targets), parts)
    wide = [part.detach().double().requires_grad_() for part in parts]
    expected = torch.autograd.grad(plain(*wide, targets), wide)
    for value, truth in zip(found, expected, strict=True):
        factor = (value.double() * truth).sum() / truth.square().sum()
        assert abs(factor - 1) < torch.finfo(torch.bfloat16).eps / 8
