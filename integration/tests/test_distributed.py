"""Models that two processes train together over gloo, by torch's own wrappers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from fusewright_testkit.fresh import run_python

PROCESSES = 2
# What a process of so many runs.
PROGRAM = """
import copy, dataclasses, json, traceback
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from fusewright_models import *

rank, processes = {rank}, {processes}
# Sums of as many terms as a gradient has, in another order.
EPS = torch.finfo(torch.float64).eps
torch.set_num_threads(1)
distributed.init_process_group(
    "gloo", init_method="file://{meeting}", rank=rank, world_size=processes
)
torch.manual_seed(0)
text = torch.randint(256, (2 * processes, 41))


def transformer_np():
    sizes = dict(width=16, layers=2, heads=2, feed_forward_width=20)
    x, y = torch.randn(2, 2 * processes, 12, 1, dtype=torch.float64)
    rows = x[:, :5], y[:, :5], x[:, 5:]
    named = dict(y_target=y[:, 5:])
    model = TransformerNP(TransformerNPConfig(x_width=1, **sizes))
    return model, rows, named, (*rows, y[:, 5:]), lambda model: model.blocks


def titan_mac():
    model, named = TitanMAC(TITAN_MAC["tiny"]), dict(targets=text[:, 1:])
    return model, (text[:, :-1],), named, (text,), lambda model: model.blocks


def hybrid(mode="exact"):
    model = HybridLM(dataclasses.replace(HYBRID["tiny"], mode=mode, sinkhorn_iterations=4))
    rows = text[:, :-1], text[:, 1:]
    return model, rows, dict(), (text,), lambda model: model.stack.layers


def hybrid_plain():
    return hybrid("plain")


def loss_of(outputs):
    return getattr(outputs, "total", outputs)


def share(rank, inputs):
    return [x[2 * rank : 2 * rank + 2] for x in inputs]


def loss_on_share(rank, model):
    more = dict(zip(named, share(rank, named.values())))
    return loss_of(model(*share(rank, rows), **more))


def gradients_on_all_rows():
    found = []
    for rank in range(processes):
        # Reading moves averages that the next selection goes by.
        one = copy.deepcopy(model)
        loss_on_share(rank, one).backward()
        found.append([p.grad for p in one.parameters()])
    return [None if each[0] is None else sum(each) / processes for each in zip(*found)]


def check(trained):
    for (name, p), wanted in zip(trained.named_parameters(), expected, strict=True):
        got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        if wanted is None:
            assert got is None or not got.any(), name
        else:
            torch.testing.assert_close(got, wanted, rtol=2**20 * EPS, atol=2**10 * EPS, msg=name)


def data_parallel():
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    loss_on_share(rank, wrapped).backward()
    check(wrapped)


def loss_inside():
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    with torch.no_grad():
        wrapped.module.loss(*share(rank, whole))
    other = getattr(wrapped.module, "next_token_loss", None)
    other = other or getattr(wrapped.module, "log_likelihood", wrapped.module.loss)
    try:
        other(*share(rank, whole))
    except RuntimeError as error:
        assert "add up the gradients of" in str(error)
    else:
        raise AssertionError("a loss that no wrapper sees was computed")
    wrapped.module.loss(*share(rank, whole))


def sharded():
    one = copy.deepcopy(model)
    fully_shard(one)
    # What is evaluated stays gathered.
    with torch.no_grad():
        one.eval().loss(*share(rank, whole))
    one.train().loss(*share(rank, whole)).backward()
    check(one)


def blocks_alone():
    one = copy.deepcopy(model)
    for block in blocks(one):
        fully_shard(block)
    one.loss(*share(rank, whole))


def sharded_by_block():
    one = copy.deepcopy(model)
    for block in blocks(one):
        fully_shard(block)
    fully_shard(one)
    one.loss(*share(rank, whole)).backward()
    check(one)


all_told = dict()
for make in transformer_np, titan_mac, hybrid, hybrid_plain:
    model, rows, named, whole, blocks = make()
    model = model.double()
    expected = gradients_on_all_rows()
    told = all_told[make.__name__] = dict()
    for part in data_parallel, loss_inside, blocks_alone, sharded, sharded_by_block:
        try:
            part()
        except Exception:
            told[part.__name__] = traceback.format_exc()
print(json.dumps(all_told))
distributed.destroy_process_group()
"""


def test_gradients_are_those_of_all_rows_or_the_call_is_refused(tmp_path):
    """Of all models in the same processes, which take longer to begin than to do this."""
    programs = [
        PROGRAM.format(rank=rank, processes=PROCESSES, meeting=tmp_path / "meeting")
        for rank in range(PROCESSES)
    ]
    with ThreadPoolExecutor(PROCESSES) as pool:
        for all_told in map(json.loads, pool.map(run_python, programs)):
            assert len(all_told) == 4
            for model, told in all_told.items():
                refused = "RuntimeError: wanted a loss that 2 processes add up the gradients of"
                assert refused in told.pop("loss_inside", ""), model
                assert refused in told.pop("blocks_alone", ""), model
                if model == "hybrid":
                    refused = (
                        "RuntimeError: wanted parameters that are whole while a reversible stack"
                    )
                    assert refused in told.pop("sharded_by_block", "")
                assert not told, model + "\n".join(told.values())
