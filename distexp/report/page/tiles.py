"""Tiles at the top of the page: the most important numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.energy_totals import energy_totals
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import memory_metric, rank_by_metric
from distexp.report.data.scaling import ScalingSeries
from distexp.report.data.scaling_remarks import explain_doubt
from distexp.report.data.text import format_noise, name_runs
from distexp.report.summary import are_trials
from distexp.runs.record import FAILURES
from distexp.statistics.noise import difference_noise


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    detail: str
    style: str = ""  # bad: in red


def build_tiles(overview: Overview) -> Iterator[Tile]:
    """Yield the tiles that these runs have numbers for, in their order."""
    yield _completed_tile(overview)
    yield from _disturbed_tile(overview)
    if not are_trials(overview.rows):  # The winner of a search is in choose.json.
        yield from _best_tile(overview, SPEED, "fastest", "samples/s", largest=True)
    memory = memory_metric(overview)
    if memory and not are_trials(overview.rows):
        yield from _best_tile(overview, memory, f"lowest {MEMORIES[memory]}", "MiB", largest=False)
    yield from _energy_tiles(overview)
    scaled = [series for series in overview.series if series.has_several_sizes and not series.is_disturbed]
    yield from _efficiency_tiles(scaled)


def _disturbed_tile(overview: Overview) -> Iterator[Tile]:
    """Yield the runs whose speeds are not ranked, because something else slowed them down."""
    labels = [group.label for group in overview.groups if group.disturbance]
    if labels:
        yield Tile("disturbed", name_runs(labels), "not ranked by speed", "bad")


def _energy_tiles(overview: Overview) -> Iterator[Tile]:
    """Yield the energy and cost of all runs together, if they were measured."""
    totals = list(energy_totals(overview.rows))
    if totals:
        yield Tile("total energy and cost", totals[0], ", ".join(totals[1:]))


def _efficiency_tiles(scaled: Sequence[ScalingSeries]) -> Iterator[Tile]:
    """Yield the best efficiency, and a warning if a baseline cannot be trusted."""
    trusted = [series for series in scaled if series.is_trusted]
    if trusted:
        best = max(trusted, key=lambda series: series.points[-1].efficiency)
        value = f"{best.points[-1].efficiency:.0%}"
        yield Tile("efficiency at the most workers", value, _describe_efficiency(best, trusted))
    for series in [series for series in scaled if not series.is_trusted][:1]:
        highest = max(point.efficiency for point in series.points)
        detail = f"{highest:.0%} relative to run {series.baseline.group.label}. {explain_doubt(series)}"
        yield Tile("efficiency", "do not trust the baseline", detail, "bad")


def _describe_efficiency(best: ScalingSeries, others: Sequence[ScalingSeries]) -> str:
    """Return the workers of a series with the noise of its efficiency, and the series that are equal within it."""
    last = best.points[-1]
    parts = [f"{last.workers} workers", best.name]
    if best.noise is not None:
        parts.append(f"noise {format_noise(best.noise, 1)}")
        equal = [point for point in others if point is not best and _is_equal_efficiency(best, point)]
        parts.append(f"{len(equal)} more equal within the noise" if equal else "")
    return ", ".join(filter(None, parts))


def _is_equal_efficiency(best: ScalingSeries, other: ScalingSeries) -> bool:
    if best.noise is None or other.noise is None:
        return False
    one, two = best.points[-1].efficiency, other.points[-1].efficiency
    return abs(one - two) <= math.hypot(one * best.noise, two * other.noise)


def _completed_tile(overview: Overview) -> Tile:
    statuses = Counter(row.record.status for row in overview.rows)
    others = ", ".join(f"{count} {status}" for status, count in statuses.items() if status != "completed")
    value = f"{statuses['completed']:,} of {len(overview.rows):,}"
    return Tile("completed runs", value, others or "no failures", "bad" if FAILURES & set(statuses) else "")


def _best_tile(overview: Overview, metric: str, name: str, unit: str, *, largest: bool) -> Iterator[Tile]:
    """Yield the best run; nothing if there is one run only, or several tasks, which are not comparable."""
    rankings = list(rank_by_metric(overview, metric, largest=largest))
    if len(rankings) != 1 or len(rankings[0].ranked) < 2:
        return
    best, equal = rankings[0].best, rankings[0].equal_to_best
    value = best.value
    if equal:
        noise = max(difference_noise(value, other.value) or 0.0 for other in equal)
        labels = name_runs([best.group.label, *(other.group.label for other in equal)])
        yield Tile(name, "not decided", f"{labels}: equal within the noise of {format_noise(noise, value.mean)}")
        return
    yield Tile(name, f"{METRICS_BY_NAME[metric].format_value(value.mean)} {unit}", overview.describe(best.group))
