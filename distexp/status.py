"""Command ``distexp status [DIR]``: the state of every run of a sweep.

The sweep may be local or on Slurm.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from distexp.config import ConfigError
from distexp.console.sweep_table import count_states, states_table, truncated_reasons
from distexp.exceptions import MonitoringInterrupted, SweepFailedError, run_until_pipe_closes
from distexp.launch import ledger
from distexp.launch.slurm.follow import FAST_POLL_S, follow
from distexp.launch.slurm.status import poll
from distexp.runs.existing import ExistingRun, ExistingRuns, choose_newest_sweep, not_a_sweep
from distexp.runs.files import read_json
from distexp.runs.local_state import local_state
from distexp.runs.record import FAILURES
from distexp.runs.run_dir import COMMAND
from distexp.runs.run_state import RunState
from distexp.runs.text import suggest_command

DIRECTORY_HELP = "directory of a sweep (default: the newest sweep below multirun_outputs)"

PLAIN_WIDTH = 160
"""Table width if the output is not a terminal and COLUMNS is not set."""


@dataclass(frozen=True)
class SweepStates:
    """The runs of a sweep.

    Attributes:
        runs: The state of each run, by number.
        overrides: The overrides that differ between the runs, by run number; empty for a single run.
    """

    runs: list[RunState]
    overrides: dict[int, str]

    def table(self, console: Console) -> Table:
        """Build the table of the runs for a console."""
        return states_table(self.runs, console.width, self.overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of every run.

    Returns:
        0, or 2 if the directory is not a sweep; with --watch the exit code of the sweep, or 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="distexp status", description="Show the state of every run of a sweep.")
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=DIRECTORY_HELP)
    parser.add_argument("--watch", action="store_true", help="follow the runs until all have ended")
    options = parser.parse_args(arguments)
    try:
        directory = options.directory or choose_newest_sweep()
    except ConfigError as error:
        print(f"distexp: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=PLAIN_WIDTH)
    sweep = read_sweep(directory)
    if not sweep.runs:
        print(f"distexp: {not_a_sweep(directory, 'run')}", file=sys.stderr)
        return 2
    if options.watch and ledger.read(directory):
        return _follow_slurm(directory.absolute(), console)
    if options.watch:
        sweep = _follow_local(directory, console)
    _print_sweep(sweep, directory, console)
    return 1 if options.watch and any(run.state in FAILURES for run in sweep.runs) else 0


def _follow_slurm(directory: Path, console: Console) -> int:
    try:
        follow(directory, console)
    except SweepFailedError:
        return 1
    except MonitoringInterrupted:
        return 130
    return 0


def _follow_local(directory: Path, console: Console) -> SweepStates:
    """Wait until no local run is running, and return the final states.

    On a terminal the table is shown while waiting.
    """
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            sweep = read_sweep(directory)
            if not any(run.is_active for run in sweep.runs):
                return sweep
            if console.is_terminal:
                live.update(sweep.table(console), refresh=True)
            time.sleep(FAST_POLL_S)


def _print_sweep(sweep: SweepStates, directory: Path, console: Console) -> None:
    _print_without_padding(sweep.table(console), console)
    for line in [
        *truncated_reasons(sweep.runs, console.width, sweep.overrides),
        count_states(sweep.runs),
        *not_started(directory, sweep.runs),
    ]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_without_padding(table: Table, console: Console) -> None:
    """Print a table without the trailing spaces that would fill a log file."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def read_sweep(sweep_dir: Path) -> SweepStates:
    """Return the state of every run; ask Slurm about the runs in the ledger."""
    existing = ExistingRuns.read(sweep_dir).runs
    on_slurm = {run.number: run for run in poll(sweep_dir)}
    local = [local_state(run) for run in existing if run.number not in on_slurm]
    runs = sorted([*local, *on_slurm.values()], key=lambda run: run.number)
    return SweepStates(runs, _varied_overrides(existing))


def _varied_overrides(runs: Sequence[ExistingRun]) -> dict[int, str]:
    """Return the overrides of each run that not all runs share."""
    if len(runs) < 2:
        return {}
    shared = set.intersection(*(set(run.overrides) for run in runs))
    return {run.number: " ".join(text for text in run.overrides if text not in shared) for run in runs}


def not_started(sweep_dir: Path, runs: Sequence[RunState]) -> Iterator[str]:
    """Yield ``8 not started`` if the sweep has more cells than runs.

    The line has the command that starts them, unless other runs are active.
    """
    try:
        cells = int(read_json(sweep_dir / COMMAND)["cells"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    left = cells - len(runs)
    if left > 0:
        hint = " yet" if any(run.is_active for run in runs) else f": {suggest_command('resume', sweep_dir)}"
        yield f"{left} not started{hint}"


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
