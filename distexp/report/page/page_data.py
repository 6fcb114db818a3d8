"""Data of the page: tiles, the table of runs, configurations to compare, machines and versions."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distexp.config.overrides import copyable_command, join_first
from distexp.report.data.metrics import EFFICIENCY, MEMORIES, METRICS_BY_NAME, SPEED, SPEEDUP, Metric
from distexp.report.data.overview import DISTURBED_MARK, Overview, failure_reason, memory_metric, rank_by_metric
from distexp.report.data.remarks import energy_totals, explain_slow_baseline
from distexp.report.data.rows import Row, format_noise, name_runs
from distexp.report.data.run_settings import format_setting
from distexp.report.data.scaling_series import ScalingSeries
from distexp.report.files import result_row
from distexp.report.overview_table import are_trials
from distexp.runs.record import FAILURES
from distexp.runs.run_dir import LOGS, MEMORY, METRICS, PROFILE, RECORD
from distexp.statistics.noise import difference_noise
from distexp.tables.text_table import TextTable

COMPARED_SECTIONS = ("config.", "built.", "environment.")
COMPARED_KEYS = ("overrides", "git_sha")
MAX_COMMANDS = 200
Cells = tuple[str, ...]
VERSIONS = ("python", "torch", "cuda", "nccl", "transformers", "deepspeed")
LINKED_FILES = (RECORD, METRICS, MEMORY, LOGS, PROFILE)
MAX_CHARACTERS = 48  # of a setting


def configurations(overview: Overview) -> dict[str, Any]:
    """Return all keys of configuration, build and environment.

    A key of ``differing`` lists each value once, and for each run the index of its value. Other keys are ``shared``.
    """
    rows = [_compared(row) for row in overview.rows]
    shared: dict[str, Any] = {}
    differing: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        texts = [row.get(key, "-") for row in rows]
        indices = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        if len(indices) == 1:
            shared[key] = texts[0]
        else:
            differing[key] = {"values": list(indices), "indices": [indices[text] for text in texts]}
    names = {row.label: overview.format_settings(group) for group in overview.groups for row in group.rows}
    runs = [[row.label, names[row.label]] for row in overview.rows]
    return {"shared": shared, "differing": differing, "runs": runs, "opened": list(first_pair(overview))}


def first_pair(overview: Overview) -> tuple[int, int]:
    """Return which two runs to compare first: the baseline and another completed one, or those that got furthest."""
    baseline = overview.baseline.rows if overview.baseline else ()

    def preference(position: int) -> tuple[bool, bool, bool]:
        row = overview.rows[position]
        return not row.completed, row.record.status == "invalid", not any(row is other for other in baseline)

    best = sorted(range(len(overview.rows)), key=preference)
    return best[0], best[min(1, len(best) - 1)]


def _compared(row: Row) -> dict[str, str]:
    content = {**result_row(row), "overrides": " ".join(row.record.run.overrides) or None}
    kept = {key: value for key, value in content.items() if key.startswith(COMPARED_SECTIONS) or key in COMPARED_KEYS}
    return {
        key: "null" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
    }


def provenance_tables(rows: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the tables. The last column of each row lists its runs."""
    yield _count_kinds("Machines", ("hosts", "GPU", "GPU memory (MiB)", "CPU cores"), rows, _machine)
    yield _count_kinds("Versions", VERSIONS, rows, lambda row: tuple(
        str(getattr(row.record.environment, name, None) or "-") for name in VERSIONS
    ))  # fmt: skip
    changed = {True: "yes", False: "no", None: "unknown"}
    yield _count_kinds("Code", ("git commit", "uncommitted changes"), rows, lambda row: (
        row.record.run.git_sha or "unknown", changed[row.record.run.git_dirty]
    ))  # fmt: skip
    shown = tuple(
        (row.label, copyable_command(run.overrides), (run.started_at or "-")[:19].replace("T", " "))
        for row, run in ((row, row.record.run) for row in rows[:MAX_COMMANDS])
    )
    more = len(rows) - MAX_COMMANDS
    note = f"{more} more runs are in results.csv, column overrides." if more > 0 else ""
    yield TextTable("Commands", ("run", "command", "started (UTC)"), shown, note)


def _count_kinds(title: str, header: Cells, rows: Sequence[Row], read: Callable[[Row], Cells]) -> TextTable:
    counts: dict[Cells, list[str]] = {}
    for row in rows:
        counts.setdefault(read(row), []).append(row.label)
    cells = tuple((*kind, "all" if len(labels) == len(rows) else join_first(labels)) for kind, labels in counts.items())
    return TextTable(title, (*header, "runs"), cells)


def _machine(row: Row) -> Cells:
    environment = row.record.environment
    hosts = ", ".join(row.record.run.hosts) or (environment.hostname if environment else None) or "-"
    if environment is None:
        return hosts, "-", "-", "-"
    memory = f"{environment.gpu_total_mib:,.0f}" if environment.gpu_total_mib else "-"
    return hosts, environment.gpu_name or "none", memory, str(environment.cpu_count or "-")


def run_table(overview: Overview, directory: Path) -> dict[str, Any]:
    """Return columns and rows. Links are relative to the directory of the page.

    The most important metrics come first, because a narrow window shows only the first columns.
    """
    metrics = sorted(overview.metrics(), key=lambda metric: -metric.importance)
    numbered = all(row.label.isdigit() for row in overview.rows)
    columns = [
        {"title": "run", "kind": "setting-number" if numbered else "text"},
        *(_setting_column(overview, name) for name in overview.varied),
        {"title": "status", "kind": "status"},
        *(_metric_column(overview, metric) for metric in metrics),
        {"title": "files", "kind": "files"},
    ]
    rows = [
        [
            int(row.label) if numbered else row.label,
            *(_setting_cell(row.settings.get(name)) for name in overview.varied),
            [row.record.status, "" if row.completed else failure_reason(row)],
            *(_metric_cell(row.metrics[metric.name], metric) for metric in metrics),
            _links(row, directory),
        ]
        for row in overview.rows
    ]
    return {"columns": columns, "rows": rows}


