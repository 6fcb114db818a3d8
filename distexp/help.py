"""``distexp help [COMMAND]``: print the usage of distexp or of a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distexp.cli.commands import COMMANDS, run_command
from distexp.cli.help import help_text
from distexp.cli.suggestions import suggest
from distexp.exceptions import run_until_pipe_closes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the help and return the exit code; 2 if there is no such command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((text for text in given if not text.startswith("-")), "help")
    if name not in COMMANDS:
        print(f"distexp: {name} is not a command{suggest(name, COMMANDS) or ': see distexp help'}", file=sys.stderr)
        return 2
    if name in ("help", "run"):
        print(help_text())
        return 0
    return run_command(name, ["--help"])


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
