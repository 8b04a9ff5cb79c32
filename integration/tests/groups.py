"""Code in several processes that train together, over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fusewright_testkit.fresh import run_python
from torch.distributed import TCPStore

PROGRAM = """
import os
import torch
from fusewright_models.training.processes import Processes, join

torch.set_num_threads(1)
told = dict(RANK={rank}, WORLD_SIZE={count}, LOCAL_RANK={rank}, LOCAL_WORLD_SIZE={count})
told |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT={port})
os.environ |= dict((name, str(value)) for name, value in told.items())
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
processes = join("{parallel}", "cpu")
"""


def run_group(code: str, count: int, *, parallel: str = "ddp") -> None:
    """Run code in each of so many processes, which is its `Processes` ``processes``.

    Raises:
        AssertionError: it raised in one.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = dict(count=count, port=store.port, parallel=parallel)
    programs = [PROGRAM.format(rank=rank, **begun) + code for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run_python, programs))
