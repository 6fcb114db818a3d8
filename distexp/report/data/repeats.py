"""Groups of runs that repeat a training: mean, deviation, run-to-run noise, and settings in which they vary."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from distexp.report.data import rows as run_settings
from distexp.report.data.metrics import COST, CPU_PEAK, METRICS_BY_NAME, SPEED, SPEEDS, STEP_NOISE, TIMES, Metric
from distexp.report.data.rows import Row
from distexp.runs.memory_trace import cpu_process_mib
from distexp.runs.record import RunRecord
from distexp.statistics import noise as noise_rules
from distexp.statistics.noise import Deviation, Spread, is_within_noise, pool_deviations, speed_noise

DISTURBED, EQUAL = "disturbed", "~1"  # what stands for a ratio that may not be ranked
Key = TypeVar("Key")
Settings = Mapping[str, Any]
KERNELS_DEPEND_ON = (
    *("kernels", "strategy", "zero_stage", "engine", "model", "adapter", "dataset", "precision", "device"),
)
"""Settings that decide what ``kernels=fast`` chooses."""


def format_metric(groups: Sequence[RunGroup], metric: Metric) -> tuple[str, ...]:
    """Return the cells of a column; a dash if a group was not measured."""
    spreads = (group.metric(metric.name) for group in groups)
    return tuple("-" if spread is None else metric.format_value(spread.mean, spread.deviation) for spread in spreads)


def ratio_text(group: RunGroup, baseline: RunGroup, metric: str, shown: str) -> str:
    """Return a ratio of two runs, or what stands for one that may not be ranked, in tables, figures and exercises.

    A time is as noisy as the speed, and neither is known for a disturbed run.
    """
    is_time = metric in TIMES
    if (is_time or metric in SPEEDS) and (group.disturbance or baseline.disturbance):
        return DISTURBED
    if group is baseline or metric not in METRICS_BY_NAME:  # memory of one device has no known noise
        return shown
    one, other = (one.metric(SPEED if is_time else metric) for one in (group, baseline))
    return EQUAL if one and other and is_within_noise(one, other) else shown


@dataclass(frozen=True)
class RunGroup:
    """Repeats of one training on equal hardware: their ``run.id`` is equal, or only their seeds differ.

    ``deviations`` are relative and by metric, and ``least_cpu_mib`` is the least noise of CPU memory. Both are from all
    groups of the same task and device.
    """

    rows: tuple[Row, ...]
    deviations: Mapping[str, Deviation] = field(default_factory=dict)
    least_cpu_mib: float = noise_rules.CPU_MEMORY_MIB

    @property
    def label(self) -> str:
        """Label of the first run, and the number of the others."""
        more = len(self.rows) - 1
        return self.rows[0].label + (f" +{more}" if more else "")

    @property
    def completed(self) -> bool:
        """Whether any of the runs completed."""
        return any(row.completed for row in self.rows)

    @cached_property
    def counted_rows(self) -> tuple[Row, ...]:
        """Runs whose metrics count: the completed ones, or all if none completed."""
        return tuple(row for row in self.rows if row.completed) or self.rows

    @property
    def status(self) -> str:
        """Status of all runs, or how many completed."""
        statuses = dict.fromkeys(row.record.status for row in self.rows)
        if len(statuses) == 1:
            return next(iter(statuses))
        completed = sum(row.completed for row in self.rows)
        return f"{completed} of {len(self.rows)} completed" if completed else ", ".join(statuses)

    @property
    def disturbance(self) -> str | None:
        """Return what shows that something else slowed all counted runs down; None if a speed of them counts."""
        return None if self.undisturbed_rows else self.counted_rows[0].disturbance

    @cached_property
    def undisturbed_rows(self) -> tuple[Row, ...]:
        """Counted runs that nothing else slowed down."""
        return tuple(row for row in self.counted_rows if row.disturbance is None)

    @property
    def task(self) -> str:
        """Model and data set."""
        return run_settings.task_name(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by short name; the runs share all but the seed."""
        return self.rows[0].settings

    def setting(self, name: str) -> Any:
        """Return a setting that all of the runs share."""
        return self.settings.get(name)

    def metric(self, name: str) -> Spread | None:
        """Return a metric over the counted runs; None if it was not measured."""
        values = self.values(name)
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        mean, noise = statistics.fmean(values), self._relative_noise(name, len(values))
        if name == CPU_PEAK:
            return Spread(mean, deviation, max((noise or 0.0) * mean, self.least_cpu_mib))
        return Spread(mean, deviation, None if noise is None else abs(mean) * noise)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric of the counted runs; of a speed, those of the undisturbed ones if any are."""
        rows = (self.undisturbed_rows if name in SPEEDS | TIMES else ()) or self.counted_rows
        return [value for row in rows if (value := row.metrics[name]) is not None]

    def _relative_noise(self, name: str, count: int) -> float | None:
        repeated = self.deviations.get(name)
        repeats = None if repeated is None else repeated.noise_of_mean(count)
        if name not in (SPEED, COST):
            return repeats
        if count == 1 and repeats is None and self.counted_rows[0].measured_steps == 1:
            return noise_rules.SINGLE_STEP
        steps = self.values(STEP_NOISE)
        of_steps = statistics.fmean(steps) / 100 / math.sqrt(count) if steps else None
        return speed_noise(of_steps, self.setting("device"), repeats=repeats)


def group_repeats(rows: Sequence[Row]) -> list[RunGroup]:
    """Group the rows that are repeats of each other, in the order of their first runs.

    Runs with different hardware or environment settings are never repeats, because these may change the metrics.
    """
    names = varying_settings([row.record for row in rows], [row.settings for row in rows])
    varied = [name for name in names if run_settings.is_environment_setting(name)]
    members: dict[tuple[str, ...], list[Row]] = {}
    for key, same_training in _by_training(rows).items():
        for row, environment in _with_environments(same_training, varied):
            members.setdefault((key, *environment), []).append(row)
    positions = {id(row): position for position, row in enumerate(rows)}
    return sorted((RunGroup(tuple(rows)) for rows in members.values()), key=lambda group: positions[id(group.rows[0])])


def _by_training(rows: Sequence[Row]) -> dict[str, list[Row]]:
    key_of_id: dict[str, str] = {}
    trainings: dict[str, list[Row]] = {}
    for row in rows:
        key = run_settings.training_key(row.settings)
        if row.record.status == "invalid":
            named = {text: run_settings.short_name(text.split("=")[0]) for text in row.record.run.overrides}
            key += str(sorted(text for text, name in named.items() if name != run_settings.SEED))
        else:
            key = key_of_id.setdefault(row.record.run.id, key)
        trainings.setdefault(key, []).append(row)
    return trainings


def _with_environments(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[Row, list[str]]]:
    """Yield each row with its environment settings. A run without recorded hardware has that of the first other run."""
    known: dict[str, Any] = {}
    for name in filter(run_settings.is_hardware, names):
        values = ((row.record, row.settings.get(name)) for row in rows)
        known[name] = next(
            (value for record, value in values if run_settings.knows_hardware(record, name, value)), None
        )
    for row in rows:
        found = {name: row.settings.get(name) for name in names}
        unknown = [name for name in known if not run_settings.knows_hardware(row.record, name, found[name])]
        found |= {name: known[name] for name in unknown}
        yield row, [run_settings.format_setting(found[name]) for name in names]


def group_by_settings(groups: Sequence[RunGroup], names: Sequence[str]) -> dict[str, list[RunGroup]]:
    """Collect groups with equal values of some settings, under a text with these values."""
    return collect(groups, lambda group: json.dumps([group.setting(name) for name in names], default=str))


def collect(groups: Iterable[RunGroup], key: Callable[[RunGroup], Key]) -> dict[Key, list[RunGroup]]:
    """Return the groups by a key, in their order."""
    members: dict[Key, list[RunGroup]] = {}
    for group in groups:
        members.setdefault(key(group), []).append(group)
    return members


def share_deviations(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the groups with the deviations between repeats of the same task on the same device."""
    shared = {key: _shared(members) for key, members in collect(groups, _noise_key).items()}
    return [replace(group, **shared[_noise_key(group)]) for group in groups]


