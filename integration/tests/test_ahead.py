"""Tasks that are drawn for many batches at once."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.data import DrawnAhead, Size, make_sampler
from fusewright_models.training.captured import tensors_of


def ahead(batches=3, name="gp-rbf", **kinds):
    kinds = {"ragged": True, "target_size": Size(5, 5), "seed": 7} | kinds
    return DrawnAhead(make_sampler(name, **kinds), batches)


def test_batches_are_parts_of_one_draw_after_the_other():
    source = ahead()
    sampler = make_sampler("gp-rbf", ragged=True, target_size=Size(5, 5), seed=7)
    for _ in range(2):
        drawn = sampler.sample(12)
        for number in range(3):
            task = source.sample(4)
            assert task.x_context.shape == (4, 46, 1)
            for ours, whole in zip(tensors_of(task), tensors_of(drawn), strict=True):
                assert torch.equal(ours, whole[4 * number : 4 * number + 4])


@pytest.mark.parametrize("taken", range(5))
def test_a_restored_source_continues_the_same_tasks(taken):
    source = ahead()
    for _ in range(taken):
        source.sample(4)
    state = source.state_dict()
    expected = [source.sample(4) for _ in range(4)]
    other = ahead(seed=8)
    other.load_state_dict(state)
    for task in expected:
        again = other.sample(4)
        for one, two in zip(tensors_of(task), tensors_of(again), strict=True):
            assert torch.equal(one, two)


def test_a_source_set_back_to_its_start_says_so():
    source = ahead()
    state = source.state_dict()
    source.sample(4)
    source.load_state_dict(state)
    found = source.state_dict()
    assert (found["batch"], found["taken"]) == (state["batch"], state["taken"]) == (0, 0)


def test_a_batch_of_another_size_is_another_draw():
    source = ahead()
    source.sample(4)
    assert source.sample(2).x_context.shape[0] == 2
    assert source.taken == 1


@pytest.mark.parametrize(
    "kinds", [{"ragged": False}, {"target_size": None}, {"target_size": Size(5, 6)}]
)
def test_tasks_of_several_shapes_are_refused(kinds):
    with pytest.raises(ValueError, match="wanted tasks of one shape to draw ahead"):
        ahead(**kinds)


def test_no_batches_and_other_draws_are_refused():
    with pytest.raises(ValueError, match="wanted 1 batch or more to draw ahead; got 0"):
        ahead(0)
    with pytest.raises(ValueError, match="wanted a run that draws 3 batches ahead; got 2"):
        ahead().load_state_dict(ahead(2).state_dict())
    sampler = make_sampler("gp-rbf")
    with pytest.raises(ValueError, match="wanted a run that draws 3 batches ahead; got none"):
        ahead().load_state_dict(sampler.state_dict())
