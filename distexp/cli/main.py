"""Entry point of ``distexp``: a sub-command, the help, the version, or a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distexp import __version__
from distexp.cli.commands import COMMANDS, run_command
from distexp.exceptions import run_until_pipe_closes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    The code is 0 on success, 1 if a run failed, 2 if the command line is wrong, and 128 + n after signal n.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and given[0] in COMMANDS else "run"
    rest = given[1:] if given[:1] == [name] else given
    return run_until_pipe_closes(lambda: _run(name, rest))


def _run(name: str, arguments: Sequence[str]) -> int:
    if name == "run" and {"-h", "--help"} & set(arguments):
        from distexp.cli.help import help_text

        print(help_text())
        return 0
    if name == "run" and "--version" in arguments:
        print(f"distexp {__version__}")
        return 0
    return run_command(name, arguments)
