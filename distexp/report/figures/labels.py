"""Labels of charts: those of stacked bars, and those of marks, which hide no other mark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import altair as alt

FEW_BARS = 8  # so few bars have their settings as labels
# Characters of a line that fit into the room of the labels. With longer ones, the settings start a new line.
LONGEST_LINE = 28
# Start of a key that has no room in a line with its end and a value. The end starts a new line.
LONG_KEY = r"(\w{10,}_)(?=\w{5,}=)"
LINE_HEIGHT = 14  # pixels of a line of a label
# Widths in pixels. From each on, up to the next, labels are where they fit at the smaller one.
CHART_WIDTHS = (220, 420, 800, 100_000)
ROOM, WIDEST_LETTER = 190, 7.5  # pixels of the labels of bars
LETTER, LINE = 6.6, 12.0  # pixels of a letter at the font size of labels
MARK = 6.0  # pixels from the center of a mark to its border, at most
Row = dict[str, Any]
Range = tuple[float, float]  # lowest and highest value of an axis


def label_axis(names: Sequence[str], text: str = "datum.label") -> alt.Axis:
    """Return the axis of the labels of bars; ``text`` is the Vega expression of a label."""
    broken = f"replace({text}, ' (', ', (')" if _breaks_settings(names) else text
    if any(re.search(LONG_KEY, name) for name in names):
        pattern = LONG_KEY.replace("\\", "\\\\")
        broken = f"replace({broken}, regexp('{pattern}', 'g'), '$1, ')"
    offset = -LINE_HEIGHT * (_most_lines(names) - 1) / 2
    # The room is that of the widest font: the library that draws the chart measures another one than a browser has.
    ends = ", | (?=\\()" if _breaks_settings(names) else ", "
    longest = max(len(line) for name in names for line in re.split(ends, re.sub(LONG_KEY, r"\1, ", name)))
    return alt.Axis(
        labelExpr=f"split({broken}, ', ')", labelLimit=ROOM, ticks=False, domain=False, grid=False, labelOffset=offset,
        minExtent=min(WIDEST_LETTER * longest, ROOM),
    )  # fmt: skip


def bar_height(names: Sequence[str], least: int) -> int:
    """Return the height of a bar in pixels, so that all lines of its label are shown."""
    return max(least, LINE_HEIGHT * _most_lines(names) + 12)


def _most_lines(names: Sequence[str]) -> int:
    return max(name.count(", ") + len(re.findall(LONG_KEY, name)) + 1 for name in names) + _breaks_settings(names)


def _breaks_settings(names: Sequence[str]) -> bool:
    """Return whether the settings start a line, because a first line with them is too long."""
    return any(" (" in name and len(name.split(", ")[0]) > LONGEST_LINE for name in names)


@dataclass(frozen=True)
class Frame:
    """The ranges of the fields ``cost`` and ``speed`` of a chart, and its size in pixels."""

    x: Range
    y: Range
    width: float
    height: float

    def pixels(self, row: Row) -> tuple[float, float]:
        """Return the position of a row, from the upper left corner."""
        (left, right), (bottom, top) = self.x, self.y
        across, up = (row["cost"] - left) / (right - left), (row["speed"] - bottom) / (top - bottom)
        return self.width * across, self.height * (1 - up)


@dataclass(frozen=True)
class Place:
    """A place next to a mark: alignment of the text, and its distance in pixels."""

    align: str
    dx: float
    dy: float

    def box(self, x: float, y: float, text: str) -> Box:
        """Return where a text would be, next to a mark."""
        left = x + self.dx - (LETTER * len(text) if self.align == "right" else 0.0)
        return Box(left, y + self.dy - LINE / 2, left + LETTER * len(text), y + self.dy + LINE / 2)


PLACES = (Place("left", 12, -6), Place("right", -12, -6), Place("left", 12, 8), Place("right", -12, 8))
"""Places in the order in which they are tried."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Return whether two rectangles have a common point."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def place_labels(
    points: Sequence[Row], marks: Sequence[Row], steps: Sequence[Sequence[Row]], frame: Frame
) -> dict[Place, list[Row]]:
    """Return the rows of the labels by their place. A label without room at a width has no row for it.

    The first points get a label first. Labels never hide other marks, and avoid lines with steps if they can.
    """
    placed: dict[Place, list[Row]] = {place: [] for place in PLACES}
    for low, high in pairwise(CHART_WIDTHS):
        shown = {"from": 0 if low == CHART_WIDTHS[0] else low, "to": high}
        at_width = replace(frame, width=low)
        lines = [box for line in steps for box in _step_boxes(at_width, line)]
        for point, place in _places_in(at_width, points, marks, lines):
            placed[place].append({**point, **shown})
    return placed


def is_shown() -> Any:
    """Return the opacity of a label: 1 if the chart has the width that its place was chosen for."""
    return alt.condition("width >= datum.from && width < datum.to", alt.value(1), alt.value(0))


def _places_in(
    frame: Frame, points: Sequence[Row], marks: Sequence[Row], lines: Sequence[Box]
) -> Iterator[tuple[Row, Place]]:
    centers = [frame.pixels(row) for row in (*points, *marks)]
    taken = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in centers]
    for point, (x, y) in zip(points, centers, strict=False):
        for text in point["labels"]:  # the longest one that fits
            boxes = {place: place.box(x, y, text) for place in PLACES}
            inside = {place: box for place, box in boxes.items() if box.left >= 0 and box.right <= frame.width}
            free = [place for place, box in inside.items() if not any(map(box.overlaps, taken))]
            if free:
                best = min(free, key=lambda place: any(map(boxes[place].overlaps, lines)))
                taken.append(boxes[best])
                yield {**point, "label": text}, best
                break


def _step_boxes(frame: Frame, line: Sequence[Row]) -> Iterator[Box]:
    """Yield the horizontal and the vertical part of each step of a line that rises to the right."""
    for (left, bottom), (right, top) in pairwise(map(frame.pixels, line)):
        yield Box(left, bottom - 1, right, bottom + 1)
        yield Box(right - 1, top, right + 1, bottom)
