"""Two processes with FSDP2's uneven shards train as one process trains the whole, and checkpoints
of theirs go on in any number of processes.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.optimizer import AdamW

from .compared import assert_equal, assert_near
from .several import found_by_all, needs_gloo, run_once, script

EPS = torch.finfo(torch.float32).eps

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def sharded():
    return script("sharded")


@pytest.fixture(scope="module")
def folder(sharded, tmp_path_factory):
    return run_once(sharded, tmp_path_factory)


@pytest.fixture(scope="module")
def of_both(sharded, folder) -> list[dict]:
    """By process, what is of no backend."""
    return found_by_all(sharded, folder)


@pytest.fixture
def found(of_both, backend) -> list[dict]:
    """By process."""
    if backend not in of_both[0]:
        pytest.skip("the kernels take CPU tensors in the interpreter alone")
    return [result[backend] for result in of_both]


def unsharded(sharded, backend):
    model = sharded.new_model()
    return model, AdamW(model.parameters(), backend=backend, **sharded.OPTIONS)


def test_uneven_shards_train_as_the_whole_does(sharded, found, backend):
    model, optimizer = unsharded(sharded, backend)
    norms = sharded.steps(model, optimizer, 0, sharded.STEPS)
    assert min(norms) > sharded.OPTIONS["max_grad_norm"]
    for each in found:
        assert each["norms"] == pytest.approx(norms, rel=8 * EPS)
        assert_near(each["whole"], sharded.everything(model, optimizer))
    # Nothing is cut in halves.
    assert [each["local"] for each in found] == [
        [(4, 5), (4,), (1, 7), (1,)],
        [(3, 5), (3,), (0, 7), (0,)],
    ]


def test_processes_agree_on_norms_and_skips(found):
    assert found[0]["norms"] == found[1]["norms"]
    for each in found:
        assert each["skipped"] == (True, 1)
        assert_equal(each["after skip"], each["resumed"])


def test_state_is_sharded_as_its_parameter(found):
    assert [each["placed"] for each in found] == [[True] * 4] * 2


def test_checkpoint_of_two_processes_goes_on_in_two(found):
    for each in found:
        assert_equal(each["resumed"], each["whole"])


def test_checkpoint_of_two_processes_goes_on_in_one(sharded, folder, found, backend):
    model, optimizer = unsharded(sharded, backend)
    torch.nn.init.zeros_(model[0].weight)
    sharded.load(model, optimizer, folder / f"checkpoint-{backend}")
    assert optimizer.state[model[0].weight]["step"].item() == sharded.BREAK
    norms = sharded.steps(model, optimizer, sharded.BREAK, sharded.STEPS)
    assert norms == pytest.approx(found[0]["norms"][sharded.BREAK :], rel=8 * EPS)
    assert_near(sharded.everything(model, optimizer), found[0]["whole"])


@pytest.mark.parametrize("name", ["muon", "velo", "nested", "continuum"])
@pytest.mark.parametrize("way", ["loaded", "sent"])
def test_training_of_whole_parameters_goes_on_in_two_processes(of_both, name, way):
    for each in of_both:
        assert_equal(each["replicated"][name][way], of_both[0]["replicated"][name]["whole"])


@pytest.mark.parametrize("name", ["sharded", "replicated", "nested"])
@pytest.mark.parametrize("way", ["loaded", "sent"])
def test_bits_that_bf16_lacks_go_on_in_two_processes(of_both, name, way):
    for each in of_both:
        found = each["remainders"][name]
        assert sum(x.dtype == torch.int16 for x in found[way]) == 4
        assert_equal(found[way], found["whole"])


def test_optimizers_take_sharded_parameters_or_say_that_they_do_not(of_both):
    for each in of_both:
        said = dict(each["refusals"])
        taken = "AdamW", "DeepNestedOptimizer", "LearnedOptimizer", "M3", "Muon", "VeLO"
        assert [said.pop(name) for name in taken] == [""] * len(taken)
        assert len(said) == 3
        for message in said.values():
            assert "got a DTensor" in message


def test_norm_counts_every_shard_and_every_whole_tensor_once(found):
    for each in found:
        clipping = each["clipping"]
        gradients = clipping["gradients"]
        norm = torch.cat([g.double().flatten() for g in gradients]).norm().item()
        assert clipping["norms"] == pytest.approx([norm] * 3, rel=2 * EPS)
        assert norm > 0.5
        assert_near(clipping["clipped"], [g * (0.5 / norm) for g in gradients])


@pytest.mark.parametrize("case", ["partial", "partial-sharded", "replicated-sharded"])
def test_gradients_placed_otherwise_than_their_parameters_count_as_wholes(found, case):
    for each in found:
        p, norm = each["placements"][case]
        expected, expected_norm = each["placements"]["expected"]
        assert norm == pytest.approx(expected_norm, rel=2 * EPS)
        assert_near([p], [expected])


@pytest.mark.parametrize("case", ["number", "tensor"])
def test_norm_of_partial_sums_is_that_of_their_sum(found, case):
    for each in found:
        norm, clipped_by, clipped, plain = each["partial"][case]
        expected, ones = each["partial"]["expected"].double(), torch.ones(3)
        whole = math.sqrt(expected.square().sum().item() + 3.0)
        assert [norm, clipped_by] == pytest.approx([whole] * 2, rel=2 * EPS)
        assert_near([clipped, plain], [(expected * (0.5 / whole)).float(), ones * (0.5 / whole)])


def test_norm_counts_shards_of_shards(found):
    expected = math.sqrt(2 * 3.0**2 + 2 * 4.0**2)
    assert [each["strided"] for each in found] == pytest.approx([expected] * 2)
