"""``distexp help [NAME]``: print the usage of distexp or of a command, or the meaning of a group or a key."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from distexp.cli.errors import explain_option, suggest, suggest_key
from distexp.cli.help_topics import help_text, topic_names, topic_text
from distexp.cli.main import COMMANDS, run_command
from distexp.config.keys import config_groups, options_of
from distexp.exceptions import print_error, printable, run_until_pipe_closes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the help and return the exit code; 2 if there is no such name."""
    parser = ArgumentParser(prog="distexp help", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    known, given = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    name = next((text for text in given if not text.startswith("-")), "help")
    if name not in COMMANDS:
        return _print_topic(name, known.config_dir)
    if name in ("help", "run"):
        print(help_text())
        return 0
    return run_command(name, ["--help"])


def _print_topic(name: str, folder: Path | None) -> int:
    group, equals, option = name.partition("=")
    if folder is not None and not folder.is_dir():
        print_error(f"{folder} is no folder: give an existing one to --config-dir")
        return 2
    text = topic_text(name, folder) or topic_text(name.lower(), folder)
    if text is None:
        if equals and group in config_groups():
            message = explain_option(group, option, sorted({*options_of(group), *options_of(group, folder)}))
        else:
            hint = suggest(name, COMMANDS) or suggest_key(name.lower(), topic_names()) or ": see distexp help"
            message = f"{name} is not a command, a group or a key{hint}"
        print_error(message)
        return 2
    print(printable(text))
    return 0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
