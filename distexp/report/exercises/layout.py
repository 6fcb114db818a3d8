"""Layouts of the workshop's tables, read from ``workshop.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import format_setting
from distexp.report.exercises.columns import ExerciseColumn

RowKey = tuple[Any, ...]
"""Values of the settings that identify a row."""


@dataclass(frozen=True)
class Layout:
    """The layout of a table; ``workshop.yaml`` documents the fields."""

    title: str
    rows: Mapping[str, list[Any]]
    label: list[str]
    columns: list[ExerciseColumn]
    header: list[str] = field(default_factory=lambda: [""])
    first_label: list[str] | None = None
    texts: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    transpose: bool = False
    printed: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    quiz: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[RowKey]:
        """The keys of the workshop's rows, in their order."""
        return list(product(*self.rows.values()))

    def key_of(self, group: RunGroup) -> RowKey:
        """Return the key of the row that shows a group."""
        return tuple(group.setting(name) for name in self.rows)

    def labels_of(self, key: RowKey) -> tuple[str, ...]:
        """Return the labels of a row, one for each column of the header."""
        if self.first_label is not None and key == self.keys[0]:
            return tuple(self.first_label)
        values = {
            name: self.texts.get(name, {}).get(value, format_setting(value))
            for name, value in zip(self.rows, key, strict=True)
        }
        return tuple(text.format(**values) for text in self.label)


@cache
def load_layouts() -> dict[str, Layout]:
    """Read all layouts by the name of their exercise."""
    content = yaml.safe_load((files("distexp.report.exercises") / "workshop.yaml").read_text())
    return {
        name: Layout(**{**table, "columns": [ExerciseColumn(**column) for column in _flatten(table["columns"])]})
        for name, table in content["tables"].items()
    }


def _flatten(columns: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the columns of a list with nested lists."""
    for column in columns:
        if isinstance(column, list):
            yield from _flatten(column)
        else:
            yield column
