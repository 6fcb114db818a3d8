"""Checks of single values: each must be within the limits that its field in the schema declares."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.config.field_info import value_errors
from distexp.config.key_info import sections


def check_values(config: Config) -> Iterator[str]:
    """Yield an error for each value that is wrong regardless of all other values."""
    for section in sections():
        yield from value_errors(section, getattr(config, section))
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f"name={config.name} must be the name of one folder, without a slash"
