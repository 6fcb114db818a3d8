"""``python -m distexp.report DIR... [--open] [--compare A B]``: finished runs, from what they left on disk alone.

Exit codes: 0; 1 where --compare finds a regression or the files cannot be written; 2 where there is
nothing to report on.
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from distexp.exceptions import run_until_pipe_closes
from distexp.report.compare import Comparison, ComparisonTable
from distexp.report.data.overview import Overview
from distexp.report.data.rows import Row, load_rows
from distexp.report.files import PAGE, write_files
from distexp.report.table import OverviewTable
from distexp.runs.run_dir import RECORD, REPORT

PIPED_WIDTH = 240  # characters; a file or a pager has no edge


def main(arguments: Sequence[str] | None = None) -> int:
    """Reports, and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.directories and not options.compare:
        parser.error("give a folder to report on, or --compare A B")
    missing = [path for path in (*options.directories, *(options.compare or ())) if not path.is_dir()]
    if missing:
        return _nothing(f"{', '.join(map(str, missing))} is not a folder: give one that a sweep wrote")
    code = 0
    if options.directories:
        code = report(options.directories, options.trace)
    if options.open and options.directories and code == 0:
        webbrowser.open((options.directories[0] / REPORT / PAGE).resolve().as_uri())
    if options.compare and code != 2:
        code = max(code, compare(*options.compare))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distexp report",
        description="Compares finished runs by their records, found below DIR at any depth. "
        "Writes report.html, results.csv, results.md, results.parquet and plots/ into the first DIR's folder report.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path)
    parser.add_argument("--open", action="store_true", help="show report.html in the browser")
    parser.add_argument(
        "--trace", metavar="RUN", nargs="+", default=[],
        help="draw these runs over time (labels as in the table), instead of the most telling ones",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, type=Path,
        help="two sweeps side by side, B against A; exit code 1 where something became worse",
    )  # fmt: skip
    return parser


def report(directories: Sequence[Path], traced_runs: Sequence[str] = ()) -> int:
    """Shows and writes what some folders hold."""
    rows, skipped = _load(directories)
    if not rows:
        return _no_records(directories)
    unknown = sorted(set(traced_runs) - {row.label for row in rows})
    if unknown:
        return _nothing(f"--trace {' '.join(unknown)} names no run: give labels such as {rows[0].label}")
    overview = Overview.from_rows(rows)
    target = directories[0] / REPORT
    make_console().print(OverviewTable(overview, elsewhere=f"all of them are in {target / 'results.csv'}"))
    try:
        written = write_files(overview, target, traced_runs, skipped)
    except OSError as error:
        print(f"distexp: {target} cannot be written ({error.strerror}): the files are missing", file=sys.stderr)
        return 1
    print(f"written: {target}, {len(written)} files:", ", ".join(sorted({_place(path, target) for path in written})))
    return 0


def _place(path: Path, target: Path) -> str:
    """A file below a folder, or the folder there that it is in."""
    first, *rest = path.relative_to(target).parts
    return f"{first}/" if rest else first


def compare(before: Path, after: Path) -> int:
    """Shows two sweeps side by side; 1 where something became worse."""
    ours, theirs = _load([before])[0], _load([after])[0]
    for directory, rows in ((before, ours), (after, theirs)):
        if not rows:
            return _no_records([directory])
    comparison = Comparison.of(ours, theirs)
    if not comparison.pairs:
        return _nothing(f"no configuration of {before} is in {after}: nothing can be compared")
    make_console().print(ComparisonTable(comparison, str(before), str(after)))
    return 1 if any(comparison.regressions()) else 0


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for everything where there is none."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=PIPED_WIDTH)


def _load(directories: Sequence[Path]) -> tuple[list[Row], list[str]]:
    rows, skipped = load_rows(directories)
    sentences = [f"skipped: {sentence}" for sentence in skipped]
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return rows, sentences


def _no_records(directories: Sequence[Path]) -> int:
    return _nothing(
        f"no readable {RECORD} below {', '.join(map(str, directories))}: "
        "give a folder that a run or a sweep wrote, such as multirun_outputs/distexp"
    )


def _nothing(sentence: str) -> int:
    print(f"distexp: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
