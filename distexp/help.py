"""``distexp help [NAME]``: print the usage of distexp or of a command, or the meaning of a group or a key."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distexp.cli.commands import COMMANDS, run_command
from distexp.cli.help import help_text
from distexp.cli.suggestions import suggest
from distexp.cli.topics import topic_names, topic_text
from distexp.exceptions import run_until_pipe_closes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the help and return the exit code; 2 if there is no such name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((text for text in given if not text.startswith("-")), "help")
    if name not in COMMANDS:
        return _print_topic(name)
    if name in ("help", "run"):
        print(help_text())
        return 0
    return run_command(name, ["--help"])


def _print_topic(name: str) -> int:
    text = topic_text(name)
    if text is None:
        hint = suggest(name, COMMANDS) or suggest(name, topic_names()) or ": see distexp help"
        print(f"distexp: {name} is not a command, a group or a key{hint}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
