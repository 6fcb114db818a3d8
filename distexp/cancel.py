"""Command ``distexp cancel [DIR]``: end the runs of a sweep. Each launcher ends those that it has started."""

import sys
from collections.abc import Sequence
from pathlib import Path

from distexp.cli.main import CommandParser
from distexp.config.overrides import format_count
from distexp.exceptions import print_error, print_text, run_until_pipe_closes
from distexp.launch.launcher import CancelError, launchers_of
from distexp.runs.record import ExistingRuns, choose_newest_sweep, not_a_sweep
from distexp.runs.run_dir import COMMAND
from distexp.status import DIRECTORY_HELP


def main(arguments: Sequence[str] | None = None) -> int:
    """End the runs of a sweep, and print how many; return 1 if one could not be ended, 2 if DIR is no sweep."""
    parser = CommandParser(prog="distexp cancel", description="End the runs of a sweep, on Slurm or on this machine.")
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=DIRECTORY_HELP)
    options = parser.parse_args(arguments)
    sweep_dir = options.directory or choose_newest_sweep()
    # A run shares its launcher, or its job, with its sweep. Below a larger folder, too many runs would end.
    if not (sweep_dir / COMMAND).is_file():
        print_error(not_a_sweep(sweep_dir, COMMAND))
        return 2
    launchers = launchers_of(sweep_dir, ExistingRuns.read(sweep_dir).runs)
    if not launchers:
        print_error(not_a_sweep(sweep_dir, "run"))
        return 2
    try:
        results = [launcher.cancel(sweep_dir, runs) for launcher, runs in launchers]
    except CancelError as error:
        print_error(error)
        return 1
    print(f"{format_count(sum(result.runs for result in results), 'run')} cancelled")
    for left in (line for result in results for line in result.left):
        print_text(left)
    errors = [line for result in results for line in result.errors]
    for line in errors:
        print_error(line)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
