"""Layouts of the workshop's tables from ``workshop.yaml``, and the text of the cells of their columns."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import product
from operator import itemgetter
from typing import Any

import yaml

from distexp.report.data.overview import failure_reasons
from distexp.report.data.repeats import RunGroup, ratio_text
from distexp.report.data.rows import format_setting
from distexp.system.units import MIN_GIB

UNITS = {  # factors from the unit of the metric, which is MiB for memory
    "": 1.0,
    "GB": 2**20 / 1e9,
    "MB": 2**20 / 1e6,
    "GiB": 1 / 1024,
    "percent": 100.0,
    "milliseconds": 1e3,
    "million": 1e-6,
}

# Units of a cell below 0.1 of the column's unit, with their factor.
SMALLER_UNITS = {"GB": ("MB", 1e3), "GiB": ("MiB", 1024.0)}
MEASURED_UNTIL_FAILURE = ("peak_mib", "average_mib")  # ends of the names of metrics that a failed run has too

RowKey = tuple[Any, ...]  # values of the settings that identify a row


@dataclass(frozen=True)
class ExerciseColumn:
    """A column of a table; ``workshop.yaml`` documents the fields."""

    title: str
    metric: str = ""
    setting: str = ""
    epoch: int | None = None
    gpu_0: bool = False
    relative: bool = False
    inverse: bool = False
    unit: str = ""
    digits: int = 1
    suffix: str = ""
    category: str = ""

    def read(self, group: RunGroup, baseline: RunGroup | None) -> list[float]:
        """Return the values of a group's runs, in the unit of the column; for a ratio one value."""
        values = self._values(group)
        if not self.relative:
            return values
        others = self._values(baseline) if baseline else []
        if not values or not others or not statistics.fmean(values):
            return []
        ratio = statistics.fmean(values) / statistics.fmean(others)
        return [1 / ratio if self.inverse else ratio]

    def _values(self, group: RunGroup) -> list[float]:
        if self.metric == "parameters":
            values = [float(row.record.built.parameters) for row in group.counted_rows if row.record.built][:1]
        elif self.gpu_0:
            values = _first_gpu(group, self.metric)
        elif self.epoch is not None:
            position = self.epoch - 1 if self.epoch > 0 else self.epoch  # counted from 1; -1 is the last one
            lists = [getattr(row.record.metrics, self.metric) for row in group.counted_rows]
            values = [by_epoch[position] for by_epoch in lists if len(by_epoch) >= abs(self.epoch)]
        else:
            values = group.values(self.metric)
        return [value * UNITS[self.unit] for value in values]


def _first_gpu(group: RunGroup, key: str) -> list[float]:
    """Return a memory value in MiB of the first GPU of the first node. It may be any of the machine."""
    gpus = [row.record.memory.get("gpu") or [] for row in group.counted_rows]
    of_node_0 = [[entry for entry in entries if entry["node"] == 0] for entries in gpus]
    values = [min(entries, key=itemgetter("index")).get(key) for entries in of_node_0 if entries]
    return [value for value in values if value is not None]


def format_row(
    columns: Sequence[ExerciseColumn], group: RunGroup | None, baseline: RunGroup | None, reasons: dict[str, str]
) -> tuple[str, ...]:
    """Return the cells of a row. The first cell of a failed run has its status and the number of its reason.

    ``reasons`` has the numbers, as ``[1]``. New ones are added.
    """
    if group is None:
        return ("not run", *[""] * (len(columns) - 1))
    if group.completed:
        return tuple(_format_cell(column, group, baseline) for column in columns)
    cells = [_format_failed_cell(column, group) for column in columns]
    reference = reasons.setdefault("; ".join(failure_reasons(group.rows[0])), f"[{len(reasons) + 1}]")
    return (f"{cells[0] or group.status} {reference}", *(cell or "-" for cell in cells[1:]))


def _format_cell(column: ExerciseColumn, group: RunGroup, baseline: RunGroup | None) -> str:
    if column.setting:
        return format_setting(group.setting(column.setting))
    values = column.read(group, baseline)
    if values:
        shown = _format_values(column, values)
        return ratio_text(group, baseline, column.metric, shown) if column.relative and baseline else shown
    needs_gpu = column.gpu_0 or column.metric.startswith(("gpu_", "torch_", "predict"))
    return "no GPU" if needs_gpu and group.setting("device") == "cpu" else "not measured"


def _format_failed_cell(column: ExerciseColumn, group: RunGroup) -> str:
    """Return the value that was measured until the failure, with the status; empty if there is none."""
    is_measured = not column.relative and column.metric.endswith(MEASURED_UNTIL_FAILURE)
    values = column.read(group, None) if is_measured else []
    return f"{_format_values(column, values)} ({group.status})" if values else ""


def _format_values(column: ExerciseColumn, values: Sequence[float]) -> str:
    digits, suffix = column.digits, column.suffix
    if column.unit in SMALLER_UNITS and statistics.fmean(values) < MIN_GIB:
        unit, factor = SMALLER_UNITS[column.unit]
        values, digits, suffix = [value * factor for value in values], 1, f" {unit}"
    text = f"{statistics.fmean(values):,.{digits}f}{suffix}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):,.{digits}f}{suffix}"


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
        """Return the keys of the workshop's rows, in their order."""
        return list(product(*self.rows.values()))

    def key_of(self, group: RunGroup) -> RowKey:
        """Return the key of the row that shows a group."""
        return tuple(group.setting(name) for name in self.rows)

    def labels_of(self, key: RowKey) -> tuple[str, ...]:
        """Return the labels of a row, one for each column of the header."""
        if self.first_label is not None and key == self.keys[0]:
            return tuple(self.first_label)
        texts = {name: self.texts.get(name, {}) for name in self.rows}
        values = {
            name.rpartition(".")[2]: texts[name].get(value, format_setting(value))
            for name, value in zip(texts, key, strict=True)
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
    for column in columns:
        yield from _flatten(column) if isinstance(column, list) else [column]
