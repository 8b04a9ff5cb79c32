"""Two processes that train sharded parameters on CPUs; what each finds goes to a file.

python sharded.py FOLDER
"""

from __future__ import annotations

import copy
import datetime
import multiprocessing
import os
import pathlib
import sys

import torch

# What the first operation on a DTensor imports.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusewright.optimizer import (
    M3,
    AdamW,
    DeepMomentum,
    DeepNestedOptimizer,
    DeltaMomentum,
    LearnedOptimizer,
    Muon,
    UpdateMLP,
    VeLO,
    VeLONetworks,
    clip_grad_norm_,
    grad_norm,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

PROCESSES = 2
STEPS, BREAK = 4, 2
# Kernels where the interpreter runs them.
BACKENDS = ("reference", "triton") if os.environ.get("TRITON_INTERPRET") == "1" else ("reference",)
OPTIONS = dict(lr=0.05, weight_decay=0.1, amsgrad=True, max_grad_norm=0.1)


def new_model() -> torch.nn.Module:
    """Two processes share none of its tensors evenly, and of some the second has nothing."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def steps(model, optimizer, first: int, last: int, rank: int | None = None) -> list[float]:
    """Train on the batches, of which a process takes its half; returns the norms."""
    norms = []
    for step in range(first, last):
        x = batch(step) if rank is None else batch(step).chunk(PROCESSES)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    return norms


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def everything(model, optimizer) -> list[torch.Tensor]:
    """All parameters and states, whole."""
    found = []
    for p in model.parameters():
        found += [whole(x) for x in (p, *(x for _, x in sorted(optimizer.state[p].items())))]
    return found


def save(model, optimizer, folder: pathlib.Path) -> None:
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=folder)


def load(model, optimizer, folder: pathlib.Path) -> None:
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )


def sharded_training(rank: int, folder: pathlib.Path, backend: str) -> dict:
    """Training in one go and with a break, and what each process has of it."""

    def made():
        model = new_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))
        return model, AdamW(model.parameters(), backend=backend, **OPTIONS)

    model, optimizer = made()
    norms = steps(model, optimizer, 0, BREAK, rank)
    save(model, optimizer, folder / f"checkpoint-{backend}")
    norms += steps(model, optimizer, BREAK, STEPS, rank)
    found = {"norms": norms, "whole": everything(model, optimizer)}
    found["local"] = [tuple(p.to_local().shape) for p in model.parameters()]
    found["placed"] = [
        optimizer.state[p]["exp_avg"].placements == p.placements for p in model.parameters()
    ]

    model, optimizer = made()
    load(model, optimizer, folder / f"checkpoint-{backend}")
    steps(model, optimizer, BREAK, STEPS, rank)
    found["resumed"] = everything(model, optimizer)

    # One number of one process alone.
    model(batch(0)).sum().backward()
    if rank == 0:
        next(model.parameters()).grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    found["after skip"] = everything(model, optimizer)
    found["skipped"] = optimizer.skipped.item(), optimizer.skipped_steps.item()
    return found


def replicated(rank: int, folder: pathlib.Path) -> dict:
    """Of parameters that every process has whole, as DDP's: what training that goes on from a
    checkpoint has, and from a state dict that the first process alone has, beside training that
    was not interrupted.
    """

    def made(make, seed):
        model = new_model()
        torch.manual_seed(seed)
        return model, make(model)

    def train(model, optimizer, takes_loss, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step(*(loss,) * takes_loss)

    def numbers(model, optimizer):
        controller = getattr(optimizer, "controller", None)
        weights = [] if controller is None else list(controller.parameters())
        return [x.detach().clone() for x in (*everything(model, optimizer), *weights)]

    torch.manual_seed(7)
    networks = VeLONetworks(8, 6, exp_mult=0.1, step_mult=0.1)
    for x in networks.parameters():
        # Steps stay small: NaN is equal to nothing.
        torch.nn.init.normal_(x, std=0.1)
    nested = dict(meta_update_freq=2, meta_lr=0.05, frequencies=(1, 2))
    cases = {
        "muon": (lambda m: Muon([p for p in m.parameters() if p.ndim == 2]), False),
        "velo": (lambda m: VeLO(m.parameters(), networks, 20), True),
        "nested": (lambda m: DeepNestedOptimizer(m, **nested), True),
        "continuum": (lambda m: DeepNestedOptimizer(m, update="continuum", **nested), True),
    }
    found = {}
    for name, (make, takes_loss) in cases.items():
        model, optimizer = made(make, 1)
        train(model, optimizer, takes_loss, 0, BREAK)
        save(model, optimizer, folder / f"replicated-{name}")
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        # Of the first process alone.
        parts = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
        train(model, optimizer, takes_loss, BREAK, STEPS)
        expected = numbers(model, optimizer)

        model, optimizer = made(make, 2 + rank)
        load(model, optimizer, folder / f"replicated-{name}")
        train(model, optimizer, takes_loss, BREAK, STEPS)
        loaded = numbers(model, optimizer)

        model, optimizer = made(make, 4 + rank)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, parts[0], options=sent)
        set_optimizer_state_dict(model, optimizer, parts[1], options=sent)
        train(model, optimizer, takes_loss, BREAK, STEPS)
        found[name] = {"whole": expected, "loaded": loaded, "sent": numbers(model, optimizer)}
    return found


def remainders(rank: int, folder: pathlib.Path) -> dict:
    """What training with the bits that bf16 lacks has, and what training has that goes on from a
    checkpoint, and from a whole state dict that the first process alone has.
    """

    def made(name):
        model = new_model().bfloat16()
        if name == "nested":
            torch.manual_seed(rank)
            return model, DeepNestedOptimizer(model, rounding="remainder")
        if name == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))
        return model, AdamW(model.parameters(), 0.01, rounding="remainder")

    def train(model, optimizer, name, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            model(batch(step).bfloat16()).square().mean().backward()
            optimizer.step(*(1.0,) * (name == "nested"))
        optimizer.zero_grad()

    found = {}
    for name in ("sharded", "replicated", "nested"):
        model, optimizer = made(name)
        train(model, optimizer, name, 0, BREAK)
        save(model, optimizer, folder / f"remainders-{name}")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        parts = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        train(model, optimizer, name, BREAK, STEPS)
        expected = local(model, optimizer)

        model, optimizer = made(name)
        load(model, optimizer, folder / f"remainders-{name}")
        train(model, optimizer, name, BREAK, STEPS)
        loaded = local(model, optimizer)

        model, optimizer = made(name)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, parts[0], options=sent)
        set_optimizer_state_dict(model, optimizer, parts[1], options=sent)
        train(model, optimizer, name, BREAK, STEPS)
        found[name] = {"whole": expected, "loaded": loaded, "sent": local(model, optimizer)}
    return found


def local(model, optimizer) -> list[torch.Tensor]:
    """All parameters and states, of sharded ones what this process has."""
    found = []
    for p in model.parameters():
        found += [p, *(x for _, x in sorted(optimizer.state[p].items()))]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in found]


def refusals() -> dict:
    """What each optimizer says to sharded parameters; nothing where it takes them."""
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))
    ps = [p for p in model.parameters() if p.ndim == 2]
    makers = {
        "AdamW": lambda: AdamW(ps),
        "Muon": lambda: Muon(ps),
        "M3": lambda: M3(ps),
        "DeltaMomentum": lambda: DeltaMomentum(ps),
        "DeepMomentum": lambda: DeepMomentum(ps),
        "LearnedOptimizer": lambda: LearnedOptimizer(ps, UpdateMLP()),
        "VeLO": lambda: VeLO(ps, VeLONetworks(8, 6), 20),
        "DeepNestedOptimizer": lambda: DeepNestedOptimizer(model),
        "continuum": lambda: DeepNestedOptimizer(model, update="continuum"),
    }
    said = {}
    for name, make in makers.items():
        try:
            make()
            said[name] = ""
        except TypeError as error:
            said[name] = str(error)
    return said


def clipping(rank: int, backend: str) -> dict:
    """Norms of gradients of FSDP's shards beside a tensor that every process has."""
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))
    model(batch(rank)).sum().backward()
    plain = torch.nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([1.0, -2.0, 3.0])
    ps = [*model.parameters(), plain]
    before = [whole(p.grad) for p in ps]
    optimizer = AdamW(ps, max_grad_norm=0.5, backend=backend)
    optimizer.step()
    of_step = optimizer.grad_norm.item()
    norm = grad_norm([p.grad for p in ps], backend=backend).item()
    clipped_by = clip_grad_norm_(ps, 0.5, backend=backend).item()
    return {
        "gradients": before,
        "norms": (of_step, norm, clipped_by),
        "clipped": [whole(p.grad) for p in ps],
    }


