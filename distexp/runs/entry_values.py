"""Values of a record's free-form entries, which another program may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distexp.runs.typed_values import matches


def number_of(entry: Mapping[str, Any], key: str) -> float | None:
    """Return a number of an entry; None if it is missing or not a number."""
    value = entry.get(key)
    return float(value) if value is not None and matches(value, float) else None


def texts_of(entry: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of an entry, which may be one text or a list."""
    value = entry.get(key)
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if isinstance(text, str) and text]
