"""Command ``distexp ls [FOLDER]``: the sweeps in a folder, the newest last, each with the states of its runs."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from distexp.cli.main import CommandParser
from distexp.config.overrides import copyable_command, format_count, is_sweep, path_argument, shell_quote
from distexp.exceptions import describe_os_error, print_error, print_text, run_until_pipe_closes
from distexp.runs.run_dir import COMMAND, OUTPUTS
from distexp.status import summarize
from distexp.system.files import read_or_none, walk
from distexp.system.typed_values import texts_of
from distexp.tables.columns import make_console, print_plain

MOST = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sweeps; return 2 if there are none."""
    parser = CommandParser(prog="distexp ls", description="List the sweeps in a folder, the newest last.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=Path(OUTPUTS))
    parser.add_argument("-n", type=int, metavar="N", default=MOST, help=f"show the newest N sweeps (default: {MOST})")
    options = parser.parse_args(arguments)
    if options.n < 1:
        print_error(f"-n {options.n} shows no sweep: write -n N with a number from 1")
        return 2
    found = (Path(folder, COMMAND) for folder, _, names in walk(options.folder) if COMMAND in names)
    files = sorted(filter(Path.is_file, found), key=lambda file: file.stat().st_mtime)
    if not files:
        problem = f"{options.folder} is a file" if options.folder.is_file() else f"no sweep below {options.folder}"
        print_error(f"{problem}: start a sweep, or give another folder")
        return 2
    shown = files[-options.n :]
    console = make_console()
    for file in shown:
        started = datetime.fromtimestamp(file.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        try:
            states = summarize(file.parent)
        except OSError as error:
            states = describe_os_error(error)
        print_plain(console, f"{file.parent}  {started}  {states}", style="bold")
        print_plain(console, f"    {_command(file)}")
    if len(files) > len(shown):
        older = format_count(len(files) - len(shown), "older sweep")
        print_text(f"{older}: distexp ls {shell_quote(path_argument(options.folder))} -n {len(files)}")
    return 0


def _command(file: Path) -> str:
    """Return the command line of a sweep, to copy."""
    name = read_or_none(file, "command") or "train"
    typed = texts_of({"words": read_or_none(file, "words")}, "words")
    if read_or_none(file, "cells") == 1 and not any(map(is_sweep, typed)):  # The option is stored for single runs too.
        typed = [text for text in typed if text != "--multirun"]
    start = "distexp" if name == "train" else f"distexp {name}"
    return copyable_command(typed, command=start, may_sweep=True)


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
