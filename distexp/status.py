"""Command ``distexp status [DIR]``: the state of every run of a sweep, as its launcher reports it."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from distexp.cli.main import CommandParser
from distexp.config import Command, ConfigError
from distexp.config.overrides import format_runs, suggest_command
from distexp.console.sweep_table import (
    Row,
    count_states,
    followed_states,
    hidden_lines,
    states_table,
    truncated_reasons,
)
from distexp.exceptions import (
    MonitoringInterrupted,
    SweepFailedError,
    describe_os_error,
    print_error,
    print_text,
    printable,
    run_until_pipe_closes,
)
from distexp.launch.launcher import Launcher, launchers_of
from distexp.launch.queued_runs import FAST_POLL_S
from distexp.runs import attempts
from distexp.runs.record import FAILURES, ExistingRun, ExistingRuns, choose_newest_sweep, not_a_sweep
from distexp.runs.run_dir import COMMAND, PROOF, PROOF_PAGE, RECORD, SPEC
from distexp.runs.run_state import RunState
from distexp.system.files import read_or_none
from distexp.system.typed_values import matches
from distexp.tables.columns import live_display, make_console

DIRECTORY_HELP = "directory of a sweep (default: the newest sweep below multirun_outputs)"


@dataclass(frozen=True)
class SweepStates:
    """The runs of one sweep."""

    directory: Path
    runs: list[RunState]  # The state of each run, by number.
    overrides: dict[int, str]  # The overrides in which each run differs from the others, by number.


@dataclass(frozen=True)
class FolderStates:
    """The sweeps in a folder; usually one, in the folder itself."""

    folder: Path
    sweeps: list[SweepStates]

    @property
    def runs(self) -> list[RunState]:
        """The states of all runs."""
        return [run for sweep in self.sweeps for run in sweep.runs]

    def rows(self) -> list[Row]:
        """Return the rows of the table. They have the folder of the sweep if there are several."""
        return [
            Row(run, sweep.overrides.get(run.number, "") if len(self.runs) > 1 else "", self.name_of(sweep))
            for sweep in self.sweeps
            for run in sweep.runs
        ]

    def name_of(self, sweep: SweepStates) -> str:
        """Return the path of a sweep below the folder; empty if there is only one sweep."""
        return str(sweep.directory.relative_to(self.folder)) if len(self.sweeps) > 1 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of every run.

    Return 0, or 2 if the directory is not a sweep; with --watch the exit code of the sweep or verification, or 130
    after Ctrl-C.
    """
    parser = CommandParser(prog="distexp status", description="Show the state of every run of a sweep.")
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=DIRECTORY_HELP)
    parser.add_argument("--watch", action="store_true", help="follow the runs until all have ended")
    options = parser.parse_args(arguments)
    directory = options.directory or choose_newest_sweep()
    console = make_console(piped_width=160)
    if is_verification(directory):
        while options.watch and attempts.is_locked(directory):
            time.sleep(FAST_POLL_S)
        for line in (summarize(directory), *sorted(directory.glob(f"*/{PROOF_PAGE}"))):
            print_text(str(line))
        results = set(_results_of(directory))
        if options.watch and results != {"equal"}:
            return 1 if "different" in results else 2
        return 0
    found = read_folder(directory)
    if not found.runs:
        print_error(not_a_sweep(directory, "run"))
        return 2
    if options.watch:
        directory = directory.absolute()
        launchers = launchers_of(directory, ExistingRuns.read(directory).runs)
        if queue := next((launcher for launcher, _ in launchers if launcher.queues), None):
            return _follow_queue(queue, directory, console)
        found = _wait_for_end(directory, console)
    _print_states(found, console)
    return 1 if options.watch and any(run.state in FAILURES for run in found.runs) else 0


def _follow_queue(launcher: Launcher, directory: Path, console: Console) -> int:
    try:
        launcher.follow(directory, console)
    except SweepFailedError:
        return 1
    except MonitoringInterrupted:
        return 130
    return 0


def _wait_for_end(directory: Path, console: Console) -> FolderStates:
    """Wait until no run is active, and return the final states. A terminal shows the table meanwhile."""
    started = time.monotonic()
    with live_display(console) as show:
        while True:
            found = read_folder(directory)
            if not any(run.is_active for run in found.runs):
                return found
            if show is not None:
                show(followed_states(found.rows(), console.width, time.monotonic() - started))
            time.sleep(FAST_POLL_S)


def _print_states(found: FolderStates, console: Console) -> None:
    rows = found.rows()
    with console.capture() as captured:
        console.print(states_table(rows, console.width))
    for line in captured.get().splitlines():
        print(line.rstrip(), file=console.file)  # Trailing spaces would fill a log file.
    notes = [f"{found.name_of(sweep)}: {line}" for sweep in found.sweeps for line in not_started(sweep)]
    below = (*hidden_lines(rows, console.width), *truncated_reasons(rows, console.width))
    for line in [*below, count_states(found.runs), *notes]:
        console.print(line.removeprefix(": "), highlight=False, markup=False, soft_wrap=True)


