"""Reading of the profiled runs that ``distexp explain`` is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.config import ConfigError
from distexp.explain.explanation import Explanation, explain_profile
from distexp.explain.step_profile import StepProfile
from distexp.runs.command_text import format_override
from distexp.runs.copyable_command import copyable_command
from distexp.runs.json_files import read_or_none
from distexp.runs.printable import printable
from distexp.runs.record import RunRecord
from distexp.runs.record_search import read_records
from distexp.runs.run_dir import COMMAND
from distexp.runs.sweep_dirs import describe_no_training
from distexp.strategies.base import recorded_strategy

REPLACED = ("profile=", "train.profile_steps=", "hydra.sweep.", "sweep.resume=")
"""Overrides that a command with a profile has not, or has with other values."""


@dataclass(frozen=True)
class ProfiledRun:
    """A run with a profile."""

    directory: Path
    record: RunRecord
    profile: StepProfile

    @property
    def explanation(self) -> Explanation:
        """Return the bottleneck. Code of a custom strategy is not imported here, so it is what the run has stored."""
        stored = Explanation.from_json(self.record.metrics.explanation)
        is_custom = recorded_strategy(self.record.config) is None
        return stored if is_custom and stored is not None else explain_profile(self.profile)

    @property
    def title(self) -> str:
        """Return directory and overrides, as they are typed."""
        return f"{self.directory}: {' '.join(map(format_override, self.record.run.overrides))}".removesuffix(": ")

    def to_json(self) -> dict[str, Any]:
        """Return the run for programs."""
        metrics = self.record.metrics
        return {
            "run": str(self.directory),
            "overrides": self.record.run.overrides,
            "step_breakdown": metrics.step_breakdown,
            "explanation": self.explanation.to_json(),
        }


def read_profiled_run(directory: Path) -> ProfiledRun:
    """Return the only profiled run of a directory.

    Raises:
        ConfigError: there are several, or none.
    """
    runs = read_profiled_runs(directory)
    if len(runs) > 1:
        raise ConfigError(f"{directory} has {len(runs)} profiled runs: give one of them, such as {runs[0].directory}")
    return runs[0]


def read_profiled_runs(directory: Path) -> list[ProfiledRun]:
    """Return the profiled runs of a run directory or a sweep.

    Raises:
        ConfigError: there are none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory. Give that of a run or a sweep")
    found = read_records(directory)
    for message in found.messages:
        print(f"skipped: {printable(message)}", file=sys.stderr)
    if not found.stored:
        raise ConfigError(
            f"no readable record.json below {directory}: give the directory of a run or a sweep, such as "
            "multirun_outputs/distexp"
        )
    profiles = [(path.parent, record, StepProfile.of(record)) for path, record in found.stored]
    runs = [ProfiledRun(where, record, profile) for where, record, profile in profiles if profile is not None]
    if not runs:
        raise ConfigError(_not_profiled(directory, found.records))
    return runs


def _not_profiled(directory: Path, records: Sequence[RunRecord]) -> str:
    """Return why runs have no profile, and what to type."""
    record = next((record for record in records if record.status == "completed"), None)
    if record is None:
        return f"{directory} has no profile, because the run is {records[0].status}: give a completed run"
    if other := describe_no_training(record):
        return f"{directory} {other}"
    if note := (record.metrics.communication or {}).get("note"):  # A second run would have it too.
        return f"{directory} has no profile: {note}"
    sweep = _sweep_command(directory)
    options = [text for text in sweep or record.run.overrides if not text.startswith(REPLACED)]
    command = copyable_command([*options, "profile=true"], may_sweep=bool(sweep))
    return f"{directory} has no profile: run it with {command}"


def _sweep_command(directory: Path) -> list[str]:
    """Return the arguments of a sweep of several runs; empty if the directory is none, or its command is damaged."""
    arguments, cells = (read_or_none(directory / COMMAND, key) for key in ("words", "cells"))
    is_sweep = isinstance(cells, int) and cells > 1 and isinstance(arguments, list)
    return [printable(text) for text in arguments if isinstance(text, str)] if is_sweep else []
