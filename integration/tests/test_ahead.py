"""Tasks that are drawn for many batches at once."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.data import DrawnAhead, Size, drawn_ahead, make_sampler
from fusewright_models.data.ahead import TURNS
from fusewright_models.training.held_batches import tensors_of


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


def in_turn(**kinds):
    kinds = {"context_size": Size(3, 9), "target_size": Size(5, 6), "padded": True} | kinds
    return drawn_ahead(make_sampler("gp-rbf", **kinds), 2)


def test_batches_of_drawn_sizes_are_those_of_several_draws_in_turn():
    source, sampler = in_turn(seed=7), in_turn(seed=7).sampler
    for _ in range(2):
        drawn = [sampler.sample(8) for _ in range(TURNS)]
        assert len({each.x_context.shape[1] for each in drawn}) > 2
        for first in (0, 4):
            for whole in drawn:
                task = source.sample(4)
                for ours, every in zip(tensors_of(task), tensors_of(whole), strict=True):
                    assert torch.equal(ours, every[first : first + 4])


@pytest.mark.parametrize("taken", [0, 1, TURNS, TURNS + 3, 2 * TURNS + 1])
def test_restored_draws_in_turn_continue_the_same_tasks(taken):
    source = in_turn(seed=7)
    for _ in range(taken):
        source.sample(4)
    state = source.state_dict()
    expected = [source.sample(4) for _ in range(3 * TURNS)]
    other = in_turn(seed=8)
    other.load_state_dict(state)
    for task in expected:
        again = other.sample(4)
        for one, two in zip(tensors_of(task), tensors_of(again), strict=True):
            assert torch.equal(one, two)


def test_draws_in_turn_refuse_the_state_of_one_draw():
    with pytest.raises(ValueError, match=f"wanted a run of {TURNS} draws in turn; got none"):
        in_turn().load_state_dict(ahead().state_dict())


def test_no_batches_and_other_draws_are_refused():
    with pytest.raises(ValueError, match="wanted 1 batch or more to draw ahead; got 0"):
        ahead(0)
    with pytest.raises(ValueError, match="wanted a run that draws 3 batches ahead; got 2"):
        ahead().load_state_dict(ahead(2).state_dict())
    sampler = make_sampler("gp-rbf")
    with pytest.raises(ValueError, match="wanted a run that draws 3 batches ahead; got none"):
        ahead().load_state_dict(sampler.state_dict())
