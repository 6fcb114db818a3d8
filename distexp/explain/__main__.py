"""The command ``distexp explain [DIR] [DIR]``: what the time of a profiled step goes to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distexp.config import Command, ConfigError
from distexp.config.overrides import format_runs
from distexp.exceptions import run_until_pipe_closes
from distexp.explain.explanation import read_profiled_run, read_profiled_runs
from distexp.explain.output import print_comparison, print_explanations
from distexp.runs.record import choose_newest_sweep

DESCRIPTION = """Show what the steps of a profiled run spend their time on, and what would
make them faster. With two runs: why B is slower than A, part by part.
Profile a run, or all runs of a sweep, with profile=true.
A number chooses a run of the newest sweep: distexp explain 0 1"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the explanation of a run, of each run of a sweep, or of the difference of two runs; return 0 or 2."""
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
        directories = choose_directories(options.directories)
        if len(directories) == 2:
            print_comparison(*map(read_profiled_run, directories), as_json=options.json)
        else:
            print_explanations(read_profiled_runs(directories[0]), as_json=options.json)
    except ConfigError as error:
        for message in error.errors:
            print(f"distexp: {message}", file=sys.stderr)
        return 2
    return 0


def choose_directories(given: Sequence[Path]) -> list[Path]:
    """Return the directories, or the newest sweep if none is given. A number is a run of the newest sweep.

    Raise ConfigError if there is no sweep, or if it has no run with the number.
    """
    numbers = {path for path in given if str(path).isdecimal() and not path.is_dir()}
    if given and not numbers:
        return list(given)
    newest = choose_newest_sweep(leave_out=(Command.PREFLIGHT, Command.CHOOSE))
    for number in sorted(numbers):
        if not (newest / number).is_dir():
            runs = [int(path.name) for path in newest.iterdir() if path.is_dir() and path.name.isdecimal()]
            known = f"it has {format_runs(runs)}" if runs else "it has no run with a number"
            raise ConfigError(f"the newest sweep, {newest}, has no run {number}: {known}")
    return [newest / path if path in numbers else path for path in given] or [newest]


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
