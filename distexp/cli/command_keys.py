"""Keys that only a sub-command reads, in commands that would ignore them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hydra.core.override_parser.types import Override

from distexp.cli.overrides import plain_value
from distexp.config import Command
from distexp.config.key_info import sections


class Reader(NamedTuple):
    """A sub-command that reads keys.

    Attributes:
        command: How it is typed.
        commands: Those that run it.
    """

    command: str
    commands: tuple[Command, ...]

    def example(self, key: str, override: str) -> str:
        """Return what to type for a key instead of an override."""
        return f"{self.command} {'--json' if key.endswith('.output') else override}"


CHOOSE = Reader("distexp choose", (Command.CHOOSE,))
FORECAST = Reader("distexp forecast RUN", (Command.FORECAST,))
PLAN = Reader("distexp plan", (Command.PLAN, Command.FORECAST))

READERS: Mapping[str, Reader] = {"choose": CHOOSE, "forecast": FORECAST, "plan.output": PLAN}
"""Sections and keys with the only command that reads them. The other keys of ``plan`` are for runs too."""


def ignored_keys(overrides: Sequence[Override], command: Command) -> Iterator[tuple[Override, str]]:
    """Yield each override that a command would ignore, with its error. An override with the default is none.

    Args:
        overrides: What the user has typed, and what a sub-command has added.
        command: The command that gets them.
    """
    for override in overrides:
        reader, text = reader_of(_key(override)), str(override.input_line)
        if reader is not None and command not in reader.commands and _differs(override):
            hint = f"type {reader.example(_key(override), text)}, or leave it out"
            yield override, f"{text} is for {reader.command} and has no effect here: {hint}"


def reader_of(key: str) -> Reader | None:
    """Return the only command that reads a key; None if runs read it."""
    return READERS.get(key) or READERS.get(key.partition(".")[0])


def _differs(override: Override) -> bool:
    """Return whether an override sets another value than the default. Hydra refuses a key that is unknown."""
    section, _, name = _key(override).partition(".")
    defaults = vars(sections()[section]())
    if not name:
        value = override.value()
        return isinstance(value, dict) and any(plain_value(item) != defaults.get(key) for key, item in value.items())
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return name in defaults and not override.is_delete() and any(plain_value(item) != defaults[name] for item in values)


def _key(override: Override) -> str:
    return str(override.key_or_group)
