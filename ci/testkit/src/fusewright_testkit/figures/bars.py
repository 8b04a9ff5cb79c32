"""Bars of providers: a strip for each operation, in it a panel for each pass, in it the cases."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from .style import NEUTRAL, OURS, SMALL, TEXT, TITLE, WIDTH, colour, is_ours
from .words import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
LEFT, BETWEEN, RIGHT = 2.05, 0.3, 0.12
BAR, GAP, LINE = 0.155, 0.13, 0.15
STRIP_TITLE, PANEL_TITLE, TICKS, BELOW = 0.19, 0.2, 0.24, 0.14
HEADING, LEGEND_LINE = 0.56, 0.21
# Characters of a case's label in a line; inches of a character and of the sign before it.
LABEL, CHARACTER, SIGN = 32, 0.068, 0.5
# Cases whose best rates differ by so many times have panels of their own.
MAGNITUDE = 8.0
BETTER = "Higher is better."
SPEEDS = " 1.50× beside a bar of ours: 1.5 times as fast as the best peer; below 1 it is slower."
# From there on numbers at a scale are in words.
THOUSANDS = 9999
# Beside the longest bar there is room for its number.
ROOM = 1.2


class Bar(NamedTuple):
    """What a provider was measured at: its rate, more is better, and the time of one call."""

    rate: float
    time: float


Group = dict[str, Bar]


class Panel(NamedTuple):
    """One pass: its title with the unit, and the bars by case and provider."""

    title: str
    groups: dict[str, Group]


class Strip(NamedTuple):
    """One operation: panels beside each other whose cases have the same labels."""

    title: str
    note: str
    panels: list[Panel]
    labels: dict[str, str]


def speed(name: str, group: Group) -> float | None:
    """How many times as fast as the best peer one of ours is; None where it has no peer."""
    peers = [bar.time for other, bar in group.items() if not is_ours(other)]
    return min(peers) / group[name].time if peers and is_ours(name) else None


def ordered(names: list[str]) -> list[str]:
    """Ours first, then its variants, then the others as they come."""
    return sorted(dict.fromkeys(names), key=lambda name: (not is_ours(name), name != OURS))


def magnitudes(strip: Strip) -> list[Strip]:
    """The strip in parts whose cases are of one magnitude, the first with the title."""
    best = {
        case: max(bar.rate for p in strip.panels for bar in p.groups.get(case, {}).values())
        for case in strip.labels
    }
    parts: list[list[str]] = []
    for case in sorted(best, key=best.__getitem__, reverse=True):
        if parts and best[parts[-1][0]] <= MAGNITUDE * best[case]:
            parts[-1].append(case)
        else:
            parts.append([case])
    order = list(strip.labels)
    in_order = [sorted(part, key=order.index) for part in parts]
    return [
        Strip(
            "" if later else strip.title,
            "" if later else strip.note,
            [Panel(p.title, {c: p.groups.get(c, {}) for c in part}) for p in strip.panels],
            {case: strip.labels[case] for case in part},
        )
        for later, part in enumerate(sorted(in_order, key=lambda part: order.index(part[0])))
    ]


def wrapped(label: str) -> str:
    """A label in lines that end behind a comma."""
    return textwrap.fill(label.replace(" ", "\xa0").replace(",\xa0", ", "), LABEL)


class Places(NamedTuple):
    """Of a strip: the providers of each case, where its bars begin, and the height of all."""

    names: dict[str, list[str]]
    starts: dict[str, float]
    height: float


def places(strip: Strip) -> Places:
    names: dict[str, list[str]] = {}
    starts, height = {}, GAP / 2
    for case, label in strip.labels.items():
        names[case] = ordered([name for p in strip.panels for name in p.groups[case]])
        lines = wrapped(label).count("\n") + 1
        room = max(BAR * len(names[case]), LINE * lines)
        starts[case] = height + (room - BAR * len(names[case])) / 2
        height += room + GAP
    return Places(names, starts, height - GAP / 2)


def legend_columns(names: list[str]) -> int:
    """As many as the figure has room for."""
    for columns in range(len(names), 1, -1):
        # matplotlib fills one column after the other.
        lines = -(-len(names) // columns)
        filled = [names[start : start + lines] for start in range(0, len(names), lines)]
        if sum(SIGN + CHARACTER * max(map(len, some)) for some in filled) <= WIDTH:
            return columns
    return 1


def draw_bars(
    heading: str, strips: list[Strip], line: tuple[str, float, str] | None = None
) -> Figure:
    """The rates of all providers, and beside each bar of ours how many times as fast as the best
    peer it is.

    Args:
        heading: what is shown where.
        strips: one or more.
        line: a rate to compare with: the unit of the panels that have it, the rate, its name.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    parts = [part for strip in strips for part in magnitudes(strip)]
    laid = [places(part) for part in parts]
    names = ordered([n for place in laid for some in place.names.values() for n in some])
    handles: list[Any] = [Patch(color=colour(name)) for name in names]
    if line:
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1.0))
        names = [*names, line[2]]
    columns = legend_columns(names)
    top = HEADING + LEGEND_LINE * -(-len(names) // columns) + 0.1

    heights = [
        (STRIP_TITLE if part.title else 0.0) + PANEL_TITLE + place.height + TICKS + BELOW
        for part, place in zip(parts, laid, strict=True)
    ]
    tall = top + sum(heights)
    figure = Figure(figsize=(WIDTH, tall))

    def write(x: float, y: float, text: str, **how: Any) -> None:
        """``x`` and ``y`` in inches from the top left."""
        figure.text(x / WIDTH, 1.0 - y / tall, text, va="top", **how)

    write(0.1, 0.08, heading, fontsize=TITLE, fontweight="bold")
    compared = any(
        speed(name, group) is not None
        for part in parts
        for panel in part.panels
        for group in panel.groups.values()
        for name in group
    )
    write(0.1, 0.32, BETTER + (SPEEDS if compared else ""), fontsize=SMALL, color="#444444")
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.02 / WIDTH, 1.0 - (HEADING - 0.06) / tall),
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        columnspacing=1.2,
        handlelength=1.4,
    )
    for part, place, height in zip(parts, laid, heights, strict=True):
        y = top
        if part.title:
            write(0.1, y, part.title, fontsize=TEXT, fontweight="bold")
            write(WIDTH - RIGHT, y, part.note, fontsize=SMALL, color="#444444", ha="right")
            y += STRIP_TITLE
        y += PANEL_TITLE
        count = len(part.panels)
        wide = (WIDTH - LEFT - RIGHT - BETWEEN * (count - 1)) / count
        for column, panel in enumerate(part.panels):
            x = LEFT + column * (wide + BETWEEN)
            bottom = 1.0 - (y + place.height) / tall
            axes = figure.add_axes((x / WIDTH, bottom, wide / WIDTH, place.height / tall))
            draw_panel(axes, panel, place)
            if not any(panel.groups.values()):
                axes.set_axis_off()
            elif line and line[0] in panel.title:
                axes.axvline(line[1], color="black", linestyle="--", linewidth=1.0)
                axes.set_xlim(right=max(axes.get_xlim()[1], 1.05 * line[1]))
            if column:
                axes.set_yticks([])
            else:
                label_cases(axes, part.labels, place)
        top += height
    return figure


