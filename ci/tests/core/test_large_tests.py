"""Tests marked large take turns, whatever process they run in."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import time

import pytest
from fusewright_testkit import plugin


def hold(path, times, seconds):
    with plugin.alone(path):
        start = time.monotonic()
        time.sleep(seconds)
        times.put((start, time.monotonic()))


def fail(path):
    with plugin.alone(path):
        raise SystemExit(3)


@pytest.fixture
def context():
    return multiprocessing.get_context("fork")


def test_processes_hold_the_lock_one_after_the_other(tmp_path, context):
    times, path = context.Queue(), tmp_path / "lock"
    processes = [context.Process(target=hold, args=(path, times, 0.05)) for _ in range(4)]
    for process in processes:
        process.start()
    spans = sorted(times.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start


def test_a_process_that_dies_gives_the_lock_back(tmp_path, context):
    path, times = tmp_path / "lock", context.Queue()
    process = context.Process(target=fail, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 3
    hold(path, times, 0)
    assert times.get(timeout=60)


@pytest.mark.large
def test_a_marked_test_holds_the_lock():
    with plugin.LOCK.open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
