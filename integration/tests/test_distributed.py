"""Models that several processes train together, by torch's own wrappers: two processes over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from fusewright_testkit.fresh import run_python

PROCESSES = 2
# What every process runs first: rank and a file that they meet at are filled in.
PREAMBLE = """
import copy
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from fusewright_models import *

torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method="file://{file}", rank={rank}, world_size={processes})
rank, processes = {rank}, {processes}
torch.manual_seed(0)
text = torch.randint(256, (2 * processes, 41))


def transformer_np():
    model = TransformerNP(TransformerNPConfig(x_width=1, width=16, layers=2, heads=2, feed_forward_width=20))
    x, y = torch.randn(2, 2 * processes, 12, 1, dtype=torch.float64)
    rows = x[:, :5], y[:, :5], x[:, 5:]
    return model, rows, dict(y_target=y[:, 5:]), (*rows, y[:, 5:]), model.blocks


def titan_mac():
    model = TitanMAC(TITAN_MAC["tiny"])
    return model, (text[:, :-1],), dict(targets=text[:, 1:]), (text,), model.blocks


def hybrid():
    model = HybridLM(HYBRID["tiny"])
    return model, (text[:, :-1], text[:, 1:]), dict(), (text,), model.stack.layers


def loss_of(outputs):
    return outputs.total if hasattr(outputs, "total") else outputs


def share(rank, inputs):
    return [x[2 * rank : 2 * rank + 2] for x in inputs]


def mine(rank, rows, more):
    return share(rank, rows), dict(zip(more, share(rank, more.values())))


def expected_gradients(model, rows, more):
    found = []
    for rank in range(processes):
        # Reading moves averages that the next selection goes by.
        one = copy.deepcopy(model)
        given, named = mine(rank, rows, more)
        loss_of(one(*given, **named)).backward()
        found.append({{name: p.grad for name, p in one.named_parameters()}})
    return {{
        name: None if found[0][name] is None else sum(each[name] for each in found) / processes
        for name in found[0]
    }}


def check(model, expected):
    for name, parameter in model.named_parameters():
        wanted, got = expected[name.removeprefix("module.")], parameter.grad
        if wanted is None or got is None:
            assert wanted is None and (got is None or not got.any()), name
            continue
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=name)


model, rows, more, for_loss, blocks = {model}()
# One scale of tasks for all processes.
model = model.double()
expected = expected_gradients(model, rows, more)
given, named = mine(rank, rows, more)
"""
MODELS = "transformer_np", "titan_mac", "hybrid"


def run(tmp_path, model: str, code: str) -> list[str]:
    """What each process prints."""
    programs = [
        PREAMBLE.format(rank=rank, processes=PROCESSES, file=tmp_path / "meeting", model=model)
        + code
        + "distributed.destroy_process_group()\n"
        for rank in range(PROCESSES)
    ]
    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(run_python, programs))


@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_gradients_are_those_of_all_rows(model, tmp_path):
    run(
        tmp_path,
        model,
        "wrapped = DistributedDataParallel(model, find_unused_parameters=True)\n"
        "loss_of(wrapped(*given, **named)).backward()\n"
        "check(wrapped, expected)\n",
    )


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by block"])
@pytest.mark.parametrize("model", MODELS)
def test_sharded_gradients_are_those_of_all_rows(model, whole, tmp_path):
    run(
        tmp_path,
        model,
        f"for block in () if {whole} else blocks: fully_shard(block)\n"
        "fully_shard(model)\n"
        "loss = model.loss(*share(rank, for_loss))\n"
        "loss.backward()\n"
        "check(model, expected)\n",
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_loss_that_no_wrapper_sees_is_refused(model, tmp_path):
    told = run(
        tmp_path,
        model,
        "wrapped = DistributedDataParallel(model)\n"
        "try: wrapped.module.loss(*share(rank, for_loss))\n"
        "except RuntimeError as error: print(error)\n"
        "with torch.no_grad(): wrapped.module.loss(*share(rank, for_loss))\n",
    )
    for each in told:
        assert "2 processes add up the gradients of" in each
