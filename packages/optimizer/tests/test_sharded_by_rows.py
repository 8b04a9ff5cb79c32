"""Four processes that have some rows of each parameter take the steps of one process."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer.matrix.shares import overlapped, parts_of_rows, shared_out
from fusewright_testkit import Yardstick

from .compared import assert_equal, assert_near
from .several import found_by_all, needs_gloo, run_once, script

EPS = torch.finfo(torch.float32).eps

NAMES = "muon", "m3", "nested", "learned", "velo"
CASES = [(name, "reference", "fsdp") for name in NAMES]
CASES += [(name, "reference", "hsdp") for name in NAMES[:3]]
CASES.append(("muon", "triton", "fsdp"))
SLOW = [(name, "triton", "fsdp") for name in NAMES[1:3]]
SLOW += [(name, "reference", "hsdp") for name in NAMES[3:]]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def sharded():
    return script("sharded_by_rows")


@pytest.fixture(params=CASES, ids="-".join)
def case(request) -> tuple[str, str, str]:
    """An optimizer, a backend and a mesh."""
    return request.param


@pytest.fixture
def folder(sharded, case, tmp_path_factory):
    """What the processes of a case have left; plain torch's are of all cases."""
    name, backend, _ = case
    if backend not in sharded.BACKENDS:
        pytest.skip("the kernels take CPU tensors in the interpreter alone")
    return run_once(sharded, tmp_path_factory, *([] if case in sharded.CASES else [name]))


@pytest.fixture
def found(sharded, folder, case) -> list[dict]:
    """By process."""
    return [each["-".join(case)] for each in found_by_all(sharded, folder)]


@pytest.fixture
def assert_right(sharded, case):
    """Parameters and states are those of one process: in fp64, or by the yardstick."""
    name, backend, _ = case

    def eager(*starts):
        model, optimizer = sharded.made(name, "reference", starts=starts)
        sharded.train(model, optimizer, 0, sharded.STEPS)
        return tuple(sharded.everything(model, optimizer))

    def check(numbers):
        starts = sharded.drawn(-1)
        if backend == "triton":
            Yardstick(eager, starts, [None] * len(numbers)).check(lambda *_: tuple(numbers))
        else:
            assert_near(numbers, eager(*(x.double() for x in starts)))

    return check


def test_sharded_parameters_train_as_whole_ones_do(sharded, found, case, assert_right):
    norms = sharded.train(*sharded.made(*case[:2]), 0, sharded.STEPS)
    for each in found:
        assert each["norms"] == pytest.approx(norms, rel=8 * EPS)
        # To the bit among themselves.
        assert_equal(each["whole"], found[0]["whole"])
    assert_right(found[0]["whole"])


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["loaded", "sent"])
def test_sharded_training_goes_on_in_as_many_processes(found, way):
    for each in found:
        assert each["placed"]
        assert_equal(each[way], each["whole"])


@pytest.mark.sampled
def test_sharded_training_goes_on_in_one_process(sharded, folder, found, case):
    model, optimizer = sharded.made(*case[:2])
    sharded.load(model, optimizer, folder / "-".join(case))
    assert_equal(sharded.everything(model, optimizer), found[0]["at break"])
    norms = sharded.train(model, optimizer, sharded.BREAK, sharded.STEPS)
    if case[1] == "reference":
        assert_near(sharded.everything(model, optimizer), found[0]["whole"])
    assert norms == pytest.approx(found[0]["norms"][sharded.BREAK :], rel=8 * EPS)


def test_state_of_shards_is_sharded(sharded, found, case):
    if case[0] not in ("learned", "velo"):
        pytest.skip("the state of the others is as large as its parameter")
    model, optimizer = sharded.made(*case[:2])
    sharded.train(model, optimizer, 0, 1)
    count = 0
    for p in model.parameters():
        state = optimizer.state[p]
        count += sum(state[name].numel() for name in ("momenta", "square", "row", "column"))
    processes = sharded.PROCESSES if case[2] == "fsdp" else 2
    # The last one has least: nothing of most tensors.
    assert found[-1]["local"] < count / processes < found[0]["local"] < count


