"""A launch that serves tensors of two kinds is noticed, as no interpreter would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fusewright_testkit.plugin import of_one_kind


class Launch:
    kernel = "a kernel"

    @of_one_kind
    def __call__(self, tensors, floats=(), described=()):
        return len(tensors)


@pytest.mark.parametrize("other", [None, torch.ones(2, dtype=torch.bfloat16)])
def test_launch_serves_one_kind_of_tensors(other):
    launch, x = Launch(), torch.ones(2)
    assert [launch((x, x)), launch((torch.ones(3), x), (0.5,))] == [2, 2]
    with pytest.raises(AssertionError, match="a kernel was launched for"):
        launch((x, other))
    assert Launch()((x, other)) == 2


@pytest.mark.parametrize(
    "other", [torch.ones(3, 2), torch.ones(4, 2)[::2], torch.ones(2, 2).bfloat16()]
)
def test_launch_serves_descriptors_of_one_layout(other):
    launch, x = Launch(), torch.ones(2, 2)
    for _ in range(2):
        assert launch((x,), (), (SimpleNamespace(base=x.clone()),)) == 1
    with pytest.raises(AssertionError, match="a kernel was launched for"):
        launch((x,), (), (SimpleNamespace(base=other),))