def read_folder(folder: Path) -> FolderStates:
    """Return the state of every run of the sweeps in a folder."""
    folder = folder.absolute()
    sweeps: dict[Path, list[ExistingRun]] = {folder: []}
    for run in ExistingRuns.read(folder).runs:
        sweeps.setdefault(_sweep_of(run.directory, folder), []).append(run)
    states = []
    for directory in sorted(sweeps):
        try:
            states.append(read_sweep(directory, sweeps[directory]))
        except OSError as error:  # One damaged or foreign sweep must not hide the others.
            if directory == folder:
                raise
            print(f"skipped: {printable(describe_os_error(error))}", file=sys.stderr)
    return FolderStates(folder, [sweep for sweep in states if sweep.runs])


def is_verification(folder: Path) -> bool:
    """Return whether a folder belongs to ``distexp verify``, which has no runs."""
    return bool(read_or_none(folder / COMMAND, "command") == Command.VERIFY)


def _results_of(folder: Path) -> list[str]:
    """Return the result of each proof of a verification: equal, different or not comparable."""
    return [str(read_or_none(file, "status")) for file in folder.glob(f"*/{PROOF}")]


def summarize(folder: Path) -> str:
    """Count the runs of each state; for ``distexp verify``, the strategies that are equal or different."""
    if not is_verification(folder):
        return count_states(read_folder(folder).runs) or "no run"
    if attempts.is_locked(folder):
        return "running"
    found = Counter(_results_of(folder))
    return ", ".join(f"{count} {status}" for status, count in found.items()) or "no result"


def read_ended_runs(folder: Path) -> FolderStates:
    """Return the states of the runs of one sweep, or of one run.

    Raise ConfigError if the folder is neither of them, or a link to one, or if a run or its command has not ended.
    """
    shown = printable(str(folder))
    if folder.is_symlink():
        raise ConfigError(f"{shown} is a link: give the folder to which it leads, {printable(os.readlink(folder))}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{shown} is a file: give the folder of a sweep or a run")
    if not folder.is_dir():
        raise ConfigError(f"{shown}: no such folder. 'distexp ls' lists the sweeps")
    if not any((folder / name).is_file() for name in (COMMAND, SPEC, RECORD)):
        hint = f"{suggest_command('ls', folder)} lists the sweeps below it"
        raise ConfigError(f"{shown} is not the folder of a sweep or a run of distexp: {hint}")
    found = read_folder(folder)
    if active := [run for run in found.runs if run.is_active]:
        runs = f"{format_runs([run.number for run in active])} {active[0].state}"
        command = suggest_command("cancel" if (folder / COMMAND).is_file() else "status", folder)
        raise ConfigError(f"{shown}: {runs}. Wait for the end, or type {command} first")
    if attempts.is_locked(folder):  # between two runs, and if the command has no runs, as distexp verify
        raise ConfigError(
            f"{shown}: its command is running. Wait for the end with {suggest_command('status', folder)} --watch, or "
            "end the command with Ctrl-C first"
        )
    return found


def _sweep_of(run_dir: Path, folder: Path) -> Path:
    """Return the directory of a run's sweep, or the folder above if no command file is found."""
    for directory in (run_dir, *run_dir.parents):
        if (directory / COMMAND).is_file():
            return directory
        if directory == folder:
            break
    return folder if run_dir == folder else run_dir.parent


def read_sweep(directory: Path, existing: Sequence[ExistingRun]) -> SweepStates:
    """Return the state of every run of a sweep, as reported by the launcher that has started it."""
    states = [
        state for launcher, runs in launchers_of(directory, existing) for state in launcher.states(directory, runs)
    ]
    runs = sorted(states, key=lambda run: run.number)
    shared = set.intersection(*(set(run.overrides) for run in existing)) if len(existing) > 1 else set()
    varied = {run.number: " ".join(text for text in run.overrides if text not in shared) for run in existing}
    return SweepStates(directory, runs, varied)


def not_started(sweep: SweepStates) -> Iterator[str]:
    """Yield ``8 not started`` if the sweep has more cells than runs, with the command unless others are active.

    Runs that ``distexp rm`` has deleted are named apart.
    """
    cells, removed = (read_or_none(sweep.directory / COMMAND, key) for key in ("cells", "deleted"))
    if not matches(cells, int):
        return
    names = set(removed) if matches(removed, list[str]) else set()
    deleted = sum(not (sweep.directory / name).exists() for name in names)
    left, again = cells - len(sweep.runs) - deleted, suggest_command("resume", sweep.directory)
    if deleted > 0:
        yield f"{deleted} deleted: {again} runs {'it' if deleted == 1 else 'them'} again"
    if left > 0:
        active = any(run.is_active for run in sweep.runs)
        yield f"{left} not started" + (" yet" if active else f": {again}")


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
