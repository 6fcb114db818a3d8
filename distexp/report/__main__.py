"""Command ``distexp report [DIR...] [--compare A B]``: reports on finished runs.

Exit codes: 0 written; 1 regression found by --compare, or unwritable files; 2 nothing to report on.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from distexp.config import Command, ConfigError
from distexp.exceptions import run_until_pipe_closes
from distexp.report.comparison import Comparison, ComparisonTable
from distexp.report.data.forecasts import keep_errors
from distexp.report.data.overview import Overview
from distexp.report.data.rows import Row, load_rows
from distexp.report.files import PAGE, PLOTS, write_files
from distexp.report.overview_table import OverviewTable
from distexp.runs.record import choose_newest_sweep
from distexp.runs.run_dir import RECORD, REPORT
from distexp.runs.spec import ExistingRuns
from distexp.runs.texts import describe_disk_error
from distexp.status import read_folder
from distexp.tables.columns import make_console

DIRECTORY_HELP = "directory of a run or a sweep (default: the newest sweep below multirun_outputs)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    if not options.directories and not options.compare:
        try:
            options.directories = [choose_newest_sweep(leave_out=(Command.PREFLIGHT,))]
        except ConfigError as error:
            return _print_error(str(error))
    missing = [path for path in (*options.directories, *(options.compare or ())) if not path.is_dir()]
    if missing:
        return _print_error(f"{', '.join(map(str, missing))}: no such directory. Give that of a run or a sweep")
    code = 0
    if options.directories:
        code = report(options.directories, options.trace)
    if options.open and options.directories and code == 0:
        page = (options.directories[0] / REPORT / PAGE).resolve()
        if not webbrowser.open(page.as_uri()):
            print(f"no browser on this machine: copy {page} to yours, and open it there")
    if options.compare and code != 2:
        code = max(code, compare(*options.compare))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distexp report",
        description="Print a table of the finished runs below DIR, at any depth, and write report.html, results.csv, "
        "results.md, results.parquet and plots/ into DIR/report. Several DIRs make one report, in the first of them.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=DIRECTORY_HELP)
    parser.add_argument("--open", action="store_true", help="open report.html in the browser")
    parser.add_argument(
        "--trace", metavar="RUN", nargs="+", default=[],
        help="draw these runs over time (labels from the column run) instead of the fastest and the smallest ones",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, type=Path,
        help="compare sweep B with sweep A; the exit code is 1 if there are regressions",
    )  # fmt: skip
    return parser


def report(directories: Sequence[Path], traced_runs: Sequence[str] = ()) -> int:
    """Print the table of some runs and write the files. Return the exit code."""
    for directory in directories:
        if any(run.status is None for run in ExistingRuns.read(directory).runs):
            read_folder(directory)  # It writes the records of runs whose launcher and agent were killed.
    rows, skipped = _load(directories)
    if not rows:
        return _no_records(directories)
    unknown = sorted(set(traced_runs) - {row.label for row in rows})
    if unknown:
        return _print_error(f"--trace {' '.join(unknown)}: no such run. Give labels such as {rows[0].label}")
    target = directories[0] / REPORT
    if link := next((path for path in (target, target / PLOTS) if path.is_symlink()), None):
        return _print_error(f"{link} is a link to another place, and a report is written to none: remove it")
    overview = Overview.from_rows(rows)
    keep_errors(overview)
    make_console().print(OverviewTable(overview, results=target / "results.csv"))
    try:
        written = write_files(overview, target, traced_runs, skipped)
    except OSError as error:
        print(f"distexp: cannot write to {target}: {describe_disk_error(error)}", file=sys.stderr)
        return 1
    parts = [path.relative_to(target).parts for path in written]
    names = sorted({f"{first}/" if rest else first for first, *rest in parts})
    print(f"written: {target}, {len(written)} files:", ", ".join(names))
    return 0


def compare(before: Path, after: Path) -> int:
    """Print the comparison of two sweeps. Return 1 if there are regressions."""
    rows_before, rows_after = _load([before])[0], _load([after])[0]
    if not rows_before or not rows_after:
        return _no_records([after if rows_before else before])
    comparison = Comparison.of(rows_before, rows_after)
    if not comparison.pairs:
        return _print_error(f"{before} and {after} have no configuration in common: nothing to compare")
    make_console().print(ComparisonTable(comparison, str(before), str(after)))
    return 1 if any(comparison.regressions()) else 0


def _load(directories: Sequence[Path]) -> tuple[list[Row], list[str]]:
    rows, skipped = load_rows(directories)
    messages = [f"skipped: {message}" for message in skipped]
    print(*messages, sep="\n", end="\n" if messages else "", file=sys.stderr)
    return rows, messages


def _no_records(directories: Sequence[Path]) -> int:
    return _print_error(
        f"no readable {RECORD} below {', '.join(map(str, directories))}: "
        "give the directory of a run or a sweep, such as multirun_outputs/distexp"
    )


def _print_error(message: str) -> int:
    print(f"distexp: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