def _shared(groups: Sequence[RunGroup]) -> dict[str, Any]:
    processes = [cpu_process_mib(row.record) for group in groups if group.completed for row in group.counted_rows]
    return {"deviations": _pool(groups), "least_cpu_mib": noise_rules.cpu_memory_noise(processes)}


def _noise_key(group: RunGroup) -> tuple[str, str]:
    return group.task, str(group.setting("device"))


def _pool(groups: Sequence[RunGroup]) -> dict[str, Deviation]:
    repeated = [group for group in groups if group.completed and len(group.counted_rows) > 1]
    if not repeated:
        return {}
    pooled = {name: pool_deviations(group.values(name) for group in repeated) for name in METRICS_BY_NAME}
    return {name: deviation for name, deviation in pooled.items() if deviation is not None}


def varying_settings(records: Sequence[RunRecord], settings: Sequence[Settings]) -> list[str]:
    """Return the names of the settings in which some runs differ.

    A setting that follows from another one is left out: with ``model=a,b`` the width of a model is part of the
    model. A setting that a user typed is always kept: with ``fsdp.replicas=1,2`` it is a choice.
    """
    overridden = run_settings.overridden_names(records)
    kept = []
    for name in dict.fromkeys(name for settings_of_run in settings for name in settings_of_run):
        # Hardware always distinguishes runs, another environment setting only if a user set it.
        is_chosen = run_settings.is_hardware(name) or {name, name.partition(".")[0]} & overridden
        if run_settings.is_environment_setting(name) and not is_chosen:
            continue
        known = [own for record, own in zip(records, settings, strict=True) if _is_known(record, name, own)]
        if len({run_settings.value_key(own.get(name)) for own in known}) < 2:
            continue
        leaders = _leading_settings(name, known)
        if not leaders or name in overridden or not follows(known, name, leaders):
            kept.append(name)
    return kept


