"""A layout and some trainings to a table of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import format_setting
from distexp.report.data.text_table import TextTable
from distexp.report.exercises.cells import Measure, worded

PRINTED = "printed in the workshop"


@dataclass(frozen=True)
class Layout:
    """What a table looks like: a line for each training, and what is told of it.

    ``lines`` are those that the workshop prints, by what ``key`` reads off a training; ``label`` words a line, one
    text for each title in ``corner``.
    """

    title: str
    corner: tuple[str, ...]
    key: Callable[[RunGroup], Any]
    lines: tuple[Any, ...]
    label: Callable[[Any], tuple[str, ...]]
    measures: tuple[Measure, ...]
    across: bool = True  # a line is a row; else it is a column
    printed: dict[Any, dict[str, str]] = field(default_factory=dict)  # by line and title of a measure
    note: Callable[[Sequence[RunGroup]], str] = lambda groups: ""


def fill(exercise: str, layout: Layout, overview: Overview, groups: Sequence[RunGroup]) -> TextTable:
    """The table of an exercise; lines that the workshop has and nobody ran say so."""
    lines = _lines(layout, groups)
    base = next((group for key, group in lines if key == layout.lines[0] and group and group.completed), None)
    counts = Counter(key for key, _ in lines)
    texts: list[tuple[str, ...]] = []
    for key, group in lines:
        label = layout.label(key)
        if group is not None and counts[key] > 1:
            label = (label[0] + _told_apart(overview, group), *label[1:])
        first = True
        cells = []
        for measure in layout.measures:
            cells.append(worded(measure, group, base, first=first))
            first = False
        texts.append((*label, *cells))
        if key in layout.printed:
            figures = layout.printed[key]
            texts.append(
                (PRINTED, *[""] * (len(label) - 1), *(figures.get(each.title, "") for each in layout.measures))
            )
    note = " ".join(filter(None, [_scaled_down(groups), layout.note(groups)]))
    return _laid_out(f"{layout.title} ({exercise})", layout, texts, note)


def _lines(layout: Layout, groups: Sequence[RunGroup]) -> list[tuple[Any, RunGroup | None]]:
    """The workshop's lines in its order, each with its training or trainings, then what it does not have."""
    found: dict[Any, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(layout.key(group), []).append(group)
    further = [key for key in found if key not in layout.lines]
    ordered = [*layout.lines, *further]
    if all(isinstance(key, int) for key in ordered):
        ordered.sort()
    return [(key, group) for key in ordered for group in found.get(key, [None])]


def _told_apart(overview: Overview, group: RunGroup) -> str:
    chosen = [f"{name}={format_setting(group.setting(name), 24)}" for name in overview.varied[:4]
              if group.setting(name) is not None]  # fmt: skip
    return f", {', '.join(chosen)}" if chosen else f", run {group.label}"


def _laid_out(title: str, layout: Layout, texts: Sequence[tuple[str, ...]], note: str) -> TextTable:
    width = len(layout.corner)
    if layout.across:
        header = (*layout.corner, *(measure.title for measure in layout.measures))
        return TextTable(title, header, tuple(texts), note)
    categories = any(measure.category for measure in layout.measures)
    names = [(measure.category, measure.title) if categories else (measure.title,) for measure in layout.measures]
    corner = ("Category", "Metric") if categories else ("Metric",)
    rows = tuple((*name, *(text[width + n] for text in texts)) for n, name in enumerate(names))
    return TextTable(title, (*corner, *(text[0] for text in texts)), rows, note)


def _scaled_down(groups: Sequence[RunGroup]) -> str:
    scales = {(group.rows[0].record.config.get("scale") or {}).get("name", "full") for group in groups}
    down = sorted(scales - {"full"})
    return (
        f"scale={down[0]}: a small model on a few samples, so only the shape of this table means something."
        if down
        else ""
    )