def draw_panel(axes: Axes, panel: Panel, place: Places) -> None:
    """The bars of one pass, the first case above."""
    most = max((bar.rate for group in panel.groups.values() for bar in group.values()), default=1.0)

    def lacks(y: float) -> None:
        axes.text(0.01 * most, y, "not measured", va="center", fontsize=7.5, color=NEUTRAL)

    for case, group in panel.groups.items():
        if not group:
            lacks(place.starts[case] + len(place.names[case]) * BAR / 2)
            continue
        for line, name in enumerate(place.names[case]):
            y = place.starts[case] + (line + 0.5) * BAR
            if name not in group:
                lacks(y)
                continue
            axes.barh(y, group[name].rate, 0.88 * BAR, color=colour(name))
            if times := speed(name, group):
                weight = "bold" if name == OURS else "normal"
                at = group[name].rate + 0.012 * most
                axes.text(at, y, f"{times:.2f}×", va="center", fontsize=SMALL, fontweight=weight)
    axes.set(xlim=(0.0, ROOM * most), ylim=(place.height, 0.0))
    axes.set_title(panel.title, fontsize=SMALL, loc="left", pad=4.0)
    axes.tick_params(labelsize=7.5, length=2.0, pad=2.0)
    axes.locator_params(axis="x", nbins=5)
    if most > THOUSANDS:
        axes.xaxis.set_major_formatter(lambda x, _: number(f"{x:.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.5, alpha=0.4)
    axes.set_axisbelow(True)


def label_cases(axes: Axes, labels: dict[str, str], place: Places) -> None:
    """Each case in words, in the middle of its bars."""
    middles = [place.starts[c] + BAR * len(place.names[c]) / 2 for c in labels]
    axes.set_yticks(middles, [wrapped(text) for text in labels.values()])
    axes.tick_params(axis="y", length=0.0, labelsize=SMALL)
