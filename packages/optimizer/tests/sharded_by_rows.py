"""Four processes that train parameters sharded by rows on CPUs; what each finds goes to a file.

python sharded_by_rows.py FOLDER
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
    DeepNestedOptimizer,
    LearnedOptimizer,
    Muon,
    UpdateMLP,
    VeLO,
    VeLONetworks,
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PROCESSES = 4
STEPS, BREAK = 3, 2
# Of some shapes there are fewer matrices than processes, and of some rows nothing is left for the
# last ones. Rows are the longest axis, the second longest, as long as another, or shorter.
SHAPES = ((7, 5), (9, 4), (7, 5), (5, 7), (7, 5), (3, 4, 2), (7, 5), (7, 5), (5,), (2,), (3, 3))
SHAPES += ((2, 4, 3),)
# Kernels where the interpreter runs them.
BACKENDS = ("reference", "triton") if os.environ.get("TRITON_INTERPRET") == "1" else ("reference",)
# The interpreter computes in fp32; fp64 is the reference's.
DTYPES = {"reference": torch.float64, "triton": torch.float32}
OPTIONS = dict(lr=0.05, weight_decay=0.1, ns_dtype=None, skip_nonfinite=True)
NESTED = dict(base_lr=0.05, meta_lr=0.5, weight_decay=0.1, meta_update_freq=2)
NAMES = "muon", "m3", "nested", "learned", "velo"
# Whose steps take the loss, and whose shards kernels serve.
TAKE_LOSS = DeepNestedOptimizer, VeLO
WITH_KERNELS = NAMES[:3]
# State of other axes than its parameter's.
NOT_ALIKE = "momenta", "row", "column", "lstm"
# Where all processes share the rows, and where two do and two others have the same.
MESHES = {"fsdp": (PROCESSES,), "hsdp": (2, 2)}
CASES = [(name, "reference", "fsdp") for name in NAMES]
CASES += [(name, "reference", "hsdp") for name in WITH_KERNELS]
# Not with the others: networks have much state to save, and the interpreter takes as long for each
# as plain torch for all.
APART = [(name, "reference", "hsdp") for name in NAMES if name not in WITH_KERNELS]
APART += [(name, "triton", "fsdp") for name in WITH_KERNELS if "triton" in BACKENDS]


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Model(torch.nn.Module):
    def __init__(self, starts) -> None:
        super().__init__()
        self.ps = torch.nn.ParameterList(x.detach().clone() for x in starts)

    def forward(self, seed: int) -> torch.Tensor:
        """A loss whose gradients no two seeds share, and whose sum over processes is exact in any
        order: a chain of products grows errors of small singular values.
        """
        slopes = [(16.0 * x).round() / 16.0 for x in drawn(seed)]
        pairs = zip(self.ps, slopes, strict=True)
        return torch.stack([(p * x.to(p.dtype)).sum() for p, x in pairs]).sum()


def made(name, backend, mesh=None, starts=None):
    model = Model(starts or [x.to(DTYPES[backend]) for x in drawn(-1)])
    if mesh is not None:
        names = ("replicas", "shards")[-len(MESHES[mesh]) :]
        fully_shard(model, mesh=init_device_mesh("cpu", MESHES[mesh], mesh_dim_names=names))
    if name == "nested":
        # Each process draws another controller, and all have the first one's.
        torch.manual_seed(0 if mesh is None else dist.get_rank())
        return model, DeepNestedOptimizer(model, **NESTED, grouping=group_of, backend=backend)
    if name in ("learned", "velo"):
        return model, networked(name, list(model.ps))
    groups = [
        {"params": [p for p in model.ps if p.ndim > 1], "matrix": True},
        {"params": [p for p in model.ps if p.ndim == 1], "matrix": False},
    ]
    if name == "m3":
        return model, M3(groups, **OPTIONS, frequency=2, backend=backend)
    return model, Muon(groups, **OPTIONS, backend=backend)


def networked(name, ps, **options):
    """The optimizers whose steps a network makes, with weights that matter."""
    options = dict(max_grad_norm=2.0) | options
    generator = torch.Generator().manual_seed(3)
    if name == "learned":
        network = UpdateMLP(exp_mult=0.3, step_mult=0.1)
    else:
        network = VeLONetworks(8, 6, exp_mult=0.1, step_mult=0.1)
    for x in network.parameters():
        torch.nn.init.normal_(x, std=0.1, generator=generator)
    network.requires_grad_(False).to(ps[0].dtype)
    if name == "learned":
        return LearnedOptimizer(ps, network, 0.5, 0.1, **options)
    return VeLO(ps, network, 20, 0.2, 0.1, **options)


def group_of(name: str, p: torch.Tensor) -> str:
    return f"of {p.ndim} axes"


def train(model, optimizer, first, last, rank=None) -> list[float]:
    """Each process has the loss of one seed of a step; one alone has the mean of them all. Returns
    the norms.
    """
    norms = []
    for step in range(first, last):
        optimizer.zero_grad()
        seeds = [PROCESSES * step + k for k in range(PROCESSES)]
        if rank is None:
            loss = torch.stack([model(seed) for seed in seeds]).mean()
        else:
            loss = model(seeds[rank])
        loss.backward()
        step_of(optimizer, loss)
        norms.append(optimizer.grad_norm.item())
    return norms


def step_of(optimizer, loss) -> None:
    optimizer.step(*(loss,) * isinstance(optimizer, TAKE_LOSS))


def whole(x: torch.Tensor) -> torch.Tensor:
    # What is replicated comes as it is.
    return (x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()).clone()


def everything(model, optimizer) -> list[torch.Tensor]:
    """All parameters and states, whole, and what the controller has learned."""
    found = []
    if isinstance(optimizer, DeepNestedOptimizer):
        multipliers = optimizer.get_lr_multipliers().values()
        learned = *optimizer.controller.parameters(), optimizer.state_dict()["nested"]["ema_loss"]
        found += [x.detach().clone() for x in (*multipliers, *learned)]
    found += [x.clone() for x in getattr(optimizer, "losses", ())]
    for p in model.parameters():
        found += [whole(x) for x in (p, *(x for _, x in sorted(optimizer.state[p].items())))]
    return found


def load(model, optimizer, folder) -> None:
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    taken = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
    set_state_dict(model, optimizer, **taken)


def sharded_training(rank, folder, name, backend, mesh) -> dict:
    """Training in one go and with a break, and what each process has of it."""
    model, optimizer = made(name, backend, mesh)
    norms = train(model, optimizer, 0, BREAK, rank)
    checkpoint = folder / f"{name}-{backend}-{mesh}"
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=checkpoint)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parts = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    found: dict = {"at break": everything(model, optimizer)}
    norms += train(model, optimizer, BREAK, STEPS, rank)
    found |= {"norms": norms, "whole": everything(model, optimizer)}
    found["placed"] = all(
        x.placements == p.placements and x.to_local().shape == p.to_local().shape
        for p in model.parameters()
        for name, x in optimizer.state[p].items()
        if x.ndim and name not in NOT_ALIKE
    )
    found["local"] = sum(
        x.to_local().numel()
        for p in model.parameters()
        for x in optimizer.state[p].values()
        if isinstance(x, DTensor)
    )

    model, optimizer = made(name, backend, mesh)
    load(model, optimizer, checkpoint)
    train(model, optimizer, BREAK, STEPS, rank)
    found["loaded"] = everything(model, optimizer)

    model, optimizer = made(name, backend, mesh)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, parts[0], options=sent)
    set_optimizer_state_dict(model, optimizer, parts[1], options=sent)
    train(model, optimizer, BREAK, STEPS, rank)
    found["sent"] = everything(model, optimizer)

    # The loss of one process alone.
    optimizer.zero_grad()
    loss = model(0)
    wrong = loss * (float("nan") if rank == 0 else 1.0)
    # A loss that a step takes need not reach gradients.
    (loss if name == "nested" else wrong).backward()
    step_of(optimizer, wrong)
    if name == "nested":
        found["norms of momenta"] = [
            x["exp_avg"].item() for x in optimizer.get_momentum_stats().values()
        ]
        try:
            optimizer.meta_update(lambda: model(0))
        except TypeError as error:
            found["said"] = str(error)
    found["after skip"] = everything(model, optimizer)
    found["skipped"] = optimizer.skipped.item(), optimizer.skipped_steps.item()
    return found


def placements() -> dict:
    """A step of whole DTensors, and what is said to matrices that are not sharded by rows."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    start = torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).view(5, 3)
    p = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Replicate()]))
    plain = torch.nn.Parameter(start.clone())
    for each in (p, plain):
        optimizer = Muon([each], **OPTIONS)
        gradient = start.cos()
        # Placed otherwise than the parameter.
        each.grad = gradient if each is plain else distribute_tensor(gradient, mesh, [Shard(1)])
        optimizer.step()
    found: dict = {"whole": whole(p), "expected": plain.detach()}
    both = init_device_mesh("cpu", MESHES["hsdp"])
    cut = {
        "columns": distribute_tensor(start, mesh, [Shard(1)]),
        "twice": distribute_tensor(start, both, [Shard(0), Shard(1)]),
        "unlike chunks": DTensor.from_local(
            start[: 3 * (dist.get_rank() == 3)], mesh, [Shard(0)], shape=(3, 3), stride=(3, 1)
        ),
    }
    for name, x in cut.items():
        try:
            Muon([torch.nn.Parameter(x)], **OPTIONS)
            found[name] = ""
        except (TypeError, ValueError) as error:
            found[name] = str(error)
        # A vector of AdamW's may be cut anyhow.
        Muon([torch.nn.Parameter(x)], matrix=False)
    return found