def _leading_settings(name: str, known: Sequence[Settings]) -> tuple[str, ...]:
    """Return the settings that decide another together, as ``model`` of ``model.width``; empty if none do."""
    if name in run_settings.kernel_options() and any(settings.get("kernels") == "fast" for settings in known):
        return KERNELS_DEPEND_ON
    if run_settings.is_strategy_option(name):
        return ("strategy",)
    section, dot, _ = name.partition(".")
    return (section,) if dot else ()


def follows(known: Sequence[Settings], name: str, leaders: Sequence[str]) -> bool:
    """Return whether equal values of the leading settings imply equal values."""
    values: dict[str, str] = {}
    for settings in known:
        leading, value = (
            run_settings.value_key([settings.get(leader) for leader in leaders]),
            run_settings.value_key(settings.get(name)),
        )
        if values.setdefault(leading, value) != value:
            return False
    return True


def _is_known(record: RunRecord, name: str, settings: Settings) -> bool:
    """Return whether a setting is known. An invalid cell was never resolved, and a failed run may lack its GPU."""
    value = settings.get(name)
    if run_settings.is_hardware(name):
        return run_settings.knows_hardware(record, name, value)
    if name not in settings:
        return False
    if record.status != "invalid":
        return True
    return value not in (None, "auto") and (not _is_rescaled(record) or name in run_settings.overridden_names([record]))


def _is_rescaled(record: RunRecord) -> bool:
    """Return whether resolving changes settings by ``scale`` or ``scaling``."""
    sections = ((record.config.get(section) or {}).get("name") for section in ("scale", "scaling"))
    return any(name not in (None, "full", "fixed") for name in sections)