def test_processes_skip_together(found):
    for each in found:
        assert each["skipped"] == (True, 1)
        assert_equal(each["after skip"], each["sent"])


def test_controller_learns_from_steps_of_shards_and_not_of_other_losses(sharded, found, case):
    if case[0] != "nested":
        pytest.skip("the others have no controller")
    model, optimizer = sharded.made(*case[:2])
    sharded.train(model, optimizer, 0, sharded.STEPS)
    assert all(m.item() != 1.0 for m in optimizer.get_lr_multipliers().values())
    norms = [x["exp_avg"].item() for x in optimizer.get_momentum_stats().values()]
    for each in found:
        assert each["norms of momenta"] == pytest.approx(norms, rel=8 * EPS)
        assert "meta_update takes gradients of parameters of one process" in each["said"]


def test_whole_matrices_are_taken_and_other_placements_refused(sharded, tmp_path_factory):
    for each in found_by_all(sharded, run_once(sharded, tmp_path_factory)):
        placements = each["placements"]
        assert torch.equal(placements["whole"], placements["expected"])
        for name in ("columns", "twice"):
            assert "a parameter must be whole or sharded by rows over one axis" in placements[name]
        assert "as torch.chunk cuts them" in placements["unlike chunks"]


@pytest.mark.parametrize("name", ["learned", "velo"])
def test_shards_beside_whole_tensors_train_as_all_whole_do(sharded, tmp_path_factory, name):
    for each in found_by_all(sharded, run_once(sharded, tmp_path_factory)):
        beside = each["beside shards"]
        assert_near(beside[name], beside[f"{name} expected"])


def test_whole_state_of_every_process_is_loaded_into_shards(sharded, tmp_path_factory):
    for each in found_by_all(sharded, run_once(sharded, tmp_path_factory)):
        assert_equal(*each["beside shards"]["loaded"])


def test_what_networks_cannot_do_for_shards_is_said(sharded, tmp_path_factory):
    for each in found_by_all(sharded, run_once(sharded, tmp_path_factory)):
        said = each["beside shards"]
        if "triton" in sharded.BACKENDS:
            assert "the kernels take whole parameters, not shards" in said["kernels"]
        assert "of a sharded parameter must be [1], got [7, 5, 1]" in said["of elements"]
        assert "momenta of parameter 0 must be a Tensor, got a DTensor" in said["state of shards"]
        assert "a parameter must be whole or sharded by rows over one axis" in said["columns"]


def test_rows_are_parted_as_torch_parts_them():
    for rows in (0, 1, 5, 8, 9):
        for processes in (1, 2, 3, 4, 8):
            parts = [len(x) for x in torch.zeros(rows).chunk(processes)] if rows else []
            padded = parts + [0] * (processes - len(parts))
            assert parts_of_rows(rows, processes) == padded


class Mesh:
    def size(self, axis):
        return 3


def test_products_are_shared_by_their_cost():
    mesh, other = (Mesh(), 0), (Mesh(), 0)
    stacks = [(mesh, 1, (4, 4)), (mesh, 4, (8, 8)), (mesh, 7, (8, 2, 2)), (other, 2, (8, 8))]
    shares = shared_out([(key, count, torch.Size(shape)) for key, count, shape in stacks])
    # One large matrix more for the first, what is left of the next for the second, and so on.
    assert shares == [[0, 0, 1], [2, 1, 1], [2, 3, 2], [1, 1, 0]]


def test_one_move_begins_while_those_before_it_wait():
    seen = []

    def move(name, waits):
        for turn in range(waits + 1):
            seen.append(f"{name}{turn}")
            if turn < waits:
                yield

    device = torch.device("cpu")
    overlapped((device, move(name, waits)) for name, waits in (("a", 2), ("b", 0), ("c", 1)))
    assert seen == ["a0", "b0", "a1", "c0", "a2", "c1"]
