"""Parser of the entries of ``choose.space``: ``KEY`` or ``KEY=VALUE,VALUE``."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import OverrideParseException

from distexp.choose.axis_keys import axis_of
from distexp.cli.overrides import parse
from distexp.config import ConfigError


@dataclass(frozen=True)
class SpaceEntry:
    """An entry of ``choose.space``.

    Attributes:
        text: The entry as typed.
        key: The axis, or another key to vary.
        values: Values to try; None for an entry without values.
    """

    text: str
    key: str
    values: tuple[str, ...] | None


def parse_entry(text: str) -> SpaceEntry:
    """Return the key and the values of an entry.

    Raises:
        ConfigError: the values have a syntax error.
    """
    key, equals, _ = text.partition("=")
    key = axis_of(key.strip())
    if not equals:
        return SpaceEntry(text, key, None)
    try:
        (override,) = parse([text])
    except OverrideParseException:
        raise ConfigError(f"choose.space: {text} cannot be read: write KEY=VALUE,VALUE") from None
    return SpaceEntry(text, key, _values(override))


def _values(override: Override) -> tuple[str, ...]:
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if len(values) == 1 and isinstance(values[0], list):  # ``KEY=[a,b]``
        values = values[0]
    return tuple(map(_as_typed, values))


def _as_typed(value: object) -> str:
    """Return a parsed value as a user would type it."""
    if isinstance(value, QuotedString):
        return str(value.text)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
