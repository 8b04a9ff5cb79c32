"""Rows of documents, each of which begins with a block of its own."""

from __future__ import annotations

import pytest
import torch
from fusewright.example._core.documents import check_documents, layout_of

# Where documents begin and end, of two rows of 11 tokens; and padding.
BOUNDS = torch.tensor([[0, 3, 3, 7, 11], [1, 2, 8, 8, 9]])
MASK = torch.ones(2, 11, dtype=torch.bool)
MASK[0, [0, 4, 10]] = MASK[1, 2:4] = False
# By hand, in blocks of 3: token numbers, -1 where no token stands.
ALONE = [
    [0, 1, 2, 3, 4, 5, 6, -1, -1, 7, 8, 9, 10, -1, -1, -1, -1, -1],
    [1, -1, -1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1, -1, -1, -1, -1, -1],
]
MASKED = [
    [1, 2, -1, 3, -1, 5, 6, -1, -1, 7, 8, 9, -1, -1, -1, -1, -1, -1],
    [1, -1, -1, 4, 5, 6, 7, -1, -1, 8, -1, -1, -1, -1, -1, -1, -1, -1],
]


@pytest.mark.parametrize("mask", [None, MASK], ids=["alone", "masked"])
def test_documents_begin_with_blocks(mask):
    expected = torch.tensor(ALONE if mask is None else MASKED)
    layout = layout_of(2, 11, 3, cu_seqlens=BOUNDS, mask=mask)
    numbers = torch.arange(11).expand(2, 11)
    assert torch.equal(layout.laid_out(numbers, -1), expected)
    assert torch.equal(layout.filled, expected >= 0)
    begins = [[0, 1, 3], [0, 1, 3]]
    assert [row.nonzero().flatten().tolist() for row in layout.begins] == begins
    found = layout.in_rows(expected, -1)
    present = (found >= 0) if mask is None else (found >= 0) & mask
    assert torch.equal(layout.present, present)
    assert torch.equal(found[present], numbers[present])


def test_gradients_are_laid_out_as_values_are():
    layout = layout_of(2, 11, 3, cu_seqlens=BOUNDS, mask=MASK)
    x = torch.randn(2, 11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.laid_out, x)
    assert torch.autograd.gradcheck(layout.in_rows, layout.laid_out(x).detach().requires_grad_())
    back = layout.in_rows(layout.laid_out(x))
    assert torch.equal(back, x * layout.present.unsqueeze(-1))


def test_what_is_no_document_reaches_nothing():
    layout = layout_of(2, 11, 3, cu_seqlens=BOUNDS, mask=MASK)
    x = torch.where(layout.present, torch.ones(2, 11), torch.nan).requires_grad_()
    laid = layout.laid_out(x)
    assert torch.equal(laid, layout.filled.float())
    (dx,) = torch.autograd.grad(laid.sum(), x)
    assert torch.equal(dx, layout.present.float())


def test_padding_on_the_left_alone_is_taken_off():
    mask = torch.tensor([[False, False, True, False, True], [False] * 5])
    layout = layout_of(2, 5, 1, mask=mask)
    found = layout.laid_out(torch.arange(5).expand(2, 5), -1)
    assert found.tolist() == [[2, -1, 4, -1, -1], [-1] * 5]


@pytest.mark.parametrize("documents", [1, 4, 9])
@pytest.mark.parametrize("block", [1, 3, 20])
def test_any_documents_have_room(documents, block):
    for tokens in (0, 1, 2, 11):
        cuts = torch.randint(tokens + 1, (6, documents - 1)).sort().values
        bounds = torch.nn.functional.pad(cuts, (1, 0))
        bounds = torch.cat([bounds, torch.full((6, 1), tokens)], 1)
        layout = layout_of(6, tokens, block, cu_seqlens=bounds)
        assert layout.filled.sum(1).tolist() == [tokens] * 6
        assert layout.present.all()
        numbers = torch.arange(tokens).expand(6, tokens)
        assert torch.equal(layout.in_rows(layout.laid_out(numbers)), numbers)


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (torch.zeros(2), TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
        (torch.tensor([0]), ValueError, r"with N at least 1, got \(1,\)"),
        (torch.tensor([0, 3]), ValueError, r"with B = 2, got \(2,\)"),
        (torch.zeros(3, 2).int(), ValueError, r"with B = 2, got \(3, 2\)"),
        (torch.zeros(2, 2).int().to("meta"), ValueError, "cu_seqlens must be on x's device"),
    ],
)
def test_cu_seqlens_that_do_not_fit_are_refused(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        check_documents(cu_seqlens, torch.zeros(2, 3, 4))
