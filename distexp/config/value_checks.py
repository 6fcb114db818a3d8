"""Checks of single values against the limits in the schema.

The limits are declared in ``distexp.config.schema`` and in the sections that it imports. Checks of several keys are in
``distexp.resolve``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from distexp.config import Config
from distexp.config.field_info import FieldInfo, info_of
from distexp.config.key_info import sections

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. A line break would end an option of sbatch, and start a shell line."""

MAX_DIGITS = 18
"""Digits of an integer. More may not fit into the columns of a report, and a record with more is not read."""


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
        if isinstance(value, str) and CONTROL.search(value):
            yield f"{name}.{spec.name}={value!r} contains a control character: leave it out"
            continue
        error = None if value is None else _error(info_of(spec), value)
        if error is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            yield f"{name}.{spec.name}={shown} {error}"


def _error(info: FieldInfo, value: Any) -> str | None:
    error = info.find_error(value)
    if error is None and isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if error is None and isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        return f"has more than {MAX_DIGITS} digits: lower it"
    return error
