"""Where attention to selected keys is faster than attention to all: both, over tokens, keys, heads.

    PYTHONPATH=packages/gsa/src:ci/testkit/src python packages/gsa/crossover.py --out
    packages/gsa/results

Needs a GPU. Writes crossover-ENVIRONMENT.csv and its picture. Selections are of two kinds, random
and clustered, as ``bench/selections.py`` says. With --selections FILE there is a third: what the
layers of a trained HybridLM select in text, of the lengths and numbers of keys that the file has,
which ``python -m fusewright_models.studies.selection_pays --variant selected --selections FILE``
writes. Rows of other sizes that the CSV has stay.
"""

from __future__ import annotations

import csv
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from fusewright.gsa import sparse_attention
from fusewright_testkit import figures
from fusewright_testkit.bench import environment_name, load
from fusewright_testkit.timing import event_time
from matplotlib.figure import Figure

BF16 = torch.bfloat16
HEADS, WIDTH = 16, 64
KEY_HEADS = (16, 4, 2)
TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
# Selected keys of each query.
SLOTS = (256, 512, 1024, 2048)
KINDS = ("random", "clustered")
STYLES = {"random": "--", "clustered": "-", "trained": ":"}
COLUMNS = ["tokens", "slots", "heads", "key_heads", "width", "selection", "pass", "provider", "ms"]
# Copies of the selected keys and values in bytes, beyond which the gather-based reference is not
# run: its backward pass holds several.
MOST_COPIES = 16 << 30

Tensor = torch.Tensor
Row = dict[str, str]
bench = load(pathlib.Path(__file__).parent)


def trained(file: pathlib.Path) -> Iterator[tuple[int, str, np.ndarray]]:
    """Tokens, "trained LAYER", and of each query the distances from one selected key to the next,
    the first from -1, and 0 for a slot that holds none.
    """
    with np.load(file) as arrays:
        for name, distances in arrays.items():
            layer, tokens, _ = name.split()
            yield int(tokens), f"trained {layer}", distances


def selection_of(distances: np.ndarray) -> tuple[Tensor, Tensor]:
    """Indices ``[1, T, slots]`` and count ``[1, T]``."""
    steps = torch.from_numpy(distances.astype(np.int32)).cuda().unsqueeze(0)
    indices = (steps.cumsum(-1) - 1).int().masked_fill_(steps == 0, -1)
    return indices, (steps > 0).sum(-1).int()


def measured(
    tokens: int,
    all_slots: Iterable[int],
    of_layers: Iterable[tuple[int, str, np.ndarray]] = (),
    *,
    gather: bool = True,
) -> Iterator[Row]:
    """Dense attention, ours at each selection, and the gather-based reference where its copies have
    room.
    """
    q = torch.randn(1, tokens, HEADS, WIDTH, device="cuda", dtype=BF16)
    of_heads = {
        heads: [torch.randn(1, tokens, heads, WIDTH, device="cuda", dtype=BF16) for _ in "kv"]
        for heads in KEY_HEADS
    }
    for k, v in of_heads.values():
        # Dense attention asks for no selection.
        yield from rows("dense", bench.dense_attention, "", [q, k, v, None, None])
    selections: list[tuple[str, Callable[[], tuple[Tensor, Tensor]]]] = [
        (kind, partial(bench.selection, tokens, slots, kind))
        for slots, kind in itertools.product(all_slots, KINDS)
    ]
    selections += [
        (kind, partial(selection_of, distances))
        for length, kind, distances in of_layers
        if length == tokens
    ]
    for kind, choose in selections:
        chosen = choose()
        copies = 4 * tokens * chosen[0].shape[-1] * HEADS * WIDTH
        for k, v in of_heads.values():
            tensors = [q, k, v, *chosen]
            yield from rows("fusewright", sparse_attention, kind, tensors)
            if gather and copies <= MOST_COPIES and kind == "random":
                yield from rows("gather", bench.gathered_attention, kind, tensors)
            torch.cuda.empty_cache()


