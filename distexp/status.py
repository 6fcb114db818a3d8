"""``python -m distexp.status DIR [--watch]``: where every run of a sweep stands, from any machine of the cluster."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from distexp.exceptions import MonitoringInterrupted, SweepFailedError, run_until_pipe_closes
from distexp.launch import ledger
from distexp.launch.slurm.follow import QUICK_EVERY_S, causes, follow, summary, table
from distexp.launch.slurm.status import ACTIVE, RunState, look
from distexp.runs.existing import COMMAND, ExistingRun, ExistingRuns, not_a_sweep
from distexp.runs.progress import last_activity, progress
from distexp.runs.record import FAILURES, RECORD, RunRecord

RUNNING = "running"
FRESH_S = 15.0
"""A run on this machine whose files are younger goes on: memory is sampled all the time, and steps leave a sign."""

PLAIN_WIDTH = 160
"""Columns where the output is no terminal, and COLUMNS does not say."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 where there is no sweep; with --watch the sweep's own exit code."""
    parser = argparse.ArgumentParser(prog="python -m distexp.status", description="Where every run of a sweep stands.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a sweep's directory")
    parser.add_argument("--watch", action="store_true", help="follow the runs until all have ended")
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=PLAIN_WIDTH)
    runs, what = sweep_states(options.directory)
    if not runs:
        print(f"distexp: {not_a_sweep(options.directory, 'run')}", file=sys.stderr)
        return 2
    if options.watch and ledger.read(options.directory):
        try:
            follow(options.directory.absolute(), console)
        except SweepFailedError:
            return 1
        except MonitoringInterrupted:
            return 130
        return 0
    if options.watch:
        runs, what = _follow_here(options.directory, console)
    _print_unpadded(table(runs, console.width, what), console)
    for line in [*causes(runs, console.width, what), summary(runs), *not_started(options.directory, runs)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1 if options.watch and any(run.state in FAILURES for run in runs) else 0


def _follow_here(directory: Path, console: Console) -> tuple[list[RunState], dict[int, str]]:
    """The runs of this machine's own launcher once none goes on; on a terminal their table until then."""
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            runs, what = sweep_states(directory)
            if all(run.state != RUNNING for run in runs):
                return runs, what
            if console.is_terminal:
                live.update(table(runs, console.width, what), refresh=True)
            time.sleep(QUICK_EVERY_S)


def _print_unpadded(grid: Table, console: Console) -> None:
    """Prints a table without the blanks up to its last column's end, which would fill every line of a file."""
    with console.capture() as captured:
        console.print(grid)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def sweep_states(sweep_dir: Path) -> tuple[list[RunState], dict[int, str]]:
    """Every run, those in the ledger by what Slurm says, and what each varies."""
    earlier = ExistingRuns.read(sweep_dir)
    in_ledger = {run.number: run for run in look(sweep_dir)}
    runs = []
    for run in earlier.runs:
        if run.number in in_ledger:
            runs.append(in_ledger.pop(run.number))
        elif run.status is None:
            runs.append(_without_record(run))
        else:
            record = RunRecord.read(run.directory / RECORD)
            why = record.error.message if record.error is not None else ""
            runs.append(RunState(run.number, run.directory, None, run.status, why, record=record))
    runs += in_ledger.values()
    shared = set.intersection(*(set(run.overrides) for run in earlier.runs)) if len(earlier.runs) > 1 else set()
    what = {run.number: " ".join(text for text in run.overrides if text not in shared) for run in earlier.runs}
    return sorted(runs, key=lambda run: run.number), what if shared or len(earlier.runs) > 1 else {}


def _without_record(run: ExistingRun) -> RunState:
    """What its files tell of a run on this machine, or on one that shares them."""
    age = time.time() - last_activity(run.directory)
    if age < FRESH_S and progress(run.directory).phase != "done":
        return RunState(run.number, run.directory, None, RUNNING)
    return RunState(run.number, run.directory, None, "no record", f"ended hard: its last sign is {age:,.0f} s old")


def not_started(sweep_dir: Path, runs: Sequence[RunState]) -> Iterator[str]:
    """``8 not started`` where a sweep's command asks for more runs than there are, and what starts them."""
    try:
        left = int(json.loads((sweep_dir / COMMAND).read_text())["cells"]) - len(runs)
    except (OSError, ValueError, KeyError):
        return
    if left > 0:
        going_on = any(run.state in ACTIVE for run in runs)
        command = f"python -m distexp.resume {shlex.quote(str(sweep_dir))}"
        yield f"{left} not started" + (" yet" if going_on else f": {command}")


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