def beside_shards() -> dict:
    """Steps of optimizers by networks: of a shard beside numbers and DTensors that all processes
    have whole, one without elements and one without a gradient; and what is refused.
    """
    mesh = init_device_mesh("cpu", (PROCESSES,))
    starts = [*drawn(-1)[:2], torch.tensor(0.5), torch.zeros(0, 3), *drawn(-1)[2:4]]
    starts = [x.double() for x in starts]
    whole_ones = [1, 4]
    found: dict = {}
    for name in ("learned", "velo"):
        ended = []
        for several in (True, False):
            ps = []
            for place, x in enumerate(starts):
                placement = Replicate() if place in whole_ones else Shard(0)
                x = x.clone()
                if several and x.ndim:
                    x = distribute_tensor(x, mesh, [placement])
                ps.append(torch.nn.Parameter(x, requires_grad=place < 5))
            optimizer = networked(name, ps)
            for step in range(STEPS):
                for p, x in zip(ps[:5], starts, strict=False):
                    g = torch.sin(x * (3 + step))
                    placed = isinstance(p, DTensor)
                    p.grad = distribute_tensor(g, mesh, p.placements) if placed else g
                # Of several processes the mean.
                loss = 3.0 - step + several * (dist.get_rank() - (PROCESSES - 1) / 2)
                optimizer.step(*(loss,) * (name == "velo"))
            ended.append([whole(x) for p in ps for x in (p, *optimizer.state[p].values())])
        found[name], found[f"{name} expected"] = ended
    p = ps[0].detach()
    p = torch.nn.Parameter(distribute_tensor(p.float(), mesh, [Shard(0)]))
    p.grad = torch.ones_like(p)
    of_elements = torch.ones(*p.shape, 1)
    plain = torch.nn.Parameter(whole(p))
    of_whole, of_shards = networked("learned", [plain]), networked("learned", [p])
    plain.grad = whole(p)
    of_whole.step()
    of_shards.load_state_dict(of_whole.state_dict())
    found["loaded"] = [
        [whole(x) for x in of.state[q].values()] for of, q in ((of_shards, p), (of_whole, plain))
    ]
    cases = {
        "kernels": lambda: networked("learned", [p], backend="triton").step(),
        "of elements": lambda: LearnedOptimizer([p], UpdateMLP(1), extra_features=of_elements),
        "state of shards": lambda: of_whole.load_state_dict(of_shards.state_dict()),
        "columns": lambda: networked("velo", [distribute_tensor(whole(p), mesh, [Shard(1)])]),
    }
    for name, make in cases.items():
        try:
            make()
            found[name] = ""
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def work(rank: int, folder: pathlib.Path, cases: list[tuple[str, ...]]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    found: dict = {"placements": placements()}
    if cases == CASES:
        found["beside shards"] = beside_shards()
    for case in cases:
        found["-".join(case)] = sharded_training(rank, folder, *case)
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    folder, *names = sys.argv[1:]
    folder = pathlib.Path(folder)
    cases = [case for case in APART if case[0] in names] if names else CASES
    torch.set_num_threads(1)
    # Forked, so that what takes longest, torch's imports, is done once.
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=work, args=(rank, folder, cases)) for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
