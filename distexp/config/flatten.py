"""Dotted keys of a nested configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", value)`` for each value of a nested mapping."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
