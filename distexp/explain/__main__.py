"""The command ``distexp explain [DIR] [DIR]``: what the time of a profiled step goes to."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from distexp.config import ConfigError
from distexp.console.terminal import make_console
from distexp.exceptions import run_until_pipe_closes
from distexp.explain.explanation import Explanation, explain_profile
from distexp.explain.profile_comparison import ProfileComparison
from distexp.explain.step_profile import StepProfile
from distexp.explain.table import batch_line, comparison_notes, comparison_table, notes, ranks_table, try_line
from distexp.runs.existing import choose_newest_sweep
from distexp.runs.files import nan_to_none, printable
from distexp.runs.record import RunRecord, load_all
from distexp.runs.text import format_override

DESCRIPTION = """Show what the steps of a profiled run spend their time on, and what would
make them faster. With two runs: why B is slower than A, part by part.
Profile a run, or all runs of a sweep, with profile=true."""


@dataclass(frozen=True)
class ProfiledRun:
    """A run with a profile."""

    directory: Path
    record: RunRecord
    profile: StepProfile

    @property
    def explanation(self) -> Explanation:
        """Return the largest loss."""
        return explain_profile(self.profile)

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the explanation of a run, of each run of a sweep, or of the difference of two runs.

    Returns:
        0, or 2 if a run cannot be read or was not profiled.
    """
    parser = argparse.ArgumentParser(
        prog="distexp explain", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "directory of a run or a sweep (default: the newest sweep below multirun_outputs)"
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(arguments)
    try:
        if len(options.directories) > 2:
            raise ConfigError(f"{len(options.directories)} directories: give one, or two to compare")
        if len(options.directories) == 2:
            _compare(*(_only_run(directory) for directory in options.directories), as_json=options.json)
        else:
            _explain(_profiled_runs((options.directories or [choose_newest_sweep()])[0]), as_json=options.json)
    except ConfigError as error:
        for message in error.errors:
            print(f"distexp: {message}", file=sys.stderr)
        return 2
    return 0


def _explain(runs: Sequence[ProfiledRun], *, as_json: bool) -> None:
    if as_json:
        _print_json([run.to_json() for run in runs])
        return
    console = make_console()
    for position, run in enumerate(runs):
        if position:
            console.print()
        _print_run(run, console)


def _print_run(run: ProfiledRun, console: Console) -> None:
    _print(console, run.title)
    console.print()
    for part in ranks_table(run.profile, console.width):
        console.print(part)
    console.print()
    explanation = run.explanation
    larger = batch_line(explanation.larger_batch)
    for line in (explanation.sentence, try_line(explanation.alternatives), larger):
        if line is not None:
            _print(console, line)
    for note in notes(run.profile):
        _print(console, note, style="dim")


def _compare(before: ProfiledRun, after: ProfiledRun, *, as_json: bool) -> None:
    comparison = ProfileComparison(before.profile, after.profile)
    if as_json:
        runs = {"a": before.to_json(), "b": after.to_json()}
        _print_json({**runs, **comparison.to_json()})
        return
    console = make_console()
    _print(console, f"A: {before.title}")
    _print(console, f"B: {after.title}")
    console.print()
    console.print(comparison_table(comparison, console.width))
    console.print()
    _print(console, comparison.sentence())
    for note in comparison_notes(comparison):
        _print(console, note, style="dim")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _print_json(content: Any) -> None:
    print(json.dumps(nan_to_none(content), indent=2))


def _only_run(directory: Path) -> ProfiledRun:
    """Return the only profiled run of a directory.

    Raises:
        ConfigError: there are several, or none.
    """
    runs = _profiled_runs(directory)
    if len(runs) > 1:
        raise ConfigError(f"{directory} has {len(runs)} profiled runs: give one of them, such as {runs[0].directory}")
    return runs[0]


def _profiled_runs(directory: Path) -> list[ProfiledRun]:
    """Return the profiled runs of a run directory or a sweep.

    Raises:
        ConfigError: there are none.
    """
    found, skipped = load_all(directory)
    for message in skipped:
        print(f"skipped: {printable(message)}", file=sys.stderr)
    if not found:
        raise ConfigError(
            f"no readable record.json below {directory}: give the directory of a run or a sweep, such as "
            "multirun_outputs/distexp"
        )
    profiles = [(path.parent, record, StepProfile.of(record)) for path, record in found]
    runs = [ProfiledRun(where, record, profile) for where, record, profile in profiles if profile is not None]
    if not runs:
        raise ConfigError(_not_profiled(directory, [record for _, record in found]))
    return runs


def _not_profiled(directory: Path, records: Sequence[RunRecord]) -> str:
    """Return why runs have no profile, and what to type."""
    record = next((each for each in records if each.status == "completed"), None)
    if record is None:
        return f"{directory} has no profile, because the run is {records[0].status}: give a completed run"
    if note := (record.metrics.communication or {}).get("note"):  # A second run would have it too.
        return f"{directory} has no profile: {note}"
    options = [
        format_override(text)
        for text in record.run.overrides
        if not text.startswith(("profile=", "train.profile_steps="))
    ]
    return f"{directory} has no profile: run it with {shlex.join(['distexp', *options, 'profile=true'])}"


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
