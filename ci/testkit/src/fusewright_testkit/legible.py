"""Whether the texts of a picture can be read: none is cut, none lies on another."""

from __future__ import annotations

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox


def texts(figure: Figure) -> dict[str, Bbox]:
    """Where in the picture each text is; of a scale those numbers that are shown."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title]
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                found += [axis.label, *(tick.label1 for tick in ticks)]
    shown = [text for text in found if text.get_text() and text.get_visible()]
    return {f"{n}: {text.get_text()}": text.get_window_extent() for n, text in enumerate(shown)}


def assert_legible(figure: Figure) -> None:
    """Raises:
    AssertionError: a text is cut at the edge of the picture or lies on another text.
    """
    found = texts(figure)
    told = [] if found else ["no text"]
    told += [f"{name} is cut" for name, box in found.items() if not holds(figure.bbox, box)]
    for (name, one), (other, another) in itertools.combinations(found.items(), 2):
        if one.overlaps(another):
            told.append(f"{name} lies on {other}")
    if told:
        raise AssertionError("; ".join(told))


def holds(whole: Bbox, part: Bbox) -> bool:
    return bool(((part.min >= whole.min) & (part.max <= whole.max)).all())
