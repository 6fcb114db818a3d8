"""Key and value of an override as text, such as ``train.max_steps=5`` or ``+cluster.environment.A=1``."""

from __future__ import annotations

from collections.abc import Iterable


def key_of(override: str) -> str:
    """Return the key of an override, without the ``+`` or ``~`` in front of it."""
    return override.partition("=")[0].lstrip("+~")


def value_of(override: str) -> str:
    """Return the value of an override as text, without quotes around it; empty if there is none."""
    return override.partition("=")[2].strip("'\"")


def sets_key(overrides: Iterable[str], key: str) -> bool:
    """Return whether one of some overrides sets a key."""
    return any(key_of(text) == key and "=" in text for text in overrides)
