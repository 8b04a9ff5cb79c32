"""What all pictures of results are drawn with: colours, sizes in words, bars of providers, curves.

The models' distribution carries this folder as a relative symbolic link. It imports matplotlib
alone, where something is drawn.
"""

from .bars import Bar, Group, Panel, Strip, draw_bars
from .style import (
    CURVES,
    NEUTRAL,
    OURS,
    TEXT,
    WIDTH,
    behind,
    colour,
    dress,
    is_ours,
    legend,
    panels,
    save,
)
from .words import WORDS, case_in_words, common_words, number

__all__ = [
    "CURVES",
    "NEUTRAL",
    "OURS",
    "TEXT",
    "WIDTH",
    "WORDS",
    "Bar",
    "Group",
    "Panel",
    "Strip",
    "behind",
    "case_in_words",
    "colour",
    "common_words",
    "draw_bars",
    "dress",
    "is_ours",
    "legend",
    "number",
    "panels",
    "save",
]
