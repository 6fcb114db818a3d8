"""Runs of the same training joined to one row: mean, spread, and what the spread allows to say."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distexp.report.data.environment_settings import is_environment_setting, is_hardware, knows_hardware
from distexp.report.data.metrics import SPEED, SPEEDUP, Metric
from distexp.report.data.rows import Row
from distexp.report.data.settings import SEED, format_setting, task_name, training_key, varying_settings
from distexp.report.data.short_names import short_name


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    mean: float
    deviation: float | None  # sample standard deviation; None for a single value

    def text(self, figure: Metric) -> str:
        """As it stands in a table."""
        return figure.text(self.mean, self.deviation)


def format_metric(groups: Sequence[RunGroup], figure: Metric) -> tuple[str, ...]:
    """A figure of some groups as it stands in a table, a dash for none."""
    spreads = (group.metric(figure.name) for group in groups)
    return tuple("-" if spread is None else spread.text(figure) for spread in spreads)


@dataclass(frozen=True)
class RunGroup:
    """The runs of one training under equal conditions: equal by ``run.id``, or in all settings but the seed."""

    rows: tuple[Row, ...]

    @property
    def label(self) -> str:
        """That of its first run, and how many more there are."""
        more = len(self.rows) - 1
        return self.rows[0].label + (f" +{more}" if more else "")

    @property
    def completed(self) -> bool:
        """Whether any of the runs went to its end."""
        return any(row.completed for row in self.rows)

    @property
    def counted_rows(self) -> tuple[Row, ...]:
        """The runs whose figures count: the completed ones where there are any."""
        return tuple(row for row in self.rows if row.completed) or self.rows

    @property
    def status(self) -> str:
        """The status that all share, or how many completed."""
        statuses = dict.fromkeys(row.record.status for row in self.rows)
        if len(statuses) == 1:
            return next(iter(statuses))
        done = sum(row.completed for row in self.rows)
        return f"{done} of {len(self.rows)} completed" if done else ", ".join(statuses)

    @property
    def task(self) -> str:
        """The model on its data."""
        return task_name(self.rows[0].settings)

    def setting(self, name: str) -> Any:
        """A setting, which all of the runs share."""
        return self.rows[0].settings.get(name)

    def metric(self, name: str) -> Spread | None:
        """A figure over the runs that count; None where none of them has it."""
        values = [value for row in self.counted_rows if (value := row.metrics[name]) is not None]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation)


def group_repeats(rows: Sequence[Row]) -> list[RunGroup]:
    """Rows joined where they are repeats, in the order of their first runs.

    Runs under other conditions are never repeats of each other: on another GPU, with other variables, or
    with a key set to something else, as ``cluster.cpus_per_worker=1,2`` does. A run that broke before it
    knew its machine is taken to have had that of the first that knows.
    """
    by_id: dict[str, str] = {}
    trainings: dict[str, list[Row]] = {}
    for row in rows:
        key = training_key(row.settings)
        if row.record.status == "invalid":  # what is not decided yet may be what tells two of them apart
            key += str(sorted(text for text in row.record.run.overrides if short_name(text.split("=")[0]) != SEED))
        else:
            key = by_id.setdefault(row.record.run.id, key)
        trainings.setdefault(key, []).append(row)
    apart = varying_settings([row.record for row in rows], [row.settings for row in rows])
    conditions = [name for name in apart if is_environment_setting(name)]
    members: dict[tuple[str, ...], list[Row]] = {}
    for key, each in trainings.items():
        witness = next((row for row in each if knows_hardware(row.record)), None)
        for row in each:
            under = (format_setting(_condition(row, name, witness)) for name in conditions)
            members.setdefault((key, *under), []).append(row)
    positions = {id(row): position for position, row in enumerate(rows)}
    groups = [RunGroup(tuple(each)) for each in members.values()]
    return sorted(groups, key=lambda group: positions[id(group.rows[0])])


def _condition(row: Row, name: str, witness: Row | None) -> Any:
    known = row.settings.get(name)
    if known is None and witness is not None and is_hardware(name) and not knows_hardware(row.record):
        return witness.settings.get(name)
    return known


def add_speedup(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Fills in the scale factor against the first completed row of a task that others have too; returns its group."""
    known = [group for group in groups if group.completed and group.metric(SPEED)]
    tasks = Counter(group.task for group in known)
    task = next((group.task for group in known if tasks[group.task] > 1), None)
    if task is None:
        return None
    measured = [group for group in known if group.task == task]
    reference = measured[0]
    base = reference.metric(SPEED)
    assert base is not None
    for row in (row for group in measured for row in group.counted_rows):
        speed = row.metrics[SPEED]
        if speed is not None and base.mean:
            row.metrics[SPEEDUP] = speed / base.mean
    return reference


def is_within_noise(one: Spread, other: Spread) -> bool | None:
    """Whether two means lie no further apart than two single runs would by chance; None: spread unknown.

    The yardstick is the standard deviation of a difference of two runs; a row that was run once is
    taken to scatter as the other does.
    """
    known = [each.deviation for each in (one, other) if each.deviation is not None]
    if not known:
        return None
    first, second = known[0], known[-1]
    return abs(one.mean - other.mean) <= math.hypot(first, second)
