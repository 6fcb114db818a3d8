"""What a tracker is, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from distexp.config.flatten import flatten
from distexp.runs.devices import device_values, mean_or_none
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec

END = "logs/.tracker_end"
"""A file in the run directory that tells a tracker to finish. A signal might come before it can be heard."""

FILES = ("record.json", "spec.json", "metrics.jsonl", "events.jsonl", "ds_config.json", "memory/*.csv")
"""Artifacts, relative to the run directory."""


class Tracker(Protocol):
    """One library; its constructor takes (spec, directory) and starts a run there."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step."""

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """The end of the run: its summary and its files; sentences for the user, as how to see it."""


def step_values(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl under the names that trackers group by."""
    return {f"train/{name}": value for name, value in line.items() if name != "step" and value is not None}


def evaluation_values(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of events.jsonl that closes an epoch."""
    told = {f"eval/{name.removeprefix('eval_')}": line[name] for name in ("eval_loss", "eval_accuracy") if name in line}
    return {name: value for name, value in told.items() if value is not None}


def summary(record: RunRecord) -> dict[str, float]:
    """The figures of a whole run; three of them under the names of the workshop's callbacks."""
    flat = {name: value for name, value in asdict(record.metrics).items() if isinstance(value, int | float)}
    flat |= {f"step_time_s/{name}": value for name, value in (record.metrics.step_time_s or {}).items()}
    memory, utilization = record.memory, record.utilization
    named = {
        "avg_gpu_util_%": mean_or_none(device_values(utilization["gpu"], "average_pct")),
        "avg_mem_alloc_MB": mean_or_none(device_values(memory["torch"], "average_allocated_mib")),
        "peak_mem_alloc_MB": max(device_values(memory["torch"], "peak_allocated_mib"), default=None),
        "peak_gpu_mem_MB": max(device_values(memory["gpu"], "peak_mib"), default=None),
        "peak_cpu_mem_MB": max(device_values(memory["cpu"], "peak_mib"), default=None),
        "train/samples_per_second_mean": record.metrics.train_samples_per_second,
    }
    return flat | {name: value for name, value in named.items() if value is not None}


def flat_config(spec: RunSpec) -> dict[str, Any]:
    """The resolved configuration as ``section.key``; nothing in it is secret."""
    return dict(flatten(asdict(spec.config)))


def run_name(spec: RunSpec) -> str:
    """What distinguishes a run in a list: its number and what was set."""
    return " ".join([f"{spec.run.name}/{spec.run.number}", *spec.run.overrides])


def artifacts(directory: Path) -> list[Path]:
    """The files of a run that are worth keeping elsewhere."""
    return [path for pattern in FILES for path in sorted(directory.glob(pattern))]