def _setting_column(overview: Overview, name: str) -> dict[str, Any]:
    values = [value for row in overview.rows if (value := row.settings.get(name)) is not None]
    return {"title": name, "kind": "setting-number" if values and all(map(_is_number, values)) else "text"}


def _setting_cell(value: Any) -> Any:
    return value if _is_number(value) or value is None else format_setting(value, MAX_CHARACTERS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric_column(overview: Overview, metric: Metric) -> dict[str, Any]:
    title = metric.title.replace("-\n", "").replace("\n", " ")
    column = {"title": title, "kind": "number", "digits": _digits(metric)}
    of_group = {id(row): overview.mark(metric.name, group) for group in overview.groups for row in group.rows}
    # The repeats of a disturbed run may be undisturbed.
    speeds = [row for row in overview.rows if metric.name in (SPEED, SPEEDUP, EFFICIENCY)]
    disturbed = {id(row) for row in speeds if row.metrics[metric.name] is not None and row.disturbance is not None}
    marks = [DISTURBED_MARK if id(row) in disturbed else of_group[id(row)] for row in overview.rows]
    return column | {"marks": marks} if any(marks) else column


def _digits(metric: Metric) -> int:
    found = re.search(r"\.(\d+)f", metric.number_format)
    return int(found[1]) if found else 0


def _metric_cell(value: float | None, metric: Metric) -> float | None:
    return None if value is None else round(value * metric.factor, _digits(metric) + 2)


def _links(row: Row, directory: Path) -> list[str]:
    if row.path is None:
        return []
    present = set(os.listdir(row.path.parent))
    return [relative_link(row.path.parent, directory), *(name for name in LINKED_FILES if name in present)]


def relative_link(path: Path, directory: Path) -> str:
    """Return a link from a page in a directory to a path."""
    return quote(os.path.relpath(path, directory))


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    detail: str
    style: str = ""  # bad: in red


def build_tiles(overview: Overview) -> Iterator[Tile]:
    """Yield the tiles that these runs have numbers for, in their order."""
    statuses = Counter(row.record.status for row in overview.rows)
    others = ", ".join(f"{count} {status}" for status, count in statuses.items() if status != "completed")
    value = f"{statuses['completed']:,} of {len(overview.rows):,}"
    yield Tile("completed runs", value, others or "no failures", "bad" if FAILURES & set(statuses) else "")
    if labels := [group.label for group in overview.groups if group.disturbance]:
        yield Tile("disturbed", name_runs(labels), "not ranked by speed", "bad")
    if not are_trials(overview.rows):  # The winner of a search is in choose.json.
        yield from _best_tile(overview, SPEED, "fastest", "samples/s", largest=True)
        if memory := memory_metric(overview):
            yield from _best_tile(overview, memory, f"lowest {MEMORIES[memory]}", "MiB", largest=False)
    if totals := list(energy_totals(overview.rows)):
        yield Tile("total energy and cost", totals[0], ", ".join(totals[1:]))
    scaled = [series for series in overview.series if series.has_several_sizes and not series.is_disturbed]
    yield from _efficiency_tiles(scaled)


def _efficiency_tiles(scaled: Sequence[ScalingSeries]) -> Iterator[Tile]:
    trusted = [series for series in scaled if series.is_trusted]
    if trusted:
        best = max(trusted, key=lambda series: series.points[-1].efficiency)
        last = best.points[-1]
        parts = [f"{last.workers} workers", best.name]
        if best.noise is not None:
            parts.append(f"noise {format_noise(best.noise, 1)}")
            equal = [point for point in trusted if point is not best and _is_equal_efficiency(best, point)]
            parts.append(f"{len(equal)} more equal within the noise" if equal else "")
        yield Tile("efficiency at the most workers", f"{last.efficiency:.0%}", ", ".join(filter(None, parts)))
    if doubtful := next((series for series in scaled if not series.is_trusted), None):
        highest, group = max(point.efficiency for point in doubtful.points), doubtful.baseline.group
        detail = f"{highest:.0%} relative to run {group.label}. {explain_slow_baseline(group)}"
        yield Tile("efficiency", "do not trust the baseline", detail, "bad")


def _is_equal_efficiency(best: ScalingSeries, other: ScalingSeries) -> bool:
    if best.noise is None or other.noise is None:
        return False
    one, two = best.points[-1].efficiency, other.points[-1].efficiency
    return abs(one - two) <= math.hypot(one * best.noise, two * other.noise)


def _best_tile(overview: Overview, metric: str, name: str, unit: str, *, largest: bool) -> Iterator[Tile]:
    """Yield the best run; nothing if there is one run only, or several tasks, which are not comparable."""
    rankings = list(rank_by_metric(overview, metric, largest=largest))
    if len(rankings) != 1 or len(rankings[0].ranked) < 2:
        return
    best, equal, value = rankings[0].best, rankings[0].equal_to_best, rankings[0].best.value
    if equal:
        noise = max(difference_noise(value, other.value) or 0.0 for other in equal)
        labels = name_runs([best.group.label, *(other.group.label for other in equal)])
        yield Tile(name, "not decided", f"{labels}: equal within the noise of {format_noise(noise, value.mean)}")
        return
    yield Tile(name, f"{METRICS_BY_NAME[metric].format_value(value.mean)} {unit}", overview.describe(best.group))
