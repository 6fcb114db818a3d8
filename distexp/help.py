"""``distexp help [NAME]``: print the usage of distexp or of a command, or the meaning of a group or a key."""

import sys
from collections.abc import Sequence

from distexp.cli.errors import explain_option, suggest, suggest_key
from distexp.cli.help_topics import help_text, topic_names, topic_text
from distexp.cli.main import COMMANDS, run_command
from distexp.config.keys import config_groups, options_of
from distexp.exceptions import print_error, run_until_pipe_closes


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
    text = topic_text(name) or topic_text(name.lower())
    if text is None:
        group, equals, option = name.partition("=")
        if equals and group in config_groups():
            message = explain_option(group, option, options_of(group))
        else:
            hint = suggest(name, COMMANDS) or suggest_key(name.lower(), topic_names()) or ": see distexp help"
            message = f"{name} is not a command, a group or a key{hint}"
        print_error(message)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
