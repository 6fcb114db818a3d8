"""Checks of single values against the limits in the schema.

The limits are declared in ``distexp.config.schema``. Checks of several keys together are in ``distexp.resolve``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from distexp.config import Config
from distexp.config.field_info import info_of
from distexp.config.key_info import sections


def check_values(config: Config) -> Iterator[str]:
    """Yield an error for each value that is wrong regardless of all other values."""
    for section in sections():
        yield from value_errors(section, getattr(config, section))
    if config.repeats < 1:
        yield f"repeats={config.repeats} must be at least 1"
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f"name={config.name} must be the name of one folder, without a slash"
    if not config.name.isprintable():
        yield f"name={config.name!r} contains a control character: use letters and digits"


def value_errors(name: str, section: Any) -> Iterator[str]:
    """Yield an error for each field of a section whose value is outside its own limits."""
    for spec in fields(section):
        value = getattr(section, spec.name)
        error = None if value is None else info_of(spec).find_error(value)
        if error is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            yield f"{name}.{spec.name}={shown} {error}"
