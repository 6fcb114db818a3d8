"""Files of sweeps that distexp has written for this user. Those of others are not trusted.

A mark in the user's cache names the content of each ``command.json`` and of each snapshot's marker. A sweep from
somebody else has no mark, even in a copy that belongs to the user.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from distexp.config import ConfigError
from distexp.data.cache import cache_dir


def remember_file(path: Path) -> None:
    """Mark a file as this user's own; without a writable cache it stays foreign."""
    with suppress(OSError, ConfigError):
        mark = _mark(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_own_file(path: Path) -> bool:
    """Return whether distexp has written this content for this user."""
    with suppress(ConfigError):
        return path.is_file() and _mark(path).exists()
    return False


def _mark(path: Path) -> Path:
    return cache_dir() / "commands" / hashlib.sha256(path.read_bytes()).hexdigest()