def placements(rank: int, backend: str) -> dict:
    """A step whose gradients are not placed as their parameters are."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    start = torch.linspace(-1.0, 1.0, 15).view(5, 3)
    shares = [start.cos(), start.sin()]
    cases = {
        "partial": (Replicate(), DTensor.from_local(shares[rank], mesh, [Partial()])),
        "partial-sharded": (Shard(0), DTensor.from_local(shares[rank], mesh, [Partial()])),
        "replicated-sharded": (Shard(1), distribute_tensor(sum(shares), mesh, [Replicate()])),
    }
    found = {}
    for name, (placement, g) in cases.items():
        p = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [placement]))
        p.grad = g
        optimizer = AdamW([p], backend=backend, **OPTIONS)
        optimizer.step()
        found[name] = whole(p), optimizer.grad_norm.item()
    p = torch.nn.Parameter(start.clone())
    p.grad = sum(shares)
    optimizer = AdamW([p], backend=backend, **OPTIONS)
    optimizer.step()
    found["expected"] = whole(p), optimizer.grad_norm.item()
    return found


def partial_norms(rank: int, backend: str) -> dict:
    """Norms of a gradient whose processes hold summands of it, and what clipping leaves."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    start = torch.linspace(-1.0, 1.0, 15).view(5, 3)
    shares = [start.cos(), start.exp()]
    p = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Replicate()]))
    plain = torch.nn.Parameter(torch.zeros(3))
    found = {"expected": sum(shares)}
    for name, most in {"number": 0.5, "tensor": torch.tensor(0.5)}.items():
        p.grad = DTensor.from_local(shares[rank].clone(), mesh, [Partial()])
        plain.grad = torch.ones(3)
        norm = grad_norm([p.grad, plain.grad], backend=backend).item()
        clipped_by = clip_grad_norm_([p, plain], most, backend=backend).item()
        found[name] = norm, clipped_by, whole(p.grad), plain.grad
    return found


def strided_shards(rank: int, backend: str) -> float:
    """The norm of a gradient that is sharded as FSDP2 shards what is sharded already."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    mine = torch.full((2,), 3.0 + rank)
    placement = [_StridedShard(0, split_factor=2)]
    p = torch.nn.Parameter(DTensor.from_local(mine, mesh, placement))
    p.grad = DTensor.from_local(mine, mesh, placement)
    optimizer = AdamW([p], skip_nonfinite=True, backend=backend)
    optimizer.step()
    return optimizer.grad_norm.item()


def work(rank: int, folder: pathlib.Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {"replicated": replicated(rank, folder), "refusals": refusals()}
    found["remainders"] = remainders(rank, folder)
    for backend in BACKENDS:
        found[backend] = sharded_training(rank, folder, backend)
        found[backend]["clipping"] = clipping(rank, backend)
        found[backend]["placements"] = placements(rank, backend)
        found[backend]["partial"] = partial_norms(rank, backend)
        found[backend]["strided"] = strided_shards(rank, backend)
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    # Forked, so that what takes longest, torch's imports, is done once.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, folder)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
