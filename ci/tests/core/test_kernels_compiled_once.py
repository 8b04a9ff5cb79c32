"""Processes that want one kernel compile it one after the other, other kernels at one time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from fusewright_testkit import plugin


def compiled_side_by_side(folder, names):
    """How many were inside ``compile`` at one time, at most, where all wait for all to come."""
    meeting = threading.Barrier(len(names))
    together = []

    def compile(src, target, options):
        try:
            meeting.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            together.append(1)
        else:
            together.append(len(names))
        return src.name, target, options

    found = []
    alone = plugin.one_at_a_time(compile, folder)

    def call(name):
        src = SimpleNamespace(name=name, hash=lambda: name)
        found.append(alone(src, target="gpu", options={"num_warps": 4}))

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((name, "gpu", {"num_warps": 4}) for name in names)
    return max(together)


def test_equal_kernels_wait_for_one_another(tmp_path):
    assert compiled_side_by_side(tmp_path, ["forward", "forward"]) == 1


def test_other_kernels_do_not_wait(tmp_path):
    assert compiled_side_by_side(tmp_path, ["forward", "backward"]) == 2
