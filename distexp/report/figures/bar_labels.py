"""Labels of stacked bars: the run, and its settings in further lines."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

FEW_BARS = 8
"""So few bars have their settings as labels."""

LONGEST_LINE = 28
"""Characters of a line that fit into the room of the labels. With longer ones, the settings start a new line."""

LINE_HEIGHT = 14  # pixels of a line of a label


def label_axis(names: Sequence[str], text: str = "datum.label") -> alt.Axis:
    """Return the axis of the labels of bars.

    Args:
        names: The labels.
        text: Vega expression of a label.
    """
    broken = f"replace({text}, ' (', ', (')" if _breaks_settings(names) else text
    offset = -LINE_HEIGHT * (_most_lines(names) - 1) / 2
    return alt.Axis(
        labelExpr=f"split({broken}, ', ')", labelLimit=190, ticks=False, domain=False, grid=False, labelOffset=offset
    )


def bar_height(names: Sequence[str], least: int) -> int:
    """Return the height of a bar in pixels, so that all lines of its label are shown."""
    return max(least, LINE_HEIGHT * _most_lines(names) + 12)


def _most_lines(names: Sequence[str]) -> int:
    return max(name.count(", ") + 1 for name in names) + _breaks_settings(names)


def _breaks_settings(names: Sequence[str]) -> bool:
    """Return whether the settings start a line, because a first line with them is too long."""
    return any(" (" in name and len(name.split(", ")[0]) > LONGEST_LINE for name in names)