def rows(provider: str, op: Callable[..., Tensor], kind: str, tensors: list) -> Iterator[Row]:
    """Medians of the forward pass and of both, in milliseconds, each of eager calls."""
    q, k, v, *selected = tensors
    slots = "" if selected[0] is None else selected[0].shape[-1]
    sizes = dict(tokens=q.shape[1], slots=slots, heads=HEADS, key_heads=k.shape[2], width=WIDTH)
    leaves, g = [x.detach().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    for name, call in (
        ("fwd", torch.no_grad()(lambda: op(*tensors))),
        ("fwd+bwd", lambda: torch.autograd.grad(op(*leaves, *selected), leaves, g)),
    ):
        told = {"selection": kind, "pass": name, "provider": provider}
        row = {name: str(value) for name, value in (sizes | told).items()}
        yield row | {"ms": f"{event_time(call).ms:.4f}"}


def draw(rows: list[Row]) -> Figure:
    """Dense attention's time over ours, of both passes: above one selecting pays. Lines are solid
    where selections are clustered, dashed where they are random and dotted where they are trained.
    """
    titles = [f"{HEADS} heads, {key_heads} key heads" for key_heads in KEY_HEADS]
    heading = "How many times as fast selected keys are as dense attention, higher is better"
    figure, panels = figures.panels(titles, heading=heading, height=4.0, sharey=True)
    both = [row for row in rows if row["pass"] == "fwd+bwd"]
    for axes, key_heads in zip(panels, KEY_HEADS, strict=True):
        mine = [row for row in both if int(row["key_heads"]) == key_heads]
        dense = {int(r["tokens"]): float(r["ms"]) for r in mine if r["provider"] == "dense"}
        ours = [row for row in mine if row["provider"] == "fusewright"]
        all_slots = sorted({int(row["slots"]) for row in ours})
        for slots, colour in zip(all_slots, figures.CURVES, strict=False):
            for kind in dict.fromkeys(row["selection"] for row in ours):
                name = kind.partition(" ")[0]
                some = [r for r in ours if int(r["slots"]) == slots and r["selection"] == kind]
                some.sort(key=lambda row: int(row["tokens"]))
                tokens = [int(row["tokens"]) for row in some]
                gain = [dense[int(row["tokens"])] / float(row["ms"]) for row in some]
                label = f"{slots:,} {name} keys" if some else None
                axes.plot(tokens, gain, STYLES[name], color=colour, marker=".", label=label)
        axes.axhline(1.0, color="k", linewidth=0.8)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(list(dense), [f"{n // 1024}k" for n in dense])
        axes.set_yticks([0.5, 1.0, 2.0, 4.0], ["½", "1", "2", "4"])
        axes.minorticks_off()
        figures.dress(axes, x="tokens")
    panels[0].set_ylabel("dense over selected, both passes", fontsize=figures.TEXT)
    figures.legend(figure)
    return figure


def key_of(row: Row) -> tuple[str, ...]:
    """All but the time."""
    return tuple(value for name, value in row.items() if name != "ms")


def order_of(row: Row) -> tuple:
    """Tokens by tokens, keys by keys."""
    return int(row["tokens"]), int(row["slots"] or 0)


def main(
    out: Annotated[pathlib.Path, typer.Option(help="Folder of CSV and picture.")],
    least: Annotated[int, typer.Option(help="The smallest number of tokens.")] = 0,
    most: Annotated[int, typer.Option(help="The greatest number of tokens.")] = 131072,
    slots: Annotated[list[int] | None, typer.Option(help="Selected keys of each query.")] = None,
    gather: Annotated[bool, typer.Option(help="Time copies of the selected keys too.")] = True,
    selections: Annotated[
        pathlib.Path | None, typer.Option(help="What the layers of a trained model select.")
    ] = None,
) -> None:
    """Time both and write the table and its picture."""
    file = out / f"crossover-{environment_name()}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, ...], Row] = {}
    if file.is_file():
        with file.open(newline="") as stream:
            found = {key_of(row): row for row in csv.DictReader(stream)}
    of_layers = [] if selections is None else list(trained(selections))
    for tokens in TOKENS:
        if least <= tokens <= most:
            for row in measured(tokens, slots or SLOTS, of_layers, gather=gather):
                found[key_of(row)] = row
                # After each: a run that is cut off leaves what it has.
                write(file, sorted(found.values(), key=order_of))
    figures.save(draw(list(found.values())), file)


def write(file: pathlib.Path, rows: Iterable[Row]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    typer.run(main)
