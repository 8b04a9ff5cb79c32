"""The look that all pictures have in common, and the file that each was drawn from."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "fusewright"
# Inches; a README shows them in some 830 pixels, so that text of 8 points has 10 there.
WIDTH = 9.0
DPI = 150
TITLE, TEXT, SMALL = 10.0, 9.0, 8.0
NEUTRAL = "#777777"
# Of curves that are no provider's: Okabe and Ito's colours, which colour-blind readers tell apart.
CURVES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A colour for each provider in all pictures: ours are orange, torch's own optimizers grey, SDPA
# violet, what torch.compile makes light blue.
COLOURS = {
    OURS: "#D55E00",
    "fusewright-adamw": "#F5C09A",
    "fusewright-attention": "#A85000",
    "fusewright-captured": "#8F3F00",
    "fusewright-compile": "#EFA06A",
    "fusewright-compile-captured": "#B3661F",
    "fusewright-kept": "#F7CBAA",
    "fusewright-plain-captured": "#5A2700",
    "fusewright-plain": "#F0B080",
    "fusewright-recompute": "#F3B58C",
    "fusewright-stored": "#F2AD7F",
    "torch": "#999999",
    "reference": "#8A8A8A",
    "torch-foreach": "#C4C4C4",
    "torch-fused": "#6E6E6E",
    "torch-fused-capturable": "#454545",
    "compile": "#56B4E9",
    "compile-loop": "#A8D8F4",
    "reference-compile": "#5FB0DF",
    "sdpa": "#AA5599",
    "sdpa-compile": "#6A2A60",
    "sdpa-cudnn": "#8E4585",
    "sdpa-flash": "#C98BBF",
    "sdpa-mask": "#E3BEDC",
    "sdpa-unpruned": "#D8A5CF",
    "fa4": "#0072B2",
    "flex": "#E69F00",
    "liger": "#009E73",
    "liger-logits": "#7FCEB9",
    "quack": "#CC79A7",
    "quack-logits": "#E5BCD3",
    "cce": "#DDCC77",
    "fla": "#117733",
    "fla-nsa": "#66A97A",
    "apex": "#1B5E20",
    "torchao-8bit": "#6699CC",
    "gram-newton-schulz": "#994455",
    "dion": "#997700",
    "pylo": "#004488",
    "titans-pytorch": "#882255",
    "separate": "#332288",
    "dense": "#44AA99",
    "grouped_mm": "#4477AA",
    "loop": "#BBAA77",
    "one-by-one": "#999933",
    "distributions": "#AA8855",
    "checkpoint": "#3F7F7F",
}
SOURCE = "Source"


def is_ours(provider: str) -> bool:
    return provider.startswith(OURS)


def family(provider: str) -> str:
    """The name of a provider without its version, and without what it ran in brackets."""
    return re.sub(r"-\d[\w.]*$", "", provider.partition(" (")[0])


def colour(provider: str) -> str:
    """Raises:
    ValueError: no colour is declared.
    """
    if (name := family(provider)) not in COLOURS:
        raise ValueError(f"wanted a provider that has a colour in {__name__}.COLOURS, got {name!r}")
    return COLOURS[name]


def panels(
    titles: Sequence[str], *, heading: str, height: float = 3.4, width: float = WIDTH, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of panels beside each other, a title above each and one above all.

    Args:
        titles: of the panels.
        heading: above all; it says what is shown.
        height: of the figure, in inches.
        width: likewise.
        more: goes to ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    (axes,) = figure.subplots(1, len(titles), squeeze=False, **more)
    figure.suptitle(heading, fontsize=TITLE, fontweight="bold")
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, fontsize=TEXT)
    return figure, list(axes)


def dress(axes: Axes, *, x: str, y: str = "") -> None:
    """Labels, a faint grid, and no frame on the sides that have no scale."""
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.5, alpha=0.4)
    axes.set_axisbelow(True)


def legend(figure: Figure, columns: int = 4) -> None:
    """One legend below all panels, each name once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(columns, len(handles)),
            frameon=False,
            fontsize=SMALL,
        )


def digest(file: Path) -> str:
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def save(figure: Figure, file: Path) -> None:
    """Write the picture of a result file beside it, with the digest of what it was drawn from."""
    # Without the library's version, the same results give the same bytes.
    about = {"Software": None, SOURCE: digest(file)}
    figure.savefig(file.with_suffix(".png"), dpi=DPI, metadata=about)


def behind(file: Path) -> bool:
    """Whether the picture of a result file is missing, or was drawn from other rows."""
    picture = file.with_suffix(".png")
    return not picture.is_file() or source_of(picture) != digest(file)


def source_of(picture: Path) -> str | None:
    """The digest in a picture; None where it has none."""
    data = picture.read_bytes()
    place = data.find(b"tEXt" + SOURCE.encode("ascii") + b"\0")
    if place < 0:
        return None
    (length,) = struct.unpack(">I", data[place - 4 : place])
    chunk = data[place : place + 4 + length]
    (checksum,) = struct.unpack(">I", data[place + 4 + length : place + 8 + length])
    if zlib.crc32(chunk) != checksum:
        return None
    return chunk.partition(b"\0")[2].decode("latin-1")
